"""The device slot: one layer-sized region of a device, and its life cycle.

A slot holds one segment's parameters (and buffers) and its gradients, each one contiguous region whose address
never changes. Its life is a circle: empty -> loading -> ready -> computing -> draining -> empty, each edge an
event. The slot knows the hazards of its own memory and adds the waits itself, so that a schedule cannot forget
them:

  * a kernel waits for the load, and, if it writes gradients, for the drain of the gradients before it;
  * a load waits for the load before it and for every kernel and transfer that still reads what it overwrites;
  * a drain waits for every kernel that writes the gradients, whatever was loaded since, and for the drain before it.

A slot does not decide which segment it holds, nor when.

On a unified device nothing moves: the parameters are views of the host's own memory. The regions are accounted all
the same, since they are what a device of its own would need.
"""

from __future__ import annotations

import enum
import functools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hal.device import Buffer, Device, KernelCall, Queue, View
from hal.event import Event

ALIGNMENT = 64
"""Bytes: tensors in a flat region start at multiples of it (a cache line, and a SIMD vector)."""


CHUNK = 32 * 2**20
"""Bytes: a transfer longer than this is cut, so that small ones (activations) are not stuck behind it on the link."""
SHORT_CHUNK = 16 * 2**20
"""Bytes that are worth a transfer: smaller layers, whose kernels are over sooner, are cut into pieces down to this."""
PIECES = 24
"""Pieces that a layer is cut into between those two limits."""


def aligned(size: int) -> int:
    """Bytes up to where the next tensor may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _chunks(flat: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """A flat tensor of bytes in pieces, with the offset of each."""
    size = flat.numel()
    chunk = min(max(SHORT_CHUNK, aligned(-(-size // PIECES))), CHUNK)
    return [(start, flat[start : start + chunk]) for start in range(0, size, chunk)] or [(0, flat)]


class SlotState(enum.Enum):
    """Where a slot is in its life, by what was submitted last (the work itself may still be under way)."""

    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"
    COMPUTING = "computing"
    DRAINING = "draining"


@dataclass(frozen=True)
class Field:
    """One tensor in a flat region: `offset` in bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return self.dtype.itemsize * math.prod(self.shape)


def lay_out(tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> tuple[tuple[Field, ...], int]:
    """Place tensors one after another, each aligned to ALIGNMENT. Returns the fields and the region's bytes."""
    fields = []
    offset = 0
    for shape, dtype in tensors:
        place = Field(offset, shape, dtype)
        fields.append(place)
        offset += aligned(place.size)
    return tuple(fields), offset


@dataclass(frozen=True, eq=False)
class SlotContent:
    """What a slot can hold: one segment, as it lies on the host.

    `pieces` are contiguous host tensors with the byte offset each goes to (one piece, one transfer); `tensors` are
    the same memory as typed tensors, in the order of `fields`. `gradient_fields` is the layout of its gradients.
    Where they are kept on the host, `gradient_pieces` and `gradient_tensors` are that memory in the same two ways;
    without it they only pass through.
    """

    name: str
    fields: tuple[Field, ...]
    size: int
    pieces: tuple[tuple[int, torch.Tensor], ...]
    tensors: tuple[torch.Tensor, ...]
    gradient_fields: tuple[Field, ...]
    gradient_size: int
    gradient_pieces: tuple[tuple[int, torch.Tensor], ...] = ()
    gradient_tensors: tuple[torch.Tensor, ...] = ()

    @functools.cached_property
    def parts(self) -> tuple[tuple[int, torch.Tensor], ...]:
        """The pieces as they are sent: cut into chunks, with the byte offset that each goes to."""
        return tuple((at + start, part) for at, piece in self.pieces for start, part in _chunks(piece))

    @functools.cached_property
    def gradient_sizes(self) -> tuple[int, ...]:
        """Bytes of each gradient."""
        return tuple(place.size for place in self.gradient_fields)

    def gradients_in(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The gradients as typed tensors over `flat`, host memory of at least `gradient_size` bytes."""
        return [
            flat[place.offset : place.offset + place.size].view(place.dtype).view(place.shape)
            for place in self.gradient_fields
        ]


class DeviceSlot:
    """One slot. Sizes are in bytes and fixed; `load` decides what is in it."""

    def __init__(self, device: Device, number: int, parameter_size: int, gradient_size: int) -> None:
        self.number = number
        self.state = SlotState.EMPTY
        self.content: SlotContent | None = None
        self.version = -1
        self._device = device
        self._parameters: Buffer = device.alloc(parameter_size, f"parameters of slot {number}")
        try:
            self._gradients: Buffer = device.alloc(gradient_size, f"gradients of slot {number}")
        except BaseException:
            self._parameters.free()
            raise
        # For as long as somebody else has a use for the content.
        self._views: weakref.WeakKeyDictionary[SlotContent, tuple[list[View], list[View]]] = weakref.WeakKeyDictionary()
        self._regions: dict[tuple[bool, int, int], View] = {}  # by whether of gradients, offset and bytes
        self._fields: dict[tuple[bool, tuple[Field, ...]], list[View]] = {}
        self._loaded: list[Event] = []
        self._readers: list[Event] = []
        self._writers: list[Event] = []
        self._drained: list[Event] = []
        self.parameters: list[View] = []
        self.gradients: list[View] = []

    def load(self, content: SlotContent, version: int, queue: Queue, wait: Sequence[Event] = ()) -> list[Event]:
        """Bring a segment in. `version` tells its contents apart in time; `wait` is what the host copy waits for.

        Returns the events of the transfers. The same content and version already there is not sent again.
        """
        if self.content is content and self.version == version:
            return self._loaded
        before = [*wait, *self._loaded, *self._readers]
        self.state = SlotState.LOADING
        self.parameters, self.gradients = self._views_of(content)
        if self._device.info.unified:
            targets = [self._device.adopt(piece) for _, piece in content.pieces]
            sources = [piece for _, piece in content.pieces]
        else:
            sources = [part for _, part in content.parts]
            targets = [self._region(False, start, part) for start, part in content.parts]
        self._loaded = [queue.write(target, source, before) for target, source in zip(targets, sources, strict=True)]
        # Where nothing was overwritten the next load still waits for whoever reads.
        self._readers = [] if self._loaded else before
        self.content = content
        self.version = version
        self.state = SlotState.READY
        return self._loaded

    def run(
        self,
        queue: Queue,
        call: KernelCall,
        wait: Sequence[Event],
        writes_gradients: bool,
    ) -> Event:
        """Run a kernel that reads this slot's parameters, and perhaps writes its gradients, on `queue`."""
        self.state = SlotState.COMPUTING
        waits = [*self._loaded, *wait]
        if writes_gradients:
            waits += self._drained
        event = queue.run(call, waits)
        self._readers.append(event)
        if writes_gradients:
            self._writers.append(event)
        return event

    def drain(self, queue: Queue, targets: Sequence[tuple[torch.Tensor, View]], wait: Sequence[Event]) -> list[Event]:
        """Send regions of the slot to the host, after the kernels run so far. Returns the events of the transfers."""
        self.state = SlotState.DRAINING
        before = [*self._writers, *self._readers, *self._drained, *wait]
        self._writers = []
        self._drained = [queue.read(target, source, before) for target, source in targets]
        return self._drained

    def send(self, queue: Queue, targets: Sequence[tuple[torch.Tensor, View]]) -> list[Event]:
        """Send parameters or buffers of the slot to the host, after the kernels run so far."""
        before = [*self._loaded, *self._readers]
        sent = [queue.read(target, source, before) for target, source in targets]
        self._readers += sent
        return sent

    def hold_gradients(self, events: Sequence[Event]) -> None:
        """On a unified device: whoever reads the gradients in place. The next writer waits for these events."""
        self.state = SlotState.DRAINING
        self._writers = []
        self._drained = list(events)

    @property
    def loaded(self) -> list[Event]:
        """The transfers of the last load."""
        return self._loaded

    @property
    def computed(self) -> list[Event]:
        """The kernels run since the last load."""
        return self._readers

    def settle(self) -> None:
        """Forget the events of work that is known to have ended."""
        self._loaded, self._readers, self._writers, self._drained = [], [], [], []

    def flat_gradients(self, pieces: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[torch.Tensor, View]]:
        """The gradients that `drain` sends: host memory (bytes), and the part of the region from each offset on."""
        return [(part, self._region(True, at + start, part)) for at, piece in pieces for start, part in _chunks(piece)]

    def free(self) -> None:
        """Give the memory back."""
        self._parameters.free()
        self._gradients.free()
        self.state = SlotState.EMPTY
        self.content = None
        self._views.clear()
        self._regions.clear()
        self._fields.clear()

    def _region(self, of_gradients: bool, start: int, part: torch.Tensor) -> View:
        """The bytes that a chunk goes to, or comes from. Layers alike have the same ones."""
        size = part.numel()
        view = self._regions.get((of_gradients, start, size))
        if view is None:
            buffer = self._gradients if of_gradients else self._parameters
            view = self._regions[(of_gradients, start, size)] = buffer.view(start, part.shape, part.dtype)
        return view

    def _views_in(self, of_gradients: bool, fields: tuple[Field, ...]) -> list[View]:
        """A buffer's tensors by a layout, which layers alike have in common."""
        views = self._fields.get((of_gradients, fields))
        if views is None:
            buffer = self._gradients if of_gradients else self._parameters
            views = [buffer.view(field.offset, field.shape, field.dtype) for field in fields]
            self._fields[(of_gradients, fields)] = views
        return views

    def _views_of(self, content: SlotContent) -> tuple[list[View], list[View]]:
        views = self._views.get(content)
        if views is None:
            if self._device.info.unified:
                parameters = [self._device.adopt(tensor) for tensor in content.tensors]
            else:
                parameters = self._views_in(False, content.fields)
            if self._device.info.unified and content.gradient_tensors:
                gradients = [self._device.adopt(tensor) for tensor in content.gradient_tensors]
            else:
                gradients = self._views_in(True, content.gradient_fields)
            views = self._views[content] = (parameters, gradients)
        return views
