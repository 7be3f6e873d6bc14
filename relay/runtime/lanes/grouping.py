"""The plan of visits of a session: its groups by the options, as large as the devices' memory allows.

The sizes with which a pass ends first are found in `relay.runtime.lanes.choose_groups`. Invariant: the plan depends on
the model, the options and the devices' memory alone, so a resumed run on the same devices has the same plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from relay.runtime.lanes.choose_groups import MOST, GroupSizes, plan_visits
from relay.runtime.lanes.visit_plan import VisitPlan
from relay.runtime.memory_plan import planned_slot_sizes, plans_for, requirement_of
from relay.runtime.stages import CompiledModel

PLANS = 8
"""Plans that are kept: one for each list of micro-batches' compiled models."""
SHARE = 0.9
"""The share of a device's memory that groups of several segments may fill."""


@dataclass
class Grouping:
    """The options that decide on groups, and the plans that were made.

    Attributes:
        slots: slots for each segment of a group.
        stash: where the stash is.
        limit: the device memory that may be used; None if it is not known.
        resident_layers: the option of that name.
        layers_per_visit: the option of that name.
        speeds: how fast the devices are beside each other; None for alike.
        caution: takes each sentence on what keeps devices idle while training, once.
    """

    slots: int
    stash: str
    limit: int | None
    resident_layers: int | str
    layers_per_visit: int | str | Sequence[int]
    speeds: Sequence[float] | None
    caution: Callable[[str], object]
    # By weak references, since the cache of programs alone decides how long a compiled model is kept.
    _plans: dict[tuple[bool, int, tuple[weakref.ref[CompiledModel], ...]], VisitPlan] = field(
        default_factory=dict, init=False
    )
    _kept: list[int] = field(default_factory=list, init=False)
    _said: set[str] = field(default_factory=set, init=False)

    def plan(self, compiled: Sequence[CompiledModel], training: bool, lanes: int) -> VisitPlan:
        """The plan of a pass on so many lanes. `caution` takes what keeps lanes idle."""
        key = training, lanes, tuple(map(weakref.ref, compiled))
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= PLANS:
                self._plans.clear()
            found = self._plans[key] = self._made(compiled, training, lanes)
            for sentence in found.cautions(len(compiled), lanes) if training else ():
                if sentence not in self._said:
                    self._said.add(sentence)
                    self.caution(sentence)
        return found

    def forget(self) -> None:
        """Drop the plans."""
        self._plans.clear()

    def keep(self, lanes: Sequence[int]) -> None:
        """Go on with these of all lanes alone."""
        self._kept = list(lanes)
        self.forget()

    def _made(self, compiled: Sequence[CompiledModel], training: bool, lanes: int) -> VisitPlan:
        speeds = [1.0] * lanes
        if self.speeds is not None:
            speeds = [self.speeds[lane] for lane in self._kept or range(lanes)]
        given = self.layers_per_visit
        if given != "auto" or lanes == 1:
            same = 1 if isinstance(given, str) else given
            sizes = GroupSizes(same, same) if isinstance(same, int) else GroupSizes(*same)
            return plan_visits(compiled, training, speeds, sizes)
        most = MOST
        while True:
            plan = plan_visits(compiled, training, speeds, most=most)
            largest = max(plan.largest(lane) for lane in range(lanes))
            if largest == 1 or self._fits(compiled, training, plan, lanes):
                return plan
            most = min(most, largest) - 1

    def _fits(self, compiled: Sequence[CompiledModel], training: bool, plan: VisitPlan, lanes: int) -> bool:
        """Whether each device has room for the slots of its groups beside all else."""
        if self.limit is None:
            return True
        weights, gradients = planned_slot_sizes(compiled[0])
        residents = self.resident_layers * weights if isinstance(self.resident_layers, int) else 0
        plans = plans_for(compiled, self.stash, training, plan)
        for lane in range(lanes):
            count = self.slots * max(1, plan.largest(lane))
            needed = requirement_of(compiled, plans, count, weights + gradients, plan, lane)
            if needed.total + residents > self.limit * SHARE:
                return False
        return True
