"""The stash: where the values between segments, and their gradients, live during a step.

A plan made before the run assigns each value a cell for as long as it is needed, so memory is known in advance and
reused. Cells are on the device, or, with `stash="host"`, on the host, from where they stream through a small ring of
device buffers. Device memory then grows neither with depth nor with the number of micro-batches. Values that three or
more segments use (masks, position tables) stay on the device: they grow with the number of micro-batches, but not
with depth.

Invariant: every access is ordered by events. A reader waits for the write, a writer for the readers before it. The
stash returns the events to wait for, takes the event that ends an access, and never blocks.
"""

from __future__ import annotations

import math
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
TIED_STATE = "tied gradients of each micro-batch"
SAVED_RING = 2
"""Device buffers for saved tensors that stream: one visit computes while the tensors of the next one arrive."""


class Key(NamedTuple):
    """A value (`gradient` False) or the gradient of one."""

    value: int
    gradient: bool


@dataclass
class Life:
    """The first and last visit of a step in which a key is used, its bytes, and whether it streams from the host.

    `saved` is True for the tensors that a segment saves for its own backward: large, and one for each visit. `tied` is
    True for the gradients of tied weights: as large as these weights.
    """

    first: int
    last: int
    size: int
    streams: bool
    saved: bool = False
    tied: bool = False


@dataclass
class StashPlan:
    """Which cell each key uses. Two keys share a cell only if their lives do not touch."""

    cell_of: dict[Key, int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    streams: list[bool] = field(default_factory=list)
    saved: list[bool] = field(default_factory=list)
    tied: list[bool] = field(default_factory=list)
    ring_size: int = 0
    ring_count: int = 0
    saved_ring_size: int = 0
    tied_ring_size: int = 0
    tied_ring_count: int = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes on the device for one micro-batch."""
        return sum(size for size, streams in zip(self.sizes, self.streams, strict=True) if not streams)

    @property
    def saved_resident_bytes(self) -> int:
        """Bytes on the device, of these, that hold tensors saved for the backward."""
        cells = zip(self.sizes, self.streams, self.saved, strict=True)
        return sum(size for size, streams, saved in cells if saved and not streams)

    @property
    def tied_resident_bytes(self) -> int:
        """Bytes on the device, of these, that hold gradients of tied weights."""
        cells = zip(self.sizes, self.streams, self.tied, strict=True)
        return sum(size for size, streams, tied in cells if tied and not streams)

    def streamed_bytes(self, tied: bool) -> int:
        """Bytes on the host for one micro-batch: for gradients of tied weights, or for all else."""
        cells = zip(self.sizes, self.streams, self.tied, strict=True)
        return sum(size for size, streams, of_ties in cells if streams and of_ties == tied)


def device_bytes(plans: Sequence[StashPlan]) -> int:
    """Bytes on the device for a step, given each micro-batch's plan: the rings are there for all."""
    return sum(plan.resident_bytes for plan in plans) + sum(size * count for size, count in _rings_of(plans))


def saved_bytes(plans: Sequence[StashPlan]) -> int:
    """Bytes on the device, of these, that hold tensors saved for the backward."""
    _, (size, count), _ = _rings_of(plans)
    return sum(plan.saved_resident_bytes for plan in plans) + size * count


def tied_bytes(plans: Sequence[StashPlan]) -> int:
    """Bytes on the device, of these, that hold gradients of tied weights."""
    _, _, (size, count) = _rings_of(plans)
    return sum(plan.tied_resident_bytes for plan in plans) + size * count


def host_bytes(plans: Sequence[StashPlan], tied: bool = False) -> int:
    """Bytes on the host for a step, given each micro-batch's plan: for gradients of tied weights, or for all else."""
    return sum(plan.streamed_bytes(tied) for plan in plans)


def _rings_of(plans: Sequence[StashPlan]) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """The size and the number of the buffers of each ring: for values between segments, saved tensors, tied weights."""
    saved = max(plan.saved_ring_size for plan in plans)
    return (
        (max(plan.ring_size for plan in plans), max(plan.ring_count for plan in plans)),
        (saved, SAVED_RING if saved else 0),
        (max(plan.tied_ring_size for plan in plans), max(plan.tied_ring_count for plan in plans)),
    )


def plan_stash(lives: dict[Key, Life], accesses_per_visit: int, tied_per_visit: int = 0) -> StashPlan:
    """Assign cells, first fit in order of first use.

    `accesses_per_visit` is the most streamed keys of one visit, `tied_per_visit` of those of tied weights.
    """
    plan = StashPlan()
    busy_until: list[int] = []
    for key, life in sorted(lives.items(), key=lambda item: item[1].first):
        size = aligned(life.size)
        for cell, last in enumerate(busy_until):
            free = last < life.first and plan.sizes[cell] == size
            kind = plan.streams[cell], plan.saved[cell], plan.tied[cell]
            if free and kind == (life.streams, life.saved, life.tied):
                break
        else:
            cell = len(plan.sizes)
            plan.sizes.append(size)
            plan.streams.append(life.streams)
            plan.saved.append(life.saved)
            plan.tied.append(life.tied)
            busy_until.append(-1)
        plan.cell_of[key] = cell
        busy_until[cell] = life.last
    for cell, size in enumerate(plan.sizes):
        if plan.streams[cell] and plan.saved[cell]:
            plan.saved_ring_size = max(plan.saved_ring_size, size)
        elif plan.streams[cell] and plan.tied[cell]:
            plan.tied_ring_size = max(plan.tied_ring_size, size)
            plan.tied_ring_count = 2 * tied_per_visit
        elif plan.streams[cell]:
            plan.ring_size = max(plan.ring_size, size)
            plan.ring_count = 2 * accesses_per_visit  # one visit computes while the next one's inputs arrive
    return plan


class _CellMemory:
    """One cell for one micro-batch: its memory, the ring it streams through, and the events that guard it."""

    __slots__ = ("buffer", "host", "readers", "ring", "state", "written")

    def __init__(self, buffer: Buffer | None, host: torch.Tensor | None, ring: _Ring, state: str) -> None:
        self.buffer = buffer
        self.host = host
        self.ring = ring
        self.state = state
        self.written: list[Event] = []
        self.readers: list[Event] = []


class _RingEntry:
    """One device buffer of the ring and the events after which it may be overwritten.

    `views` are kept by layout: the tensors, and the view of all of them that crosses the link.
    """

    __slots__ = ("buffer", "free_after", "views")

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.free_after: list[Event] = []
        self.views: dict[_Layout, tuple[tuple[View, ...], View]] = {}

    def views_of(self, layout: _Layout) -> tuple[tuple[View, ...], View]:
        """The tensors of a value with that layout, and the view of all of it that crosses the link."""
        found = self.views.get(layout)
        if found is None:
            views = tuple(self.buffer.view(field.offset, field.shape, field.dtype) for field in layout.fields)
            whole = self.buffer.view(0, layout.shape, layout.dtype) if layout.bundled else views[0]
            found = self.views[layout] = views, whole
        return found


@dataclass(frozen=True, eq=False)
class _Layout:
    """The layout of a value that streams: its tensors, and what crosses the link. `bundled` if it has several."""

    fields: tuple[Field, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    bundled: bool


class _Ring:
    """Device buffers through which cells stream, one after the other."""

    def __init__(self) -> None:
        self.entries: list[_RingEntry] = []
        self._next = 0

    def take(self) -> _RingEntry:
        """The next entry."""
        entry = self.entries[self._next]
        self._next = (self._next + 1) % len(self.entries)
        return entry


@dataclass(slots=True)
class Access:
    """One use of a key by one visit. The kernel waits for `waits`; pass its event to `finish`.

    `views` are the tensors of the value: one, or its parts.
    """

    stash: Stash
    cell: _CellMemory
    views: tuple[View, ...]
    waits: list[Event]
    writes: bool
    entry: _RingEntry | None = None
    transfer: tuple[View, torch.Tensor] | None = None

    @property
    def view(self) -> View:
        """The tensor of a value that has one."""
        return self.views[0]

    def part(self, first: int, shape: tuple[int, ...]) -> View:
        """A part of the value's tensor: as many elements as `shape` has, from element `first` on."""
        dtype = self.view.dtype
        start, size = first * dtype.itemsize, math.prod(shape) * dtype.itemsize
        memory = self.cell.buffer if self.entry is None else self.entry.buffer
        if memory is not None:
            return memory.view(start, shape, dtype)
        host = self.cell.host
        assert host is not None
        return self.stash.adopt(host[start : start + size].view(dtype).view(shape))

    def finish(self, event: Event) -> None:
        """Record the event that ends this use, and submit the transfer to the host of a value that streams."""
        cell = self.cell
        if self.entry is None:
            if self.writes:
                cell.written, cell.readers = [event], []
            else:
                cell.readers.append(event)
        elif self.writes:
            assert self.transfer is not None
            whole, host_copy = self.transfer
            sent = self.stash.queue_out.read(host_copy, whole, [event, *cell.written, *cell.readers])
            self.stash.transfers.append(sent)
            cell.written, cell.readers = [sent], []
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
        self._host_copies: dict[tuple[Key, int], torch.Tensor] = {}
        self._layouts: dict[tuple[Value, bool], _Layout] = {}
        self._known: dict[tuple[Any, ...], _Layout] = {}
        self._rings = _Ring(), _Ring(), _Ring()
        self._cells: list[list[_CellMemory]] = []
        try:
            for plan in plans:
                row: list[_CellMemory] = []
                self._cells.append(row)
                for size, streams, saved, tied in zip(plan.sizes, plan.streams, plan.saved, plan.tied, strict=True):
                    row.append(self._allocate_cell(size, streams, saved, tied))
            for ring, (size, count) in zip(self._rings, _rings_of(plans), strict=True):
                for _ in range(count):
                    ring.entries.append(_RingEntry(device.alloc(size, "ring of streamed activations")))
        except BaseException:
            self.free()
            raise

    def _allocate_cell(self, size: int, streams: bool, saved: bool, tied: bool) -> _CellMemory:
        ring, state = self._rings[2 if tied else 1 if saved else 0], TIED_STATE if tied else STASH_STATE
        if streams:
            return _CellMemory(None, self._host.alloc(size, torch.uint8, state, crosses=True), ring, state)
        return _CellMemory(self._device.alloc(size, state if tied else "stash of activations"), None, ring, state)

    def access(self, key: Key, microbatch: int, writes: bool, adds: bool = False) -> Access:
        """Use a key in a visit: read it, write it, or (with `writes` and `adds`) add to it."""
        cell = self._cells[microbatch][self.plans[microbatch].cell_of[key]]
        if cell.host is None or self._device.info.unified:
            views = self._views.get((key, microbatch))
            if views is None:
                views = self._views[(key, microbatch)] = self._views_of(cell, key, microbatch)
            waits = [*cell.written, *cell.readers] if writes else cell.written
            return Access(self, cell, views, waits, writes)
        entry = cell.ring.take()
        layout = self._layout_of(self._values[microbatch][key.value], key.gradient)
        views, whole = entry.views_of(layout)
        host_copy = self._host_copies.get((key, microbatch))
        if host_copy is None:
            host_copy = cell.host[: whole.size].view(layout.dtype).view(layout.shape)
            self._host_copies[(key, microbatch)] = host_copy
        waits = entry.free_after
        if adds or not writes:
            arrived = self.queue_in.write(whole, host_copy, [*cell.written, *entry.free_after])
            self.transfers.append(arrived)
            cell.readers.append(arrived)
            waits = [arrived]
        return Access(self, cell, views, waits, writes, entry, (whole, host_copy))

    def write_input(self, key: Key, microbatch: int, tensor: torch.Tensor) -> None:
        """Write a tensor of the batch into its cell, before anything of the step is submitted."""
        cell = self._cells[microbatch][self.plans[microbatch].cell_of[key]]
        if cell.host is not None and not self._device.info.unified:
            cell.host[: tensor.numel() * tensor.dtype.itemsize].view(tensor.dtype).copy_(tensor.view(-1))
            return
        access = self.access(key, microbatch, writes=True)
        event = self.queue_in.write(access.view, tensor, access.waits)
        self.transfers.append(event)
        access.finish(event)

    def adopt(self, tensor: torch.Tensor) -> View:
        """Host memory as a view of a unified device."""
        return self._device.adopt(tensor)

    def settle(self) -> None:
        """Forget all events. Everything submitted must have ended."""
        for row in self._cells:
            for cell in row:
                cell.written, cell.readers = [], []
        for ring in self._rings:
            for entry in ring.entries:
                entry.free_after = []
        self.transfers = []

    def free(self) -> None:
        """Free the memory."""
        for row in self._cells:
            for cell in row:
                if cell.buffer is not None:
                    cell.buffer.free()
                elif cell.host is not None:
                    self._host.free(cell.host, cell.state)
        for ring in self._rings:
            for entry in ring.entries:
                entry.buffer.free()
        self._cells, self._rings, self._views = [], (_Ring(), _Ring(), _Ring()), {}
        self._host_copies.clear()

    def _layout_of(self, value: Value, gradient: bool) -> _Layout:
        layout = self._layouts.get((value, gradient))
        if layout is None:
            fields, bundled = value.fields(gradient), bool(value.parts)
            made = _Layout(fields, value.shape if bundled else fields[0].shape, value.dtype, bundled)
            # Values of equal layout share one object, and with it the views.
            layout = self._known.setdefault((fields, made.shape, value.dtype, bundled), made)
            self._layouts[(value, gradient)] = layout
        return layout

    def _views_of(self, cell: _CellMemory, key: Key, microbatch: int) -> tuple[View, ...]:
        fields = self._values[microbatch][key.value].fields(key.gradient)
        if cell.buffer is not None:
            return tuple(cell.buffer.view(field.offset, field.shape, field.dtype) for field in fields)
        host = cell.host
        assert host is not None
        return tuple(
            self._device.adopt(host[field.offset : field.offset + field.size].view(field.dtype).view(field.shape))
            for field in fields
        )
