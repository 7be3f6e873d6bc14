"""The first run of a module that will run eagerly: what it draws from, and whether it computes the same a second time.

Numbers that it counts are put back before the second run, as `relay.capture.guards.counters` does in recomputes.
Invariant: generators that the run draws from are as before it, but for PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from relay.capture.eager_call import EagerSegment
from relay.capture.guards.counters import CountedStates, numbers_of
from relay.capture.states.escaped_values import note_eager
from relay.capture.states.lasting_state import LastingStates, draws_from, keeps_state
from relay.capture.states.own_generators import GeneratorsUsed, python_numbers, same_python_numbers


def first_run(
    segment: EagerSegment,
    leaves: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
    """Run a segment once. Raises KeepsState if it would compute something else the next time, given the same."""
    states, numbers = LastingStates(segment.module.named_modules()), numbers_of(segment.module)
    drawn, seed = python_numbers(), torch.get_rng_state()
    with GeneratorsUsed() as used:
        outputs, after = segment.run(leaves, values, buffers)
    segment.generators, segment.draws_python = used.generators, used.python
    if drawn_from := states.drawn_from():
        raise draws_from(f"layer {segment.name!r}", drawn_from, segment.name)
    if states.changed():
        states = states.now()
        counted = numbers_of(segment.module)
        places = [place for place in counted if place in numbers and numbers[place][1] != counted[place][1]]
        counters = CountedStates([counted[place][0] for place in places])
        now = counters.values()
        counters.set([numbers[place][1] for place in places])
        torch.set_rng_state(seed)
        with same_python_numbers(drawn), GeneratorsUsed():
            again, later = segment.run(leaves, values, buffers)
        counters.set(now)
        same = all(map(_equal, [*outputs, *after], [*again, *later]))
        kept = states.changed()
        if not same and kept:
            raise keeps_state(f"layer {segment.name!r}", kept, segment.name)
        for path in kept:
            note_eager(path, segment.name)
    return outputs, after


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape or first.layout is not torch.strided:
        return first.shape == second.shape
    return torch.equal(first, second) or bool(((first == second) | (first.isnan() & second.isnan())).all())
