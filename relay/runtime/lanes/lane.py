"""A lane: one device with its queues and its slots, and what a pass needs of its memory.

A trainer has one lane for each of its devices. Which segments a lane runs is in the plan of visits
(`relay.runtime.lanes.visit_plan`); the values between segments are the stash's. Invariant: slots are allocated only
after the whole requirement of the lane is known to fit.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hal.device import Device, Queue
from hal.program import Program
from hal.slot.layout import SlotContent
from relay.eps.updates.split_update import RETURNED, SENT
from relay.runtime.lanes.visit_plan import VisitPlan
from relay.runtime.memory_plan import Requirement, requirement_of
from relay.runtime.on_host.calls import HostCalls
from relay.runtime.residency.choice import Residents, SlotBytes, candidates, choose
from relay.runtime.residency.notice import note_residents
from relay.runtime.residency.slots import Slots
from relay.runtime.stages import CompiledModel
from relay.runtime.stash.memory import StashQueues
from relay.runtime.stash.plan import StashPlan

QUEUES = ("compute", "load", "refresh", "drain", "stash in", "stash out", SENT, RETURNED)


@dataclass(frozen=True)
class LaneOptions:
    """What a lane may use.

    Attributes:
        slots: how many slots it has for each segment of a group.
        stash: where the stash is, "device" or "host".
        capacity: the device memory that may be used, or None.
        resident_layers: how many segments stay on the device between visits, or "auto".
        resident_limit: the device memory that "auto" fills, where there is no `capacity`.
    """

    slots: int
    stash: str
    capacity: int | None
    resident_layers: int | str = 0
    resident_limit: int | None = None


@dataclass(frozen=True)
class LaneNeed:
    """What a pass needs of a lane's memory, the sizes and the number of the slots, and which segments are resident."""

    requirement: Requirement
    slot_sizes: tuple[int, int]
    slot_count: int
    residents: Residents
    segments: int


class Lane:
    """A device, its queues and its slots. `number` is its index; `label` names it in traces where there are several."""

    def __init__(self, device: Device, number: int, options: LaneOptions, several: bool) -> None:
        self.device = device
        self.number = number
        self.label = f"{number}: {device.info.name} " if several else ""
        self.slots: Slots | None = None
        self._options = options
        self._noted: dict[bool, Residents] = {}
        self._chosen: weakref.WeakKeyDictionary[CompiledModel, Residents] = weakref.WeakKeyDictionary()

    # -- queues, each with calls that run in order ----------------------------------------------------------------

    @functools.cached_property
    def compute(self) -> Queue:
        """Runs kernels."""
        return HostCalls(self.device.queue("compute"))

    @functools.cached_property
    def load(self) -> Queue:
        """Sends weights to the device."""
        return self.device.queue("load")

    @functools.cached_property
    def refresh(self) -> Queue:
        """Sends weights that wait for updates, which must not hold up other loads."""
        return self.device.queue("refresh")

    @functools.cached_property
    def drain(self) -> Queue:
        """Sends gradients and results to the host."""
        return self.device.queue("drain")

    @functools.cached_property
    def stash(self) -> StashQueues:
        """Bring values of the stash to the device and away from it."""
        return StashQueues(self.device, self.device.queue("stash in"), self.device.queue("stash out"))

    def queues(self) -> list[Queue]:
        """All of them."""
        return [self.device.queue(name) for name in QUEUES]

    # -- memory ---------------------------------------------------------------------------------------------------

    def need(
        self,
        compiled: Sequence[CompiledModel],
        contents: Sequence[SlotContent],
        plans: Sequence[StashPlan],
        visits: VisitPlan,
        training: bool,
        held: int,
        parts: Sequence[Program],
    ) -> LaneNeed:
        """What a pass needs. `held` are the bytes of stash and scalars that the lane has from an earlier pass.

        `parts` are the device's parts of updates.
        """
        own = [contents[index] for index in visits.segments(self.number)]
        count = self._options.slots * max(1, visits.largest(self.number))
        requirement = requirement_of(compiled, plans, count, 0, visits, self.number, parts)
        ring = self.slots.ring if self.slots is not None else None
        slot_bytes = SlotBytes(
            own, count, (0, 0) if ring is None else (ring.parameter_size, ring.gradient_size),
            requirement.total + max(0, self._held_by_others(held) - requirement.workspace),
            self.slots.held if self.slots is not None else {},
        )  # fmt: skip
        visited = visits.segments(self.number)
        residents = self._residents(compiled[0], contents, visited, slot_bytes, training)
        slot_sizes = slot_bytes.ring(residents)
        requirement = replace(
            requirement,
            slots=count * sum(slot_sizes),
            resident=residents.weight_bytes + slot_bytes.gradients(residents),
            resident_count=len(residents.contents),
            most_resident=residents.most,
        )
        return LaneNeed(requirement, slot_sizes, count, residents, len(own))

    def has_slots(self, need: LaneNeed) -> bool:
        """Whether the lane has slots of these sizes."""
        ring = self.slots.ring if self.slots is not None else None
        return (
            ring is not None
            and need.slot_sizes == (ring.parameter_size, ring.gradient_size)
            and (need.slot_count == len(ring.slots))
        )

    def allocate(self, need: LaneNeed) -> None:
        """Have slots of these sizes. Raises OutOfMemory."""
        if not self.has_slots(need):
            self.free()
            self.slots = Slots(self.device, need.slot_count, *need.slot_sizes)

    def has_residents(self, need: LaneNeed) -> bool:
        """Whether the lane has slots for these resident segments and for no others."""
        assert self.slots is not None
        return not self.slots.differ(need.residents.contents)

    def keep_residents(self, need: LaneNeed, training: bool) -> None:
        """Have slots for the resident segments. Raises OutOfMemory."""
        assert self.slots is not None
        residents = need.residents
        self.slots.keep(residents.contents, residents.with_gradients)
        if self._options.resident_layers == "auto":
            self._noted[training] = note_residents(
                residents, self._noted.get(training), need.segments, need.requirement.resident, training
            )

    def free(self) -> None:
        """Free the slots."""
        if self.slots is not None:
            self.slots.free()
            self.slots = None

    def settle(self) -> None:
        """Forget the events of the slots. Everything submitted must have ended."""
        if self.slots is not None:
            self.slots.settle()

    def forget_choice(self) -> None:
        """Choose the resident segments anew, since the model has other layers."""
        self._chosen.clear()

    def _held_by_others(self, held: int) -> int:
        """Bytes of device memory in use beside slots, stash and scalars: workspace and constants of kernels."""
        return self.device.memory().in_use - (self.slots.size if self.slots is not None else 0) - held

    def _residents(
        self,
        compiled: CompiledModel,
        contents: Sequence[SlotContent],
        visited: Mapping[int, int],
        slots: SlotBytes,
        training: bool,
    ) -> Residents:
        """The segments that stay on the device between visits: those of the last time, as long as they fit."""
        wanted = self._options.resident_layers
        capacity = self._options.capacity
        limit = self._options.resident_limit if capacity is None else capacity
        if wanted == 0 or (wanted == "auto" and limit is None and self.device.info.unified):
            return Residents()  # a unified device works in host memory: nothing crosses a link
        if limit is None:
            limit = self.device.memory().capacity or self.device.info.memory
        known = self._chosen.get(compiled)
        if known is not None and slots.has(known) and (limit is None or slots.total(known) <= limit):
            return known
        order = candidates(compiled, contents, training, slots.held, visited)
        chosen = self._chosen[compiled] = choose(wanted, order, slots, limit)
        return chosen
