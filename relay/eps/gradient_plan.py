"""What is done with each segment's gradients: which complete their parameter, and which are summed with others first.

A plan follows from the order of segments and the parameters that each has gradients for. It holds no tensors, and the
work itself is done by `relay.eps.server`. Invariant: each parameter is updated once a step, by the segment whose
gradient, or whose reading of it in the backward pass, comes last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from relay.eps.rows import TableRows


class GradientPresence(Protocol):
    """For a segment in which data decide which parameters are reached: those that a step did reach."""

    def reached(self) -> frozenset[int]:
        """Indices into the segment's gradients."""


@dataclass(eq=False)
class GradientPlan:
    """What to do with one segment's gradients. Numbers are indices into the segment's list of gradients.

    Attributes:
        name: the segment.
        names: the parameter of each gradient.
        updates: gradients that complete their parameter here; the parameter can be updated.
        partial: gradients whose parameter has another use whose gradient arrives later.
        joined: those of `updates` that are added to a sum of earlier arrivals.
        first_arrivals: gradients that are the first of the step for their parameter.
        presence: set where data decide which parameters have a gradient.
        late: how many of `names`, at the end, are parameters that have no gradient here. This segment reads them in its
            backward, so they are updated after it, from the sum of the gradients that have arrived before.
        rows: the tables of which gradients of some rows arrive, by the number of the gradient.
    """

    name: str
    names: tuple[str, ...]
    updates: tuple[int, ...]
    partial: tuple[int, ...]
    joined: tuple[int, ...]
    first_arrivals: tuple[int, ...]
    presence: GradientPresence | None = None
    late: int = 0
    rows: Mapping[int, TableRows] = field(default_factory=dict)


def plan_gradients(
    segments: Sequence[tuple[str, Sequence[str]]], readers: Sequence[Collection[str]] = ()
) -> dict[str, GradientPlan]:
    """Plans by segment, from (segment, names of its gradients) in forward order; gradients arrive in reverse.

    `readers` are, for each segment, the parameters that its backward reads. Where updates are eager none of them may be
    updated before, whether the segment has a gradient for it or not.
    """
    last_arrival: dict[str, int] = {}
    first_arrival: dict[str, int] = {}
    for number, (_, names) in enumerate(segments):
        for name in names:
            last_arrival.setdefault(name, number)
            first_arrival[name] = number
    late: dict[int, list[str]] = {}
    for number, read in enumerate(readers):
        for name in read:
            if number < last_arrival.get(name, number):
                late.setdefault(number, []).append(name)
                last_arrival[name] = number
    plans = {}
    for number, (segment, names) in enumerate(segments):
        indices = range(len(names))
        updates = tuple(index for index in indices if last_arrival[names[index]] == number)
        plans[segment] = GradientPlan(
            name=segment,
            names=(*names, *late.get(number, ())),
            updates=(*updates, *range(len(names), len(names) + len(late.get(number, ())))),
            late=len(late.get(number, ())),
            partial=tuple(index for index in indices if index not in updates),
            joined=tuple(index for index in updates if first_arrival[names[index]] != number),
            first_arrivals=tuple(index for index in indices if first_arrival[names[index]] == number),
        )
    return plans
