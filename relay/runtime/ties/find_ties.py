"""Which parameters several segments use, and in which order their gradients arrive.

Plain data about a compiled model. Nothing is changed here, and nothing is decided (`relay.runtime.ties.exact_ties`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from hal.program import Role
from relay.runtime.stages import CompiledModel, Stage
from relay.runtime.ties.programs import results_of, uses_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Tie:
    """Parameters that the same segments use.

    Attributes:
        names: the parameters.
        stages: the segments' indices in the order in which gradients arrive: from the last segment to the first.
        problem: why their gradients cannot be added in PyTorch's order; empty if they can.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    problem: str = ""


def find_ties(compiled: CompiledModel) -> list[Tie]:
    """The ties of a model between its segments, in the order of first use. Uses within one segment are no tie."""
    users: dict[str, list[int]] = {}
    for index, stage in reversed(list(enumerate(compiled.stages))):
        for name in stage.gradients:
            users.setdefault(name, []).append(index)
    together: dict[tuple[int, ...], list[str]] = {}
    for name, indices in users.items():
        if len(indices) > 1:
            together.setdefault(tuple(indices), []).append(name)
    return [Tie(tuple(names), indices, _problem(compiled, indices)) for indices, names in sorted(together.items())]


def sums_uses_first(compiled: CompiledModel, tie: Tie) -> bool:
    """Whether a segment after the first to arrive has several uses of a parameter.

    Its gradient is then a sum already, while PyTorch adds each use to what has arrived before.
    """
    for index in tie.stages[1:]:
        stage = compiled.stages[index]
        assert stage.backward is not None
        results = results_of(stage.backward.program)
        if any(len(uses_of(results[position])) > 1 for position in gradient_positions(stage, tie.names)):
            return True
    return False


def looked_up(compiled: CompiledModel, tie: Tie) -> tuple[int, ...] | None:
    """The numbers of the batch's tensors whose integers are all the rows that later segments have a gradient for.

    None if a segment after the first to arrive uses the parameter otherwise than as an embedding of such tensors.
    """
    if len(tie.names) > 1 or compiled.stages[tie.stages[0]].segment.chunks is not None:
        return None
    found: list[int] = []
    for number, index in enumerate(tie.stages[1:], 1):
        stage = compiled.stages[index]
        assert stage.backward is not None
        program = stage.backward.program
        uses = uses_of(results_of(program)[gradient_positions(stage, tie.names)[0]])
        if len(uses) > 1 and number < len(tie.stages) - 1:
            return None
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        for use in uses:
            source = _indices(use)
            if source not in placeholders[: len(program.inputs)]:
                return None
            port = program.inputs[placeholders.index(source)]
            if port.role is not Role.VALUE or port.index >= len(stage.segment.inputs):
                return None
            value = stage.segment.inputs[port.index]
            if value not in compiled.partition.inputs:
                return None
            found.append(compiled.partition.inputs.index(value))
    return tuple(dict.fromkeys(found))


_SAME_NUMBERS = {
    aten.view.default, aten._unsafe_view.default, aten.alias.default, aten.detach.default, aten.clone.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default, aten._to_copy.default, aten.permute.default,
}  # fmt: skip
"""Ops that give the integers of their input in another shape or dtype."""


def _indices(use: fx.Node) -> fx.Node | None:
    """What an embedding's gradient is indexed by, before it was reshaped; None for the gradient of another op."""
    if use.target is not aten.embedding_dense_backward.default:
        return None
    node = use.args[1]
    while isinstance(node, fx.Node) and node.target in _SAME_NUMBERS:
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def gradient_positions(stage: Stage, names: tuple[str, ...]) -> list[int]:
    """Where among the outputs of a stage's backward the gradients of these parameters are."""
    assert stage.backward is not None
    first = next(
        position for position, port in enumerate(stage.backward.program.outputs) if port.role is Role.PARAMETER_GRADIENT
    )
    gradients = stage.gradients
    return [first + gradients.index(name) for name in names]


def _problem(compiled: CompiledModel, indices: tuple[int, ...]) -> str:
    if compiled.head is not None:
        return "the head runs over the whole batch, and has no gradient of a micro-batch"
    for index in indices:
        stage = compiled.stages[index]
        if stage.captured.eager is not None:
            return f"layer {stage.segment.name!r} runs eagerly"
        if stage.gradient_presence is not None:
            return f"a layer after {stage.segment.name!r} runs eagerly, and its data decide which gradients there are"
    return ""
