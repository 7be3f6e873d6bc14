"""The device slot: one layer-sized region of a device, and its life cycle.

A slot holds the parameters (and buffers) of one segment and its gradients, each in a contiguous region whose address
never changes. Its states are empty -> loading -> ready -> computing -> draining -> empty, and each change is an event.
The slot adds the waits that its own memory needs, so that a schedule cannot leave them out:

  * a kernel waits for the load, and, if it writes gradients, for the drain of the gradients before it;
  * a load waits for the load before it and for every kernel and transfer that still reads what it overwrites;
  * a drain waits for every kernel that writes the gradients, even if another segment was loaded since, and for the
    drain before it.

The gradients lie in a `GradientRegion`, which a slot has to itself or borrows from another slot. The waits belong to
the region, so slots that share one take turns.

A slot does not decide which segment it holds, nor when. Everything is freed by `free`, and by nothing else.

On a unified device nothing is transferred: the parameters are views of the host's memory. The regions are accounted all
the same, because an accelerator with memory of its own would need them.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence

import torch

from hal.device import Buffer, Device, KernelCall, Queue, View
from hal.event import Event
from hal.slot.layout import Field, SlotContent, chunks


class SlotState(enum.Enum):
    """The state of a slot, by the call that was submitted last (its work may not have ended)."""

    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"
    COMPUTING = "computing"
    DRAINING = "draining"


class Region:
    """A contiguous region of device memory, and its views, which layers alike have in common."""

    def __init__(self, device: Device, size: int, what: str) -> None:
        self.device = device
        self._buffer: Buffer = device.alloc(size, what)
        self._parts: dict[tuple[int, int], View] = {}  # by offset and bytes
        self._fields: dict[tuple[Field, ...], list[View]] = {}

    def part(self, start: int, part: torch.Tensor) -> View:
        """The bytes that a chunk goes to, or comes from."""
        view = self._parts.get((start, part.numel()))
        if view is None:
            view = self._parts[(start, part.numel())] = self._buffer.view(start, part.shape, part.dtype)
        return view

    def tensors(self, fields: tuple[Field, ...]) -> list[View]:
        """The tensors of a layout."""
        views = self._fields.get(fields)
        if views is None:
            views = [self._buffer.view(field.offset, field.shape, field.dtype) for field in fields]
            self._fields[fields] = views
        return views

    def free(self) -> None:
        """Free the memory."""
        self._buffer.free()
        self._parts.clear()
        self._fields.clear()


class GradientRegion(Region):
    """Device memory for the gradients of one layer at a time, and the events that guard it.

    Attributes:
        writers: kernels that wrote gradients which no drain has been submitted for.
        drained: after these events the gradients may be overwritten.
    """

    def __init__(self, device: Device, size: int, what: str) -> None:
        super().__init__(device, size, what)
        self.writers: list[Event] = []
        self.drained: list[Event] = []


class DeviceSlot:
    """A slot of a device.

    Args:
        device: the device, which allocates the memory.
        number: the number of the slot, for errors.
        parameter_size: bytes of the region for parameters and buffers.
        gradient_size: bytes of the region for gradients.
        region: a region for gradients that the slot borrows, instead of one of its own.
        what: the slot in words, for errors and logs.

    Raises:
        OutOfMemory: the regions do not fit.
    """

    def __init__(
        self,
        device: Device,
        number: int,
        parameter_size: int,
        gradient_size: int,
        region: GradientRegion | None = None,
        what: str = "",
    ) -> None:
        self.number = number
        self.what = what or f"slot {number}"
        self.state = SlotState.EMPTY
        self.content: SlotContent | None = None
        self.version = -1
        self._device = device
        self._parameters = Region(device, parameter_size, f"parameters of {self.what}")
        self.own_region: GradientRegion | None = None
        try:
            if region is None:
                region = self.own_region = GradientRegion(device, gradient_size, f"gradients of {self.what}")
            self.region = region
        except BaseException:
            self._parameters.free()
            raise
        # An entry lives as long as its content is referenced elsewhere.
        self._views: weakref.WeakKeyDictionary[SlotContent, tuple[list[View], list[View] | None]]
        self._views = weakref.WeakKeyDictionary()
        self._loaded: list[Event] = []
        self._readers: list[Event] = []
        self.parameters: list[View] = []
        self.gradients: list[View] = []

    def load(
        self,
        content: SlotContent,
        version: int,
        queue: Queue,
        wait: Sequence[Event] = (),
        stale: Sequence[int] | None = None,
    ) -> list[Event]:
        """Load a segment. If the slot holds this content in this version already, nothing is sent.

        Args:
            content: the segment.
            version: the version of its values, which changes with each update.
            queue: the queue of the transfers.
            wait: events after which the host's copy may be read.
            stale: the tensors that are sent, as ascending indices into the content's fields. The slot must hold the
                others already. None for all tensors.

        Returns:
            The events of the transfers.
        """
        if self.content is content and self.version == version:
            return self._loaded
        before = [*wait, *self._loaded, *self._readers]
        self.state = SlotState.LOADING
        self.parameters, self.gradients = self._views_of(content)
        unified = self._device.info.unified
        parts = (content.pieces if unified else content.parts) if stale is None else content.parts_of(stale)
        sources = [part for _, part in parts]
        if unified:
            targets = [self._device.adopt(part) for part in sources]
        else:
            targets = [self._parameters.part(start, part) for start, part in parts]
        self._loaded = [queue.write(target, source, before) for target, source in zip(targets, sources, strict=True)]
        # Where nothing was overwritten the next load still waits for the readers.
        self._readers = [] if self._loaded else before
        self.content = content
        self.version = version
        self.state = SlotState.READY
        return self._loaded

    def borrow(self, region: GradientRegion) -> None:
        """Write gradients to this region from now on. Those in the region before are drained or about to be."""
        if region is not self.region:
            self.region = region
            if self.content is not None:
                self.parameters, self.gradients = self._views_of(self.content)

    def exchange(self, content: SlotContent) -> None:
        """Hold another content with the same weights, such as that of an evaluation. Nothing is sent."""
        self.parameters, self.gradients = self._views_of(content)
        self.content = content

    def run(
        self,
        queue: Queue,
        call: KernelCall,
        wait: Sequence[Event],
        writes_gradients: bool,
    ) -> Event:
        """Run a kernel that reads this slot's parameters.

        Args:
            queue: the queue that runs it.
            call: the kernel and its memory.
            wait: events after which it runs, besides those of the slot.
            writes_gradients: whether it writes this slot's gradients.

        Returns:
            The event of the kernel's end.
        """
        self.state = SlotState.COMPUTING
        waits = [*self._loaded, *wait]
        if writes_gradients:
            waits += self.region.drained
        event = queue.run(call, waits)
        self._readers.append(event)
        if writes_gradients:
            self.region.writers.append(event)
        return event

    def drain(self, queue: Queue, targets: Sequence[tuple[torch.Tensor, View]], wait: Sequence[Event]) -> list[Event]:
        """Send gradients of the slot to the host, after the kernels submitted so far.

        Args:
            queue: the queue of the transfers.
            targets: pairs of host memory and the region that is sent to it.
            wait: further events after which the transfers run.

        Returns:
            The events of the transfers.
        """
        self.state = SlotState.DRAINING
        before = [*self.region.writers, *self._readers, *self.region.drained, *wait]
        self.region.writers = []
        self.region.drained = [queue.read(target, source, before) for target, source in targets]
        return self.region.drained

    def send(self, queue: Queue, targets: Sequence[tuple[torch.Tensor, View]]) -> list[Event]:
        """Send parameters or buffers of the slot to the host, after the kernels submitted so far; see `drain`."""
        before = [*self._loaded, *self._readers]
        sent = [queue.read(target, source, before) for target, source in targets]
        self._readers += sent
        return sent

    def hold_gradients(self, events: Sequence[Event]) -> None:
        """On a unified device: make the next kernel that writes gradients wait for these events of their readers."""
        self.state = SlotState.DRAINING
        self.region.writers = []
        self.region.drained = list(events)

    @property
    def loaded(self) -> list[Event]:
        """The transfers of the last load."""
        return self._loaded

    @property
    def computed(self) -> list[Event]:
        """The kernels submitted since the last load."""
        return self._readers

    def settle(self) -> None:
        """Drop the events of all work submitted so far. The caller has waited for its end."""
        self._loaded, self._readers = [], []
        if self.own_region is not None:
            self.own_region.writers, self.own_region.drained = [], []

    def flat_gradients(self, pieces: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[torch.Tensor, View]]:
        """The gradients that `drain` sends: host memory (bytes), and the part of the region from each offset on."""
        return [(part, self.region.part(at + start, part)) for at, piece in pieces for start, part in chunks(piece)]

    def free(self) -> None:
        """Free the memory, except a gradient region that is borrowed."""
        self._parameters.free()
        if self.own_region is not None:
            self.own_region.free()
        self.state = SlotState.EMPTY
        self.content = None
        self._views.clear()

    def _views_of(self, content: SlotContent) -> tuple[list[View], list[View]]:
        views = self._views.get(content)
        if views is None:
            if self._device.info.unified:
                parameters = [self._device.adopt(tensor) for tensor in content.tensors]
            else:
                parameters = self._parameters.tensors(content.fields)
            in_place = self._device.info.unified and bool(content.gradient_tensors)
            gradients = [self._device.adopt(tensor) for tensor in content.gradient_tensors] if in_place else None
            views = self._views[content] = (parameters, gradients)
        parameters, gradients = views
        return parameters, self.region.tensors(content.gradient_fields) if gradients is None else gradients
