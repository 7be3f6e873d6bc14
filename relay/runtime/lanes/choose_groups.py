"""How many segments a lane takes at a time: the sizes of groups with which a pass ends first.

One segment at a time leaves lanes idle while one of them works on a heavy head, and at the turn where the forward, a
third as long, gives way to the backward. Groups of several layers, larger in the forward than in the backward, make the
visits about as long as the head's. Each choice is tried on a model of the pass in which a lane runs one micro-batch at
a time, and a micro-batch passes from group to group; transfers are not modelled.

Nothing is measured: the work of a segment is counted in its program, so the same model gives the same plan. Invariant:
results do not depend on the choice.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from hal.ops.cost import work_of
from hal.program import Program
from relay.runtime.lanes.visit_plan import VisitKey, VisitPlan, in_turn, visits_of
from relay.runtime.memory_plan import programs_of
from relay.runtime.stages import CompiledModel, Stage, StageProgram

MOST = 8
"""Segments in a group at most: each needs a slot of its own."""
WORTH = 0.0025
"""Larger groups are taken only if the pass is shorter by at least this share."""
LIGHT = 0.2
"""A visit that takes less than this share of a middle one does not count in the size of a group."""
MOVING = 100.0
"""The operations that a device makes in the time in which it moves a byte of its memory, roughly."""


class GroupSizes(NamedTuple):
    """How many segments the fastest lane takes at a time, in the forward and in the backward."""

    forward: int
    backward: int


def plan_visits(
    compiled: Sequence[CompiledModel],
    training: bool,
    speeds: Sequence[float],
    sizes: GroupSizes | None = None,
    most: int = MOST,
) -> VisitPlan:
    """The plan of a pass over micro-batches with these compiled models, on a lane for each of `speeds`.

    `speeds` are how fast the lanes are beside each other; slower ones take fewer segments at a time. `sizes` are those
    of the groups, which are chosen where they are not given, up to `most` segments in a group.
    """
    model = compiled[0]
    visits = visits_of(model.stages, training)

    if len(speeds) == 1 and sizes == GroupSizes(1, 1):
        return in_turn(visits, [1], [1])
    work = {visit: sum(_work(program) for program in programs_of(model, visit)[:1]) for visit in visits}
    light = _light(work)

    def plan(chosen: GroupSizes) -> VisitPlan:
        forward, backward = (_shares(size, speeds) for size in (chosen.forward, chosen.backward))
        parted = functools.partial(_must_part, model.stages)
        return in_turn(visits, forward, backward, parted, light if chosen != GroupSizes(1, 1) else ())

    if sizes is not None:
        return plan(sizes)
    over_batch = model.head is not None
    best: tuple[float, VisitPlan] | None = None
    tried: set[VisitPlan] = set()
    for chosen in _sizes(min(most, len(model.stages)), training):
        candidate = plan(chosen)
        if candidate not in tried:
            tried.add(candidate)
            length = duration(candidate, work, len(compiled), speeds, over_batch)
            if best is None or length < best[0] * (1 - WORTH):
                best = length, candidate
    assert best is not None
    return best[1]


def duration(
    plan: VisitPlan, work: dict[VisitKey, float], microbatches: int, speeds: Sequence[float], over_batch: bool = False
) -> float:
    """How long the pass takes if each visit takes so much `work` for a micro-batch.

    With `over_batch` the last segment runs once, for all micro-batches.
    """
    last = max(visit.segment for group in plan.groups for visit in group.visits)
    free = [0.0] * len(speeds)
    ready = np.zeros(microbatches)
    number = np.arange(microbatches)
    for group in plan.groups:
        seconds = sum(work[visit] for visit in group.visits) / speeds[group.lane]
        if over_batch and group.visits[0].segment == last:
            ready[:] = max(free[group.lane], ready.max()) + seconds
        else:
            began = np.maximum(ready, free[group.lane]) - number * seconds
            ready = np.maximum.accumulate(began) + (number + 1) * seconds
        free[group.lane] = float(ready[-1])
    return float(ready[-1])


def _light(work: dict[VisitKey, float]) -> frozenset[VisitKey]:
    """The visits that take little beside most others of their direction, such as that of an embedding."""
    found = set()
    for backward in (False, True):
        own = {visit: seconds for visit, seconds in work.items() if visit.backward == backward}
        middle = sorted(own.values())[len(own) // 2] if own else 0.0
        found |= {visit for visit, seconds in own.items() if seconds < LIGHT * middle}
    return frozenset(found)


def _sizes(most: int, training: bool) -> Iterator[GroupSizes]:
    """The sizes that are tried, the smallest groups first."""
    pairs = [(forward, backward) for forward in range(1, most + 1) for backward in range(1, most + 1)]
    for forward, backward in sorted(pairs, key=lambda pair: (max(pair), sum(pair))):
        if training or backward == 1:
            yield GroupSizes(forward, backward)


def _shares(size: int, speeds: Sequence[float]) -> list[int]:
    """The size of each lane's groups, if the fastest lane's have that size."""
    fastest = max(speeds)
    return [max(1, round(size * speed / fastest)) for speed in speeds]


def _must_part(stages: Sequence[Stage], first: VisitKey, second: VisitKey) -> bool:
    """Whether the second visit needs what the first one changes by its last micro-batch, or has the same weights."""
    before, after = stages[first.segment], stages[second.segment]
    program = before.backward if first.backward else before.forward
    changed = [before.buffers[index] for index in program.updates] if program is not None else []
    same = bool(before.parameters) and before.parameters == after.parameters
    return same or any(name in after.buffers for name in changed)


_known: WeakKeyDictionary[Program, float] = WeakKeyDictionary()


def _work(visit: StageProgram) -> float:
    """The operations of a visit for a micro-batch, with those that could be made while it moves memory."""
    program = visit.program
    found = _known.get(program)
    if found is None:
        works = [work_of(node) for node in program.graph.nodes]
        found = _known[program] = sum(max(work.done, work.moved * MOVING) for work in works if work is not None)
    return found * (1 if visit.chunks is None else sum(1 for _ in visit.chunks.rows()))
