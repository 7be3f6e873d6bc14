"""The stash: where the values between segments, and their gradients, live during a step.

A plan made before the run gives each value a cell for as long as it is needed, so memory is known in advance and
reused. Cells live on the device, or, with `stash="host"`, on the host, from where they stream through a small ring
of device buffers: then device memory does not grow with depth or with the number of micro-batches. Values that
three or more segments use (masks, position tables) stay on the device: they grow with the number of micro-batches,
but not with depth.

Every access is ordered by events: a reader waits for the write, a writer for the readers before it. The stash hands
out those events and is told of new ones; it never blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hal.device import Buffer, Device, Queue, View
from hal.event import Event
from hal.host import Host
from hal.slot import ALIGNMENT

STASH_STATE = "stash of boundary activations"


@dataclass(frozen=True)
class Key:
    """A value (`gradient` False) or the gradient of one."""

    value: int
    gradient: bool


@dataclass
class Life:
    """The first and last visit of a step in which a key is used, its bytes, and whether it streams from the host."""

    first: int
    last: int
    size: int
    streams: bool


@dataclass
class StashPlan:
    """Which cell each key uses. Two keys share a cell only if their lives do not touch."""

    cell_of: dict[Key, int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    streams: list[bool] = field(default_factory=list)
    ring_size: int = 0
    ring_count: int = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes on the device for one micro-batch."""
        return sum(size for size, streams in zip(self.sizes, self.streams, strict=True) if not streams)

    @property
    def streamed_bytes(self) -> int:
        """Bytes on the host for one micro-batch."""
        return sum(size for size, streams in zip(self.sizes, self.streams, strict=True) if streams)


def device_bytes(plans: Sequence[StashPlan]) -> int:
    """Bytes on the device for a step, given each micro-batch's plan: the ring is one for all."""
    return sum(plan.resident_bytes for plan in plans) + ring_of(plans)[0] * ring_of(plans)[1]


def host_bytes(plans: Sequence[StashPlan]) -> int:
    """Bytes on the host for a step, given each micro-batch's plan."""
    return sum(plan.streamed_bytes for plan in plans)


def ring_of(plans: Sequence[StashPlan]) -> tuple[int, int]:
    """The size of the ring's buffers, and how many there are."""
    return max(plan.ring_size for plan in plans), max(plan.ring_count for plan in plans)


def plan_stash(lives: dict[Key, Life], accesses_per_visit: int) -> StashPlan:
    """Assign cells, first fit in order of first use. `accesses_per_visit` is the most streamed keys of one visit."""
    plan = StashPlan()
    busy_until: list[int] = []
    for key, life in sorted(lives.items(), key=lambda item: item[1].first):
        size = -(-life.size // ALIGNMENT) * ALIGNMENT
        for cell, last in enumerate(busy_until):
            if last < life.first and plan.sizes[cell] == size and plan.streams[cell] == life.streams:
                break
        else:
            cell = len(plan.sizes)
            plan.sizes.append(size)
            plan.streams.append(life.streams)
            busy_until.append(-1)
        plan.cell_of[key] = cell
        busy_until[cell] = life.last
    streamed = [size for size, streams in zip(plan.sizes, plan.streams, strict=True) if streams]
    if streamed:
        plan.ring_size = max(streamed)
        plan.ring_count = 2 * accesses_per_visit  # one visit computes while the next one's inputs arrive
    return plan


class _Place:
    """One cell for one micro-batch: its memory and the events that guard it."""

    __slots__ = ("buffer", "host", "readers", "written")

    def __init__(self, buffer: Buffer | None, host: torch.Tensor | None) -> None:
        self.buffer = buffer
        self.host = host
        self.written: list[Event] = []
        self.readers: list[Event] = []


class _RingEntry:
    """One device buffer of the ring and the events after which it may be overwritten."""

    __slots__ = ("buffer", "free_after")

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.free_after: list[Event] = []


@dataclass(slots=True)
class Access:
    """One use of a key by one visit. The kernel waits for `waits`; `finish` is then given the kernel's event."""

    stash: Stash
    place: _Place
    view: View
    waits: list[Event]
    writes: bool
    entry: _RingEntry | None = None
    host_side: torch.Tensor | None = None

    def finish(self, event: Event) -> None:
        """Say which event ends this use."""
        place = self.place
        if self.entry is None:
            if self.writes:
                place.written, place.readers = [event], []
            else:
                place.readers.append(event)
        elif self.writes:
            assert self.host_side is not None
            sent = self.stash.queue_out.read(self.host_side, self.view, [event, *place.written, *place.readers])
            self.stash.transfers.append(sent)
            place.written, place.readers = [sent], []
            self.entry.free_after = [sent]
        else:
            self.entry.free_after = [event]


class Stash:
    """The memory of a step. Micro-batch j follows `plans[j]`, and `shapes[j]` gives its values' shapes."""

    def __init__(
        self,
        plans: Sequence[StashPlan],
        device: Device,
        host: Host,
        queue_in: Queue,
        queue_out: Queue,
        shapes: Sequence[Sequence[tuple[tuple[int, ...], torch.dtype]]],
    ) -> None:
        self.plans = list(plans)
        self.queue_in = queue_in
        self.queue_out = queue_out
        self.transfers: list[Event] = []
        self._device = device
        self._host = host
        self._shapes = shapes
        self._views: dict[tuple[Key, int], View] = {}
        self._ring: list[_RingEntry] = []
        self._next_entry = 0
        self._places: list[list[_Place]] = []
        try:
            for plan in plans:
                row: list[_Place] = []
                self._places.append(row)
                for size, streams in zip(plan.sizes, plan.streams, strict=True):
                    row.append(self._make_place(size, streams))
            ring_size, ring_count = ring_of(plans)
            for _ in range(ring_count):
                self._ring.append(_RingEntry(device.alloc(ring_size, "ring of streamed activations")))
        except BaseException:
            self.free()
            raise

    def _make_place(self, size: int, streams: bool) -> _Place:
        if streams:
            return _Place(None, self._host.alloc(size, torch.uint8, STASH_STATE, crosses=True))
        return _Place(self._device.alloc(size, "stash of activations"), None)

    def access(self, key: Key, microbatch: int, writes: bool, keeps: bool = False) -> Access:
        """Use a key in a visit: read it, or write it, or (`writes` and `keeps`) add to it."""
        place = self._places[microbatch][self.plans[microbatch].cell_of[key]]
        if place.host is None or self._device.info.unified:
            view = self._views.get((key, microbatch))
            if view is None:
                view = self._views[(key, microbatch)] = self._view(place, key, microbatch)
            waits = [*place.written, *place.readers] if writes else place.written
            return Access(self, place, view, waits, writes)
        shape, dtype = self._shapes[microbatch][key.value]
        entry = self._ring[self._next_entry]
        self._next_entry = (self._next_entry + 1) % len(self._ring)
        view = entry.buffer.view(0, shape, dtype)
        host_side = place.host[: view.size].view(dtype).view(shape)
        waits = entry.free_after
        if keeps or not writes:
            arrived = self.queue_in.write(view, host_side, [*place.written, *entry.free_after])
            self.transfers.append(arrived)
            place.readers.append(arrived)
            waits = [arrived]
        return Access(self, place, view, waits, writes, entry, host_side)

    def bring(self, key: Key, microbatch: int, tensor: torch.Tensor) -> None:
        """Write a tensor of the batch into its cell, before anything of the step is submitted."""
        place = self._places[microbatch][self.plans[microbatch].cell_of[key]]
        if place.host is not None and not self._device.info.unified:
            place.host[: tensor.numel() * tensor.dtype.itemsize].view(tensor.dtype).copy_(tensor.view(-1))
            return
        access = self.access(key, microbatch, writes=True)
        event = self.queue_in.write(access.view, tensor, access.waits)
        self.transfers.append(event)
        access.finish(event)

    def settle(self) -> None:
        """Forget all events: everything submitted has ended."""
        for row in self._places:
            for place in row:
                place.written, place.readers = [], []
        for entry in self._ring:
            entry.free_after = []
        self.transfers = []

    def free(self) -> None:
        """Give the memory back."""
        for row in self._places:
            for place in row:
                if place.buffer is not None:
                    place.buffer.free()
                elif place.host is not None:
                    self._host.free(place.host, STASH_STATE)
        for entry in self._ring:
            entry.buffer.free()
        self._places, self._ring, self._views = [], [], {}

    def _view(self, place: _Place, key: Key, microbatch: int) -> View:
        shape, dtype = self._shapes[microbatch][key.value]
        if place.buffer is not None:
            return place.buffer.view(0, shape, dtype)
        assert place.host is not None
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        return self._device.adopt(place.host[:size].view(dtype).view(shape))
