"""The visits of a pass as the schedule submits them, and how far the loads of a lane run ahead of its kernels.

Which lane runs which segment is in `relay.runtime.lanes.visit_plan`, and the order of submission in
`relay.runtime.schedule`. Invariant: a load is submitted only after the kernels and transfers that still need what it
overwrites, and after those that make what it sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hal.slot.device_slot import DeviceSlot, GradientRegion
from hal.slot.layout import SlotContent
from relay.runtime.lanes.lane import Lane
from relay.runtime.residency.slots import ResidentSlot
from relay.runtime.stages import Stage, StageProgram


@dataclass(eq=False)
class Visit:
    """A visit of a segment, the `number`-th of the pass."""

    number: int
    lane: Lane
    index: int
    backward: bool
    content: SlotContent
    stage: Stage
    slot: DeviceSlot | None = None
    region: GradientRegion | None = None

    @property
    def is_resident(self) -> bool:
        """Whether the segment has a slot of its own."""
        return isinstance(self.slot, ResidentSlot)

    def program_of(self, stage: Stage) -> StageProgram:
        """The program that the visit runs, of the stage for one micro-batch."""
        program = stage.backward if self.backward else stage.forward
        assert program is not None
        return program

    @property
    def changes_buffers(self) -> bool:
        """Whether the visit changes a buffer."""
        return bool(self.program_of(self.stage).updates)

    def changes_buffer_of(self, other: Visit) -> bool:
        """Whether the visit changes a buffer that another segment holds too."""
        updates = self.program_of(self.stage).updates
        return any(self.stage.buffers[index] in other.stage.buffers for index in updates) if updates else False


@dataclass(eq=False)
class LoadAhead:
    """The loads of one lane: its visits in order, how many of them are submitted, and those not yet visited."""

    visits: list[Visit]
    loaded: int = 0
    coming: list[Visit] = field(default_factory=list)


def assign_slots(lane: Lane, visits: Sequence[Visit]) -> None:
    """Give each visit of a lane its slot, and those that write gradients a region for them."""
    slots = lane.slots
    assert slots is not None
    for visit, slot in zip(visits, slots.assign([visit.content for visit in visits]), strict=True):
        visit.slot = slot
    writes = [visit.backward and bool(visit.program_of(visit.stage).parameter_gradients) for visit in visits]
    given = [visit.slot for visit in visits if visit.slot is not None]
    for visit, region in zip(visits, slots.regions(given, writes), strict=True):
        visit.region = region


def may_load(lane: Lane, following: Visit, coming: Sequence[Visit], changing: Sequence[Visit]) -> bool:
    """Whether the load of a lane's next visit may be submitted: as far ahead as there are slots in the ring.

    `coming` are the lane's visits whose loads are submitted; `changing` those before this one that change buffers.
    """
    assert lane.slots is not None
    ring = lane.slots.ring.slots
    if not following.is_resident and sum(not visit.is_resident for visit in coming) >= len(ring):
        return False
    # Never into a slot that an earlier visit still needs for another content, nor before a buffer that two segments
    # share has come home from the one that changes it first.
    return not any(
        earlier.slot is following.slot and earlier.content is not following.content for earlier in coming
    ) and not any(earlier.changes_buffer_of(following) for earlier in changing)
