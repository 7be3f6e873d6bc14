"""The plan of the stash: which cell each value and each gradient uses, and how many bytes that takes where.

A plan is made before the run and assigns each value a cell for as long as it is needed, so memory is known in advance
and reused. Nothing is allocated here. Invariant: two keys share a cell only if their lives do not touch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hal.slot.layout import aligned

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
    True for the gradients of tied weights: as large as these weights. `lanes` are the numbers of the lanes that use the
    key.
    """

    first: int
    last: int
    size: int
    streams: bool
    saved: bool = False
    tied: bool = False
    lanes: set[int] = field(default_factory=set)

    @property
    def kind(self) -> CellKind:
        """What a cell must be for it."""
        lanes = () if self.streams else tuple(sorted(self.lanes)) or (0,)
        return CellKind(aligned(self.size), self.streams, self.saved, self.tied, lanes)


class CellKind(NamedTuple):
    """The size of a cell, what it is for (as `Life` has it), and the lanes on which it has memory.

    One that streams has memory on the host alone. One with several lanes has memory on the host too, through which its
    value passes from lane to lane.
    """

    size: int
    streams: bool
    saved: bool
    tied: bool
    lanes: tuple[int, ...]

    @property
    def on_host(self) -> bool:
        """Whether it has memory on the host."""
        return self.streams or len(self.lanes) > 1


@dataclass
class StashPlan:
    """Which cell each key uses. Two keys share a cell only if their lives do not touch."""

    cell_of: dict[Key, int] = field(default_factory=dict)
    cells: list[CellKind] = field(default_factory=list)
    ring_size: int = 0
    ring_count: int = 0
    saved_ring_size: int = 0
    tied_ring_size: int = 0
    tied_ring_count: int = 0

    def resident_bytes(self, lane: int) -> int:
        """Bytes on a lane's device for one micro-batch."""
        return sum(cell.size for cell in self.cells if lane in cell.lanes)

    def saved_resident_bytes(self, lane: int) -> int:
        """Bytes there, of these, that hold tensors saved for the backward."""
        return sum(cell.size for cell in self.cells if cell.saved and lane in cell.lanes)

    def tied_resident_bytes(self, lane: int) -> int:
        """Bytes there, of these, that hold gradients of tied weights."""
        return sum(cell.size for cell in self.cells if cell.tied and lane in cell.lanes)

    def host_bytes(self, tied: bool) -> int:
        """Bytes on the host for one micro-batch: for gradients of tied weights, or for all else."""
        return sum(cell.size for cell in self.cells if cell.on_host and cell.tied == tied)


def device_bytes(plans: Sequence[StashPlan], lane: int = 0) -> int:
    """Bytes on a lane's device for a step, given each micro-batch's plan: the rings are there for all."""
    return sum(plan.resident_bytes(lane) for plan in plans) + sum(size * count for size, count in rings_of(plans))


def saved_bytes(plans: Sequence[StashPlan], lane: int = 0) -> int:
    """Bytes on the device, of these, that hold tensors saved for the backward."""
    _, (size, count), _ = rings_of(plans)
    return sum(plan.saved_resident_bytes(lane) for plan in plans) + size * count


def tied_bytes(plans: Sequence[StashPlan], lane: int = 0) -> int:
    """Bytes on the device, of these, that hold gradients of tied weights."""
    _, _, (size, count) = rings_of(plans)
    return sum(plan.tied_resident_bytes(lane) for plan in plans) + size * count


def host_bytes(plans: Sequence[StashPlan], tied: bool = False) -> int:
    """Bytes on the host for a step, given each micro-batch's plan: for gradients of tied weights, or for all else."""
    return sum(plan.host_bytes(tied) for plan in plans)


def rings_of(plans: Sequence[StashPlan]) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
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
        kind = life.kind
        for cell, last in enumerate(busy_until):
            if last < life.first and plan.cells[cell] == kind:
                break
        else:
            cell = len(plan.cells)
            plan.cells.append(kind)
            busy_until.append(-1)
        plan.cell_of[key] = cell
        busy_until[cell] = life.last
    for kind in plan.cells:
        if kind.streams and kind.saved:
            plan.saved_ring_size = max(plan.saved_ring_size, kind.size)
        elif kind.streams and kind.tied:
            plan.tied_ring_size = max(plan.tied_ring_size, kind.size)
            plan.tied_ring_count = 2 * tied_per_visit
        elif kind.streams:
            plan.ring_size = max(plan.ring_size, kind.size)
            plan.ring_count = 2 * accesses_per_visit  # one visit computes while the next one's inputs arrive
    return plan
