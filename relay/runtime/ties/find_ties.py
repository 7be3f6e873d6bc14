"""Which parameters several segments use, and in which order their gradients arrive.

Plain data about a compiled model. Nothing is changed here, and nothing is decided (`relay.runtime.ties.exact_ties`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hal.program import Role
from relay.capture.native.embedding_rows import NotATable, find_lookups
from relay.runtime.stages import CompiledModel, Stage
from relay.runtime.ties.programs import results_of, uses_of
from relay.runtime.ties.touched_rows import RowIndices


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


def looked_up(compiled: CompiledModel, tie: Tie) -> tuple[RowIndices, ...] | None:
    """The indices of all rows that later segments have a gradient for.

    None if a segment after the first to arrive uses the parameter otherwise than by lookups of indices that follow
    from the batch.
    """
    if len(tie.names) > 1 or compiled.stages[tie.stages[0]].segment.chunks is not None:
        return None
    found: dict[str, RowIndices] = {}
    values = compiled.partition.values
    given = {value: number for number, value in enumerate(compiled.partition.inputs) if not values[value].requires_grad}
    for number, index in enumerate(tie.stages[1:], 1):
        stage = compiled.stages[index]
        assert stage.backward is not None
        program, segment = stage.backward.program, stage.segment
        uses = uses_of(results_of(program)[gradient_positions(stage, tie.names)[0]])
        if len(uses) > 1 and number < len(tie.stages) - 1:
            return None
        of_batch = {own: given[value] for own, value in enumerate(segment.inputs) if value in given}
        try:
            lookups = find_lookups(program, stage.parameters.index(tie.names[0]), of_batch)
        except NotATable:
            return None
        for expression in lookups.expressions.values():
            orders = {own: values[segment.inputs[own]].order for own in expression.values}
            inputs = {own: of_batch[own] for own in expression.values}
            # The same indices in several segments count once.
            found.setdefault(_by_tensor(expression.key, inputs), RowIndices(expression, inputs, orders))
    return tuple(found.values())


def _by_tensor(key: str, inputs: Mapping[int, int]) -> str:
    """The key of an expression with the numbers of the batch's tensors in place of those of a segment's inputs."""

    def renamed(found: re.Match[str]) -> str:
        return f"tensor {inputs[int(found[1])]}"

    return re.sub(r"value (\d+)", renamed, key)


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
