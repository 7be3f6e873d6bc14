"""The memory of the stash, and the events that guard it.

Cells are on a device, or, with `stash="host"`, on the host, from where they stream through a small ring of device
buffers. Device memory then grows neither with depth nor with the number of micro-batches. Values that three or more
segments use (masks, position tables) stay on the device: they grow with the number of micro-batches, but not with
depth.

With several lanes a value passes from device to device through the host. A streaming cell is read from the host by
whichever lane uses it next. A cell that stays on devices has a copy on each of its lanes: the lane that writes it sends
it to the host, and each other lane fetches it once, when it first reads it.

Invariant: every access is ordered by events. A reader waits for the write, a writer for the readers before it. The
stash returns the events to wait for, takes the event that ends an access, and never blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hal.device import Buffer, Device, Queue, View
from hal.event import Event
from hal.host import Host
from hal.slot.layout import Field
from relay.partition.segments import Value
from relay.runtime.stash.plan import STASH_STATE, TIED_STATE, CellKind, Key, StashPlan, rings_of


class StashQueues(NamedTuple):
    """A lane's device, and the queues on which values come to it and leave it."""

    device: Device
    queue_in: Queue
    queue_out: Queue


class _Copy:
    """The copy of a cell on one lane: its memory, None where it is the host's, and the events that guard it.

    `fresh` is False if another lane has written the value since.
    """

    __slots__ = ("buffer", "fresh", "readers", "written")

    def __init__(self, buffer: Buffer | None) -> None:
        self.buffer = buffer
        self.fresh = True
        self.written: list[Event] = []
        self.readers: list[Event] = []


class _Cell:
    """One cell for one micro-batch: its memory on the host, if any, with the events that guard it, and its copies.

    A cell without copies streams through the ring of its kind. `entry` is where the lane `writer` wrote it last.
    """

    __slots__ = ("copies", "entry", "host", "readers", "ring", "state", "writer", "written")

    def __init__(self, host: torch.Tensor | None, copies: dict[int, _Copy], ring: int, state: str) -> None:
        self.host = host
        self.copies = copies
        self.ring = ring
        self.state = state
        self.entry: _RingEntry | None = None
        self.writer = -1
        self.written: list[Event] = []
        self.readers: list[Event] = []


class _RingEntry:
    """One device buffer of the ring and the events after which it may be overwritten.

    `views` are kept by layout: the tensors, and the view of all of them that crosses the link. `written` is the kernel
    that made what it holds, of the cell `holds`, and `taken` when it was taken last, counted in takes of the ring.
    """

    __slots__ = ("buffer", "free_after", "holds", "taken", "views", "written")

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.free_after: list[Event] = []
        self.written: Event | None = None
        self.holds: _Cell | None = None
        self.taken = 0
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
        self._takes = 0

    def take(self) -> _RingEntry:
        """The next entry."""
        entry = self.entries[self._takes % len(self.entries)]
        self._takes += 1
        entry.taken, entry.holds = self._takes, None
        return entry

    def still_holds(self, cell: _Cell) -> bool:
        """Whether what was written last to a cell stays in its entry until all that a kernel uses is taken.

        A kernel takes at most half of the entries.
        """
        entry = cell.entry
        return entry is not None and entry.holds is cell and self._takes - entry.taken < len(self.entries) // 2


@dataclass(slots=True)
class Access:
    """One use of a key by one visit. The kernel waits for `waits`; pass its event to `finish`.

    `views` are the tensors of the value: one, or its parts. `transfer` is what passes between lane and host, if any.
    """

    stash: Stash
    cell: _Cell
    lane: int
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
        memory = self.cell.copies[self.lane].buffer if self.entry is None else self.entry.buffer
        if memory is not None:
            return memory.view(start, shape, dtype)
        host = self.cell.host
        assert host is not None
        return self.stash.adopt(self.lane, host[start : start + size].view(dtype).view(shape))

    def finish(self, event: Event) -> None:
        """Record the event that ends this use, and submit the transfer to the host of a value that leaves the lane."""
        if self.entry is None:
            copy = self.cell.copies[self.lane]
            if not self.writes:
                copy.readers.append(event)
                return
            copy.written, copy.readers = [event], []
            if self.transfer is not None:
                copy.readers.append(self._send([event]))
                for lane, other in self.cell.copies.items():
                    other.fresh = lane == self.lane
        elif self.writes:
            self.entry.free_after = [self._send([event])]
            self.entry.written, self.entry.holds = event, self.cell
            self.cell.entry, self.cell.writer = self.entry, self.lane
        elif self.transfer is None:
            self.entry.free_after.append(event)
        else:
            self.entry.free_after = [event]

    def _send(self, after: Sequence[Event]) -> Event:
        """Send what the lane has written to the host."""
        assert self.transfer is not None
        cell, (whole, host_copy) = self.cell, self.transfer
        sent = self.stash.lanes[self.lane].queue_out.read(host_copy, whole, [*after, *cell.written, *cell.readers])
        self.stash.transfers.append(sent)
        cell.written, cell.readers = [sent], []
        return sent


class Stash:
    """The memory of a step on some lanes. Micro-batch j follows `plans[j]`, and `values[j]` are its values.

    With `passes_on` a kernel reads what the kernel before it wrote where that is, and not from the host: for groups.
    """

    def __init__(
        self,
        plans: Sequence[StashPlan],
        lanes: Sequence[StashQueues],
        host: Host,
        values: Sequence[Sequence[Value]],
        passes_on: bool = False,
    ) -> None:
        self.plans = list(plans)
        self.lanes = list(lanes)
        self.transfers: list[Event] = []
        self._host = host
        self._values = values
        self._passes_on = passes_on
        self._views: dict[tuple[Key, int, int], tuple[View, ...]] = {}
        self._transfers: dict[tuple[Key, int, int], tuple[View, torch.Tensor]] = {}
        self._host_copies: dict[tuple[Key, int], torch.Tensor] = {}
        self._layouts: dict[tuple[Value, bool], _Layout] = {}
        self._known: dict[tuple[Any, ...], _Layout] = {}
        self._rings = [(_Ring(), _Ring(), _Ring()) for _ in lanes]
        self._cells: list[list[_Cell]] = []
        try:
            for plan in plans:
                row: list[_Cell] = []
                self._cells.append(row)
                for kind in plan.cells:
                    self._allocate_cell(kind, row)
            for lane, rings in zip(self.lanes, self._rings, strict=True):
                for ring, (size, count) in zip(rings, rings_of(plans), strict=True):
                    for _ in range(count):
                        ring.entries.append(_RingEntry(lane.device.alloc(size, "ring of streamed activations")))
        except BaseException:
            self.free()
            raise

    def _allocate_cell(self, kind: CellKind, row: list[_Cell]) -> None:
        """Add a cell to the row. What is allocated of it is in the row, if an error is raised."""
        state = TIED_STATE if kind.tied else STASH_STATE
        host = self._host.alloc(kind.size, torch.uint8, state, crosses=True) if kind.on_host else None
        cell = _Cell(host, {}, 2 if kind.tied else 1 if kind.saved else 0, state)
        row.append(cell)
        if kind.streams and self.lanes[0].device.info.unified:
            cell.copies[0] = _Copy(None)
        for lane in kind.lanes:
            name = state if kind.tied else "stash of activations"
            cell.copies[lane] = _Copy(self.lanes[lane].device.alloc(kind.size, name))

    def access(self, key: Key, microbatch: int, lane: int, writes: bool, adds: bool = False) -> Access:
        """Use a key in a visit on a lane: read it, write it, or (with `writes` and `adds`) add to it."""
        cell = self._cells[microbatch][self.plans[microbatch].cell_of[key]]
        takes = adds or not writes
        if cell.copies:
            return self._access_copy(cell, key, microbatch, lane, writes, takes)
        ring = self._rings[lane][cell.ring]
        layout = self._layout_of(self._values[microbatch][key.value], key.gradient)
        if self._passes_on and not writes and cell.writer == lane and ring.still_holds(cell):
            # A kernel just before wrote it, in a group: it is still in the ring.
            entry = cell.entry
            assert entry is not None
            assert entry.written is not None
            return Access(self, cell, lane, entry.views_of(layout)[0], [entry.written], False, entry)
        entry = ring.take()
        views, whole = entry.views_of(layout)
        host_copy = self._host_copy(cell, key, microbatch, layout, whole.size)
        waits = entry.free_after
        if takes:
            arrived = self.lanes[lane].queue_in.write(whole, host_copy, [*cell.written, *entry.free_after])
            self.transfers.append(arrived)
            cell.readers.append(arrived)
            waits = [arrived]
        return Access(self, cell, lane, views, waits, writes, entry, (whole, host_copy))

    def _access_copy(self, cell: _Cell, key: Key, row: int, lane: int, writes: bool, takes: bool) -> Access:
        """Use the copy of a lane. What it `takes` of another lane comes from the host."""
        copy = cell.copies[lane]
        known = key, row, lane
        views = self._views.get(known)
        if views is None:
            views = self._views[known] = self._views_of(cell, key, row, lane)
        transfer = None
        if len(cell.copies) > 1:
            transfer = self._transfers.get(known) or self._transfer_of(cell, key, row, lane)
            if takes and not copy.fresh:
                whole, host_copy = transfer
                arrived = self.lanes[lane].queue_in.write(
                    whole, host_copy, [*cell.written, *copy.written, *copy.readers]
                )
                self.transfers.append(arrived)
                cell.readers.append(arrived)
                copy.written, copy.readers, copy.fresh = [arrived], [], True
        waits = [*copy.written, *copy.readers] if writes else copy.written
        return Access(self, cell, lane, views, waits, writes, None, transfer)

    def write_input(self, key: Key, microbatch: int, tensor: torch.Tensor) -> None:
        """Write a tensor of the batch into its cell, before anything of the step is submitted."""
        cell = self._cells[microbatch][self.plans[microbatch].cell_of[key]]
        if cell.host is not None and not self.lanes[0].device.info.unified:
            cell.host[: tensor.numel() * tensor.dtype.itemsize].view(tensor.dtype).copy_(tensor.view(-1))
            for copy in cell.copies.values():
                copy.fresh = False
            return
        lane = next(iter(cell.copies))
        access = self.access(key, microbatch, lane, writes=True)
        event = self.lanes[lane].queue_in.write(access.view, tensor, access.waits)
        self.transfers.append(event)
        access.finish(event)

    def last_written(self, key: Key, microbatch: int) -> int:
        """A lane that has the latest value of a key that stays on devices."""
        cell = self._cells[microbatch][self.plans[microbatch].cell_of[key]]
        return next((lane for lane, copy in cell.copies.items() if copy.fresh), 0)

    def adopt(self, lane: int, tensor: torch.Tensor) -> View:
        """Host memory as a view of a unified device."""
        return self.lanes[lane].device.adopt(tensor)

    def settle(self) -> None:
        """Forget all events. Everything submitted must have ended."""
        for row in self._cells:
            for cell in row:
                cell.written, cell.readers, cell.entry = [], [], None
                for copy in cell.copies.values():
                    copy.written, copy.readers = [], []
        for rings in self._rings:
            for ring in rings:
                for entry in ring.entries:
                    entry.free_after = []
        self.transfers = []

    def free(self) -> None:
        """Free the memory."""
        for row in self._cells:
            for cell in row:
                for copy in cell.copies.values():
                    if copy.buffer is not None:
                        copy.buffer.free()
                if cell.host is not None:
                    self._host.free(cell.host, cell.state)
        for rings in self._rings:
            for ring in rings:
                for entry in ring.entries:
                    entry.buffer.free()
        self._cells, self._rings = [], []
        for known in (self._views, self._transfers, self._host_copies):
            known.clear()

    def _transfer_of(self, cell: _Cell, key: Key, row: int, lane: int) -> tuple[View, torch.Tensor]:
        """The whole value on a lane and on the host."""
        layout = self._layout_of(self._values[row][key.value], key.gradient)
        buffer = cell.copies[lane].buffer
        assert buffer is not None
        whole = buffer.view(0, layout.shape, layout.dtype)
        transfer = whole, self._host_copy(cell, key, row, layout, whole.size)
        self._transfers[key, row, lane] = transfer
        return transfer

    def _host_copy(self, cell: _Cell, key: Key, row: int, layout: _Layout, size: int) -> torch.Tensor:
        """The value's memory on the host."""
        found = self._host_copies.get((key, row))
        if found is None:
            assert cell.host is not None
            found = cell.host[:size].view(layout.dtype).view(layout.shape)
            self._host_copies[key, row] = found
        return found

    def _layout_of(self, value: Value, gradient: bool) -> _Layout:
        layout = self._layouts.get((value, gradient))
        if layout is None:
            fields, bundled = value.fields(gradient), bool(value.parts)
            made = _Layout(fields, value.shape if bundled else fields[0].shape, value.dtype, bundled)
            # Values of equal layout share one object, and with it the views.
            layout = self._known.setdefault((fields, made.shape, value.dtype, bundled), made)
            self._layouts[(value, gradient)] = layout
        return layout

    def _views_of(self, cell: _Cell, key: Key, microbatch: int, lane: int) -> tuple[View, ...]:
        fields = self._values[microbatch][key.value].fields(key.gradient)
        buffer, host = cell.copies[lane].buffer, cell.host
        if buffer is not None:
            return tuple(buffer.view(field.offset, field.shape, field.dtype) for field in fields)
        assert host is not None
        return tuple(
            self.adopt(lane, host[field.offset : field.offset + field.size].view(field.dtype).view(field.shape))
            for field in fields
        )
