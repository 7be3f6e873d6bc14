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
from typing import Any, NamedTuple

import torch

from hal.device import Buffer, Device, Queue, View
from hal.event import Event
from hal.host import Host
from hal.slot import Field, aligned
from relay.partition.segments import Value

STASH_STATE = "stash of boundary activations"
KEPT_RING = 2
"""Device buffers for what streams of the tensors that segments keep: one computes while the next one's arrive."""


class Key(NamedTuple):
    """A value (`gradient` False) or the gradient of one."""

    value: int
    gradient: bool


@dataclass
class Life:
    """The first and last visit of a step in which a key is used, its bytes, and whether it streams from the host.

    `kept` where it holds what a segment keeps for its own backward: large, and one a visit.
    """

    first: int
    last: int
    size: int
    streams: bool
    kept: bool = False


@dataclass
class StashPlan:
    """Which cell each key uses. Two keys share a cell only if their lives do not touch."""

    cell_of: dict[Key, int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    streams: list[bool] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    ring_size: int = 0
    ring_count: int = 0
    kept_ring_size: int = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes on the device for one micro-batch."""
        return sum(size for size, streams in zip(self.sizes, self.streams, strict=True) if not streams)

    @property
    def kept_resident_bytes(self) -> int:
        """Bytes on the device, of these, that hold what segments keep for their backward."""
        cells = zip(self.sizes, self.streams, self.kept, strict=True)
        return sum(size for size, streams, kept in cells if kept and not streams)

    @property
    def streamed_bytes(self) -> int:
        """Bytes on the host for one micro-batch."""
        return sum(size for size, streams in zip(self.sizes, self.streams, strict=True) if streams)


def device_bytes(plans: Sequence[StashPlan]) -> int:
    """Bytes on the device for a step, given each micro-batch's plan: the rings are there for all."""
    return sum(plan.resident_bytes for plan in plans) + sum(size * count for size, count in _rings_of(plans))


def kept_bytes(plans: Sequence[StashPlan]) -> int:
    """Bytes on the device, of these, that hold what segments keep for their backward."""
    _, (size, count) = _rings_of(plans)
    return sum(plan.kept_resident_bytes for plan in plans) + size * count


def host_bytes(plans: Sequence[StashPlan]) -> int:
    """Bytes on the host for a step, given each micro-batch's plan."""
    return sum(plan.streamed_bytes for plan in plans)


def _rings_of(plans: Sequence[StashPlan]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The size and the number of the buffers of both rings: of what passes between segments, and of what is kept."""
    kept = max(plan.kept_ring_size for plan in plans)
    return (
        (max(plan.ring_size for plan in plans), max(plan.ring_count for plan in plans)),
        (kept, KEPT_RING if kept else 0),
    )


def plan_stash(lives: dict[Key, Life], accesses_per_visit: int) -> StashPlan:
    """Assign cells, first fit in order of first use. `accesses_per_visit` is the most streamed keys of one visit."""
    plan = StashPlan()
    busy_until: list[int] = []
    for key, life in sorted(lives.items(), key=lambda item: item[1].first):
        size = aligned(life.size)
        for cell, last in enumerate(busy_until):
            free = last < life.first and plan.sizes[cell] == size
            if free and plan.streams[cell] == life.streams and plan.kept[cell] == life.kept:
                break
        else:
            cell = len(plan.sizes)
            plan.sizes.append(size)
            plan.streams.append(life.streams)
            plan.kept.append(life.kept)
            busy_until.append(-1)
        plan.cell_of[key] = cell
        busy_until[cell] = life.last
    for cell, size in enumerate(plan.sizes):
        if plan.streams[cell] and plan.kept[cell]:
            plan.kept_ring_size = max(plan.kept_ring_size, size)
        elif plan.streams[cell]:
            plan.ring_size = max(plan.ring_size, size)
            plan.ring_count = 2 * accesses_per_visit  # one visit computes while the next one's inputs arrive
    return plan


class _Place:
    """One cell for one micro-batch: its memory, the ring it streams through, and the events that guard it."""

    __slots__ = ("buffer", "host", "readers", "ring", "written")

    def __init__(self, buffer: Buffer | None, host: torch.Tensor | None, ring: _Ring) -> None:
        self.buffer = buffer
        self.host = host
        self.ring = ring
        self.written: list[Event] = []
        self.readers: list[Event] = []


class _RingEntry:
    """One device buffer of the ring and the events after which it may be overwritten.

    `views` are those made of it: by layout the tensors, and the whole that crosses the link.
    """

    __slots__ = ("buffer", "free_after", "views")

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.free_after: list[Event] = []
        self.views: dict[_Layout, tuple[tuple[View, ...], View]] = {}

    def views_of(self, layout: _Layout) -> tuple[tuple[View, ...], View]:
        """The tensors of a value that lies so, and the whole that crosses the link."""
        found = self.views.get(layout)
        if found is None:
            views = tuple(self.buffer.view(one.offset, one.shape, one.dtype) for one in layout.fields)
            whole = self.buffer.view(0, layout.shape, layout.dtype) if layout.bundled else views[0]
            found = self.views[layout] = views, whole
        return found


@dataclass(frozen=True, eq=False)
class _Layout:
    """How values that stream lie: their tensors, and what crosses the link; `bundled` where these are several."""

    fields: tuple[Field, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    bundled: bool


class _Ring:
    """Device buffers through which cells stream, in turn."""

    def __init__(self) -> None:
        self.entries: list[_RingEntry] = []
        self._next = 0

    def take(self) -> _RingEntry:
        """The entry whose turn it is."""
        entry = self.entries[self._next]
        self._next = (self._next + 1) % len(self.entries)
        return entry


@dataclass(slots=True)
class Access:
    """One use of a key by one visit. The kernel waits for `waits`; `finish` is then given the kernel's event.

    `views` are the tensors of the value: one, or its parts.
    """

    stash: Stash
    place: _Place
    views: tuple[View, ...]
    waits: list[Event]
    writes: bool
    entry: _RingEntry | None = None
    transfer: tuple[View, torch.Tensor] | None = None

    @property
    def view(self) -> View:
        """The tensor of a value that is one."""
        return self.views[0]

    def finish(self, event: Event) -> None:
        """Say which event ends this use."""
        place = self.place
        if self.entry is None:
            if self.writes:
                place.written, place.readers = [event], []
            else:
                place.readers.append(event)
        elif self.writes:
            assert self.transfer is not None
            whole, host_side = self.transfer
            sent = self.stash.queue_out.read(host_side, whole, [event, *place.written, *place.readers])
            self.stash.transfers.append(sent)
            place.written, place.readers = [sent], []
            self.entry.free_after = [sent]
        else:
            self.entry.free_after = [event]


class Stash:
    """The memory of a step. Micro-batch j follows `plans[j]`, and `values[j]` are its values."""

    def __init__(
        self,
        plans: Sequence[StashPlan],
        device: Device,
        host: Host,
        queue_in: Queue,
        queue_out: Queue,
        values: Sequence[Sequence[Value]],
    ) -> None:
        self.plans = list(plans)
        self.queue_in = queue_in
        self.queue_out = queue_out
        self.transfers: list[Event] = []
        self._device = device
        self._host = host
        self._values = values
        self._views: dict[tuple[Key, int], tuple[View, ...]] = {}
        self._host_sides: dict[tuple[Key, int], torch.Tensor] = {}
        self._layouts: dict[tuple[Value, bool], _Layout] = {}
        self._known: dict[tuple[Any, ...], _Layout] = {}
        self._ring, self._kept_ring = _Ring(), _Ring()
        self._places: list[list[_Place]] = []
        try:
            for plan in plans:
                row: list[_Place] = []
                self._places.append(row)
                for size, streams, kept in zip(plan.sizes, plan.streams, plan.kept, strict=True):
                    row.append(self._make_place(size, streams, self._kept_ring if kept else self._ring))
            rings = _rings_of(plans)
            for ring, (size, count) in zip((self._ring, self._kept_ring), rings, strict=True):
                for _ in range(count):
                    ring.entries.append(_RingEntry(device.alloc(size, "ring of streamed activations")))
        except BaseException:
            self.free()
            raise

    def _make_place(self, size: int, streams: bool, ring: _Ring) -> _Place:
        if streams:
            return _Place(None, self._host.alloc(size, torch.uint8, STASH_STATE, crosses=True), ring)
        return _Place(self._device.alloc(size, "stash of activations"), None, ring)

    def access(self, key: Key, microbatch: int, writes: bool, keeps: bool = False) -> Access:
        """Use a key in a visit: read it, or write it, or (`writes` and `keeps`) add to it."""
        place = self._places[microbatch][self.plans[microbatch].cell_of[key]]
        if place.host is None or self._device.info.unified:
            views = self._views.get((key, microbatch))
            if views is None:
                views = self._views[(key, microbatch)] = self._views_of(place, key, microbatch)
            waits = [*place.written, *place.readers] if writes else place.written
            return Access(self, place, views, waits, writes)
        entry = place.ring.take()
        layout = self._layout_of(self._values[microbatch][key.value], key.gradient)
        views, whole = entry.views_of(layout)
        host_side = self._host_sides.get((key, microbatch))
        if host_side is None:
            host_side = place.host[: whole.size].view(layout.dtype).view(layout.shape)
            self._host_sides[(key, microbatch)] = host_side
        waits = entry.free_after
        if keeps or not writes:
            arrived = self.queue_in.write(whole, host_side, [*place.written, *entry.free_after])
            self.transfers.append(arrived)
            place.readers.append(arrived)
            waits = [arrived]
        return Access(self, place, views, waits, writes, entry, (whole, host_side))

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
        for entry in (*self._ring.entries, *self._kept_ring.entries):
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
        for entry in (*self._ring.entries, *self._kept_ring.entries):
            entry.buffer.free()
        self._places, self._ring, self._kept_ring, self._views = [], _Ring(), _Ring(), {}
        self._host_sides.clear()

    def _layout_of(self, value: Value, gradient: bool) -> _Layout:
        layout = self._layouts.get((value, gradient))
        if layout is None:
            fields, bundled = value.fields(gradient), bool(value.parts)
            made = _Layout(fields, value.shape if bundled else fields[0].shape, value.dtype, bundled)
            # Values alike share one, and with it the views.
            layout = self._known.setdefault((fields, made.shape, value.dtype, bundled), made)
            self._layouts[(value, gradient)] = layout
        return layout

    def _views_of(self, place: _Place, key: Key, microbatch: int) -> tuple[View, ...]:
        fields = self._values[microbatch][key.value].fields(key.gradient)
        if place.buffer is not None:
            return tuple(place.buffer.view(field.offset, field.shape, field.dtype) for field in fields)
        host = place.host
        assert host is not None
        return tuple(
            self._device.adopt(host[one.offset : one.offset + one.size].view(one.dtype).view(one.shape))
            for one in fields
        )
