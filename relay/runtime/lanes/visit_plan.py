"""Which lane runs which segment: the plan of a pass, made before it and recorded.

A lane takes a group of consecutive segments at a time and runs each micro-batch through all of them before the next
micro-batch; meanwhile the next lane already runs the first micro-batches through the next group. Lanes take groups in
turn. Each segment still sees its micro-batches in order, so no sum depends on the plan.

Nothing is submitted here (`relay.runtime.schedule`). Invariant: the visits of a plan, one group after the other, are
those of a single lane in its order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from relay.runtime.stages import Stage


class VisitKey(NamedTuple):
    """The visit of a segment, by its number: its backward, or its forward."""

    segment: int
    backward: bool


@dataclass(frozen=True)
class VisitGroup:
    """Consecutive visits that one lane makes together, micro-batch by micro-batch."""

    lane: int
    visits: tuple[VisitKey, ...]


@dataclass(frozen=True)
class VisitPlan:
    """The groups of a pass, in the order in which they are submitted."""

    groups: tuple[VisitGroup, ...]

    @property
    def lanes(self) -> list[int]:
        """The lane of each visit."""
        return [group.lane for group in self.groups for _ in group.visits]

    @property
    def turn(self) -> int:
        """The lane of the segment that is visited once, at the turn or at the end of a forward pass."""
        return max((visit.segment, group.lane) for group in self.groups for visit in group.visits)[1]

    def segments(self, lane: int) -> Mapping[int, int]:
        """How often a lane visits each segment that it visits, in their order."""
        visited = sorted(visit.segment for group in self.groups if group.lane == lane for visit in group.visits)
        return Counter(visited)

    def largest(self, lane: int) -> int:
        """The most segments that a lane visits in a group."""
        return max((len(group.visits) for group in self.groups if group.lane == lane), default=0)

    @property
    def groups_several(self) -> bool:
        """Whether a group has several segments."""
        return any(len(group.visits) > 1 for group in self.groups)

    @property
    def sizes(self) -> tuple[int, int]:
        """The most segments in a group of the forward, and of the backward."""
        found = [
            max((len(group.visits) for group in self.groups if group.visits[0].backward == back), default=1)
            for back in (False, True)
        ]
        return found[0], found[1]

    def cautions(self, microbatches: int, lanes: int) -> list[str]:
        """What keeps lanes idle, in sentences."""
        used = len({group.lane for group in self.groups})
        found = []
        idle = lanes - microbatches
        if idle > 0:
            found.append(
                f"{microbatches} {'micro-batch' if microbatches == 1 else 'micro-batches'} cannot keep {lanes} devices "
                f"busy: about {idle} of them {'is' if idle == 1 else 'are'} idle at any time. "
                f"Give at least {lanes} micro-batches."
            )
        if used < lanes:
            found.append(f"The model has layers for {used} of {lanes} devices; the others stay idle.")
        return found


def visits_of(stages: Sequence[Stage], training: bool) -> list[VisitKey]:
    """The visits of a pass, in order: forward up to the last segment, which is visited once, and back down.

    The backward ends at the first segment that has anything to differentiate.
    """
    last = len(stages) - 1
    visits = [VisitKey(index, False) for index in range(last)] + [VisitKey(last, training)]
    if training:
        visits += [VisitKey(index, True) for index in reversed(range(last)) if stages[index].backward is not None]
    return visits


def in_turn(
    visits: Sequence[VisitKey],
    forward: Sequence[int],
    backward: Sequence[int],
    must_part: Callable[[VisitKey, VisitKey], bool] | None = None,
    light: Collection[VisitKey] = (),
) -> VisitPlan:
    """Groups for one lane after the other, of as many segments as `forward` and `backward` have for that lane.

    The last segment, where the pass turns, is a group of its own, and visits that `must_part` are in different groups.
    Visits that are `light` join a group without counting.
    """
    last = max(visit.segment for visit in visits)
    groups: list[list[VisitKey]] = []
    for visit in visits:
        lane = (len(groups) - 1) % len(forward)
        most = (backward if visit.backward else forward)[lane]
        alone = visit.segment == last or not groups or groups[-1][-1].segment == last
        full = not alone and sum(each not in light for each in groups[-1]) + (visit not in light) > most
        if alone or full or (must_part and any(must_part(each, visit) for each in groups[-1])):
            groups.append([visit])
        else:
            groups[-1].append(visit)
    return VisitPlan(tuple(VisitGroup(number % len(forward), tuple(group)) for number, group in enumerate(groups)))
