"""Which gradients a step has made, for segments before a layer that runs eagerly.

Such a layer can cut off everything before it (a `detach` in its code) in some steps and not in others, as its data
decide. Its kernel then returns zeros and records that these gradients were not found; the kernels before it compute
zeros from them. A gradient computed from nothing but such zeros counts as absent, as in plain PyTorch, where it would
be None. Which gradients can exist at all is settled before a step (`relay.runtime.gradient_layout`).

Invariant: what is reported for a segment depends on the segments after it alone, whose backward has already run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from hal.program import Program, Role
from relay.capture import ObservedGradientPresence

GRADIENTS = (Role.PARAMETER_GRADIENT, Role.VALUE_GRADIENT)


class DerivedGradientPresence:
    """Which gradients of one segment the latest step has made: those of its parameters, then those of its inputs.

    `seeds[i]` lists where seed i comes from, as (presence of a later segment, index of its gradient); the list is empty
    for the loss. `observed` is what the segment itself records, if it runs eagerly. `last_observed` is that of the last
    segment that runs eagerly. Its backward is the first of theirs in a step, so a new version of it means a new step.
    """

    def __init__(
        self,
        program: Program,
        seeds: Sequence[Sequence[tuple[DerivedGradientPresence, int]]],
        observed: ObservedGradientPresence | None,
        last_observed: ObservedGradientPresence,
    ) -> None:
        self._seeds = seeds
        self._observed = observed
        self._last_observed = last_observed
        self._seeds_needed = [] if observed is not None else seeds_needed(program)
        self._version = -1
        self._reached: frozenset[int] = frozenset()

    def reached(self) -> frozenset[int]:
        """The indices of the segment's gradients that the latest step has made."""
        if self._version != self._last_observed.version:
            self._reached, self._version = self._derive(), self._last_observed.version
        return self._reached

    def _derive(self) -> frozenset[int]:
        seeds = {
            number
            for number, sources in enumerate(self._seeds)
            if not sources or any(index in later.reached() for later, index in sources)
        }
        if self._observed is not None:
            return self._observed.reached() if seeds else frozenset()
        return frozenset(index for index, needed in enumerate(self._seeds_needed) if needed & seeds)


def seeds_needed(program: Program) -> list[set[int]]:
    """For each gradient that a backward program returns, the numbers of the seeds that it is computed from."""
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    seeds = [node for node, port in zip(placeholders, program.inputs, strict=False) if port.role is Role.SEED]
    made_of: dict[fx.Node, frozenset[int]] = {node: frozenset([number]) for number, node in enumerate(seeds)}
    for node in program.graph.nodes:
        if node.op == "call_function":
            made_of[node] = frozenset().union(*(made_of.get(source, frozenset()) for source in node.all_input_nodes))
    results: Iterable[fx.Node] = next(iter(reversed(program.graph.nodes))).args[0]
    # A gradient that depends on no seed (a constant) is there whenever any seed is.
    return [
        set(made_of.get(node, frozenset()) or range(len(seeds)))
        for node, port in zip(results, program.outputs, strict=True)
        if port.role in GRADIENTS
    ]


@dataclass(frozen=True)
class Backward:
    """The backward of a segment.

    `seeds` and `values` are the numbers of the partition's values that its seeds and its gradients of inputs belong to.
    `observed` is what the segment records of its own gradients, if it runs eagerly.
    """

    program: Program
    seeds: tuple[int, ...]
    values: tuple[int, ...]
    observed: ObservedGradientPresence | None


def derive_presence(backwards: Sequence[Backward | None]) -> list[DerivedGradientPresence | None]:
    """The gradient presence of each segment, given the backwards in the order of the segments.

    The result is None for a segment without a backward, and for one that makes all its gradients in every step: every
    segment after the last that runs eagerly does.
    """
    observed = [backward.observed for backward in backwards if backward is not None and backward.observed is not None]
    found: list[DerivedGradientPresence | None] = [None] * len(backwards)
    if not observed:
        return found
    sources: dict[int, list[tuple[DerivedGradientPresence, int]]] = {}
    depends_on_data = False
    for index, backward in reversed(list(enumerate(backwards))):
        if backward is None:
            continue
        seeds = [list(sources.get(value, ())) for value in backward.seeds]
        presence = DerivedGradientPresence(backward.program, seeds, backward.observed, observed[-1])
        depends_on_data = depends_on_data or backward.observed is not None
        if depends_on_data:
            found[index] = presence
        parameters = sum(port.role is Role.PARAMETER_GRADIENT for port in backward.program.outputs)
        for gradient, value in enumerate(backward.values, parameters):
            sources.setdefault(value, []).append((presence, gradient))
    return found
