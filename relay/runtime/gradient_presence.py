"""Which gradients a step has really made, where data decide: behind a layer that runs eagerly.

Such a layer may cut off what comes before it (a `detach` in it), in some steps or in all. Its kernel hands back zeros
then, and says so; the kernels before it make zeros of them. What has been made of nothing but such zeros counts as no
gradient, as in plain PyTorch. Which segments a gradient can reach at all is settled before
(`relay.runtime.gradient_layout`).

Invariant: what is told of a step depends on the segments after alone, whose backward has run by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from hal.program import Program, Role
from relay.capture import Presence

GRADIENTS = (Role.PARAMETER_GRADIENT, Role.VALUE_GRADIENT)


class Reach:
    """Of one segment: which of its gradients the latest step has made, of its parameters and then of its inputs.

    `seeds[i]` says where seed i comes from: segments after, and which of their gradients it is; nothing for the loss.
    `noted` is what the segment itself says, if it runs eagerly, and `clock` what the last such segment says.
    """

    def __init__(
        self, program: Program, seeds: Sequence[Sequence[tuple[Reach, int]]], noted: Presence | None, clock: Presence
    ) -> None:
        self._seeds = seeds
        self._noted = noted
        self._clock = clock
        self._needs = [] if noted is not None else seeds_needed(program)
        self._time = -1
        self._found: frozenset[int] = frozenset()

    def reached(self) -> frozenset[int]:
        """Places among the segment's gradients."""
        # All that this depends on stands still from when the last segment that runs eagerly has had its backward.
        if self._time != self._clock.notes:
            self._found, self._time = self._find(), self._clock.notes
        return self._found

    def _find(self) -> frozenset[int]:
        seeds = {
            number
            for number, sources in enumerate(self._seeds)
            if not sources or any(place in other.reached() for other, place in sources)
        }
        if self._noted is not None:
            return self._noted.reached() if seeds else frozenset()
        return frozenset(place for place, needs in enumerate(self._needs) if needs & seeds)


def seeds_needed(program: Program) -> list[set[int]]:
    """For each gradient that a backward makes the seeds that it is made of, by their numbers."""
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    seeds = [node for node, port in zip(placeholders, program.inputs, strict=False) if port.role is Role.SEED]
    made_of: dict[fx.Node, frozenset[int]] = {node: frozenset([number]) for number, node in enumerate(seeds)}
    for node in program.graph.nodes:
        if node.op == "call_function":
            made_of[node] = frozenset().union(*(made_of.get(source, frozenset()) for source in node.all_input_nodes))
    results: Iterable[fx.Node] = next(iter(reversed(program.graph.nodes))).args[0]
    # One that no seed goes into (zeros of that shape) comes with any.
    return [
        set(made_of.get(node, frozenset()) or range(len(seeds)))
        for node, port in zip(results, program.outputs, strict=True)
        if port.role in GRADIENTS
    ]


@dataclass(frozen=True)
class Backward:
    """A segment's backward: its program, the values that its seeds and its inputs' gradients belong to, and what the
    segment says of itself if it runs eagerly."""

    program: Program
    seeds: tuple[int, ...]
    values: tuple[int, ...]
    noted: Presence | None


def reach_of(backwards: Sequence[Backward | None]) -> list[Reach | None]:
    """For each segment, in order, what says which of its gradients a step has made; None where it makes all of them,
    as every segment does that comes after the last that runs eagerly. A segment may have no backward."""
    eager = [one.noted for one in backwards if one is not None and one.noted is not None]
    found: list[Reach | None] = [None] * len(backwards)
    if not eager:
        return found
    sources: dict[int, list[tuple[Reach, int]]] = {}
    behind = False
    for index, one in reversed(list(enumerate(backwards))):
        if one is None:
            continue
        reach = Reach(one.program, [list(sources.get(value, ())) for value in one.seeds], one.noted, eager[-1])
        behind = behind or one.noted is not None
        if behind:
            found[index] = reach
        parameters = sum(port.role is Role.PARAMETER_GRADIENT for port in one.program.outputs)
        for place, value in enumerate(one.values, parameters):
            sources.setdefault(value, []).append((reach, place))
    return found
