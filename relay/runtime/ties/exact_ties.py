"""The choice whether a step adds the gradients of tied weights in PyTorch's order, and the compiled models that do.

Plain PyTorch adds, for each micro-batch, the gradients of all uses of a weight, and adds those sums. The relay is done
with all micro-batches of a segment before it comes to the next one. So what has arrived for a micro-batch waits in the
stash, on the device or on the host, until the gradient of its last use is there.

That takes memory: the size of the tied weights for each micro-batch. Of a matrix that all later segments use as an
embedding of the batch's tokens, only the rows looked up are kept; the rest is summed as that of any parameter.
`ExactTies` decides by the memory, before anything is allocated. Invariant: without ties a compiled model stays the same
object.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hal.program import Port, Program, Role
from hal.slot.layout import lay_out
from hal.spec.units import format_size
from relay.errors import PartitionError
from relay.partition.segments import Value
from relay.runtime.memory_plan import planned_slot_sizes, plans_for, requirement_of
from relay.runtime.stages import CompiledModel, Stage, StageProgram
from relay.runtime.stash.plan import host_bytes
from relay.runtime.ties.find_ties import Tie, find_ties, gradient_positions, looked_up, sums_uses_first
from relay.runtime.ties.programs import handing_on, handing_on_rows, taking_up, taking_up_rows
from relay.runtime.ties.touched_rows import TouchedRows

CACHED = 8
"""Decisions that are kept: one for each list of micro-batches' compiled models."""


WORTH = 0.5
"""Only rows that are looked up are kept where they are at most this share of all rows."""


@dataclass(frozen=True)
class Decision:
    """The compiled models that a step uses, and the tied parameters whose gradients are equal to rounding only."""

    compiled: list[CompiledModel]
    loose: frozenset[str]


class ExactTies:
    """Decides for one session.

    Args:
        mode: the option `exact_ties`.
        slot_count, stash_location: the session's.
        capacity: the bytes that the device has; None if there is no limit.
        native: whether the device runs PyTorch's kernels. Others keep gradients with `mode` True only, and then whole.
        tell: called with a sentence where "auto" chooses sums that are equal to rounding only; once for each sentence.
    """

    def __init__(
        self,
        mode: str | bool,
        slot_count: int,
        stash_location: str,
        capacity: int | None,
        native: bool,
        tell: Callable[[str], object],
    ) -> None:
        self._mode = mode
        self._slot_count = slot_count
        self._stash_location = stash_location
        self._capacity = capacity
        self._native = native
        self._tell_user = tell
        self._decided: dict[tuple[CompiledModel, ...], Decision] = {}
        self._told: set[str] = set()
        # Weak: models without ties are let go, and their kernels with them, where the cache of programs lets them go.
        self._untied: weakref.WeakSet[CompiledModel] = weakref.WeakSet()

    def decide(self, compiled: Sequence[CompiledModel]) -> Decision:
        """What a step on these micro-batches uses.

        Raises PartitionError or OutOfMemory with `exact_ties=True` where it cannot be had.
        """
        key = tuple(compiled)
        found = self._decided.pop(key, None)
        if found is None:
            self._untied.update(model for model in key if model not in self._untied and not find_ties(model))
            if all(model in self._untied for model in key):
                return Decision(list(compiled), frozenset())
            found = self._decide(list(compiled))
        self._decided[key] = found
        while len(self._decided) > CACHED:
            del self._decided[next(iter(self._decided))]
        return found

    def give_up(self, compiled: Sequence[CompiledModel], reason: str) -> Decision | None:
        """The decision for a host that has no room, which is then kept; None where there is no other one."""
        decision = self.decide(compiled)
        if self._mode is True or decision.compiled == list(compiled):
            return None
        ties = _of_concern(list(compiled))
        decision = self._decided[tuple(compiled)] = Decision(list(compiled), _names(ties))
        self._tell(_names(ties), reason)
        return decision

    def clear(self) -> None:
        """Forget the decisions, and with them the compiled models."""
        self._decided.clear()

    def _decide(self, compiled: list[CompiledModel]) -> Decision:
        ties = _of_concern(compiled)
        if not ties or self._mode is False or (self._mode == "auto" and not self._native):
            return Decision(compiled, _names(ties))  # without PyTorch's kernels they are equal to rounding either way
        if compiled[0].head is not None:
            once = "the head runs once, over the whole batch, and the layers for each micro-batch"
            self._refuse_or_tell(tuple(name for tie in ties for name in tie.names), once)
            return Decision(compiled, _names(ties))
        broken = [tie for tie in ties if tie.problem]
        for tie in broken:
            self._refuse_or_tell(tie.names, tie.problem)
        ties = [tie for tie in ties if not tie.problem]
        if not ties:
            return Decision(compiled, _names(broken))
        touched = {tie: row for tie in ties if self._native and (row := _touched(compiled, tie)) is not None}
        made = {
            model: with_exact_ties(model, ties, {tie: row[number] for tie, row in touched.items()})
            for number, model in reversed(list(enumerate(compiled)))
        }
        changed = [made[model] for model in compiled]
        if self._mode is True:  # a step that does not fit is refused as any other
            return Decision(changed, _names(broken))
        plans = plans_for(changed, self._stash_location, True)
        needed = requirement_of(changed, plans, self._slot_count, sum(planned_slot_sizes(changed[0])))
        kept, rest = needed.tied + host_bytes(plans, tied=True), needed.total - needed.tied
        reason = f"it takes {format_size(kept)} to keep them for each of {len(compiled)} micro-batches"
        if kept > rest:
            reason += f", more than all else on the device ({format_size(rest)})"
        elif self._capacity is not None and needed.total > self._capacity:
            reason += f", and the device has {format_size(self._capacity)}"
        else:
            return Decision(changed, _names(broken))
        self._tell(_names(ties), reason)
        return Decision(compiled, _names([*ties, *broken]))

    def _refuse_or_tell(self, names: Sequence[str], problem: str) -> None:
        if self._mode is True:
            raise PartitionError(
                f"exact_ties=True: the gradients of {_listed(frozenset(names))} cannot be added in PyTorch's order, "
                f"because {problem}. Use exact_ties='auto', or one micro-batch."
            )
        self._tell(frozenset(names), problem)

    def _tell(self, names: frozenset[str], reason: str) -> None:
        message = (
            f"The gradients of tied weights ({_listed(names)}) are equal to plain PyTorch's to rounding only, because "
            f"{reason}. exact_ties=True keeps them all the same, exact_ties=False never."
        )
        if message not in self._told:
            self._told.add(message)
            self._tell_user(message)


def with_exact_ties(compiled: CompiledModel, ties: Sequence[Tie], touched: Mapping[Tie, TouchedRows]) -> CompiledModel:
    """The compiled model with the gradients of `ties` handed from segment to segment. It shares all other programs.

    Of ties in `touched` only those rows are handed on.
    """
    values = list(compiled.partition.values)
    stages = list(compiled.stages)
    inputs = list(compiled.partition.inputs)
    kept: list[TouchedRows] = []
    for tie in ties:
        if tie in touched:
            kept.append(_hand_rows_on(tie, touched[tie], values, stages, inputs))
            continue
        first = stages[tie.stages[0]].backward
        assert first is not None
        ports = [first.program.outputs[position] for position in gradient_positions(stages[tie.stages[0]], tie.names)]
        fields, size = lay_out([(port.shape, port.dtype) for port in ports])
        value = Value(len(values), (size,), torch.uint8, None, parts=fields, tied=True)
        values.append(value)
        for number, index in enumerate(tie.stages):
            stage = stages[index]
            assert stage.backward is not None
            positions = gradient_positions(stage, tie.names)
            if number == len(tie.stages) - 1:
                program = taking_up(stage.backward.program, positions)
                backward = replace(stage.backward, seeds=(*stage.backward.seeds, value.index))
                backward = _with_program(backward, program, values)
            else:
                own = frozenset(stage.parameters.index(name) for name in tie.names)
                backward = _hands_on(stage.backward, positions, own, value.index, number > 0, values)
            stages[index] = replace(stage, backward=backward)
    partition = replace(compiled.partition, values=values, inputs=tuple(inputs))
    return replace(
        compiled,
        partition=partition,
        stages=stages,
        touched=tuple(kept),
        whole=compiled.whole or compiled,
    )


def _hand_rows_on(
    tie: Tie, touched: TouchedRows, values: list[Value], stages: list[Stage], inputs: list[int]
) -> TouchedRows:
    """The same for some rows of one parameter. Their numbers are one more tensor of the batch."""
    first = stages[tie.stages[0]]
    assert first.backward is not None
    port = first.backward.program.outputs[gradient_positions(first, tie.names)[0]]
    fields, size = lay_out([((touched.kept, *port.shape[1:]), port.dtype)])
    kept = Value(len(values), (size,), torch.uint8, None, parts=fields, tied=True)
    numbers = Value(len(values) + 1, (touched.kept,), torch.int64, None, sorted(tie.stages))
    values += [kept, numbers]
    inputs.append(numbers.index)
    for number, index in enumerate(tie.stages):
        stage = stages[index]
        backward = stage.backward
        assert backward is not None
        (position,), own = gradient_positions(stage, tie.names), len(stage.segment.inputs)
        reads = (*backward.reads, numbers.index)
        if number == len(tie.stages) - 1:
            program = taking_up_rows(backward.program, position, own, touched.kept)
            changed = replace(backward, reads=reads, seeds=(*backward.seeds, kept.index))
        else:
            program = handing_on_rows(backward.program, position, own, touched.kept, keeps=number == 0)
            parameter = stage.parameters.index(touched.name)
            changed = replace(
                backward,
                reads=reads,
                parameter_gradients=tuple(
                    index for index in backward.parameter_gradients if number == 0 or index != parameter
                ),
                value_gradients=(*backward.value_gradients, kept.index),
                added=(*backward.added, number > 0),
                tied=backward.tied + 1,
            )
        segment = replace(stage.segment, inputs=(*stage.segment.inputs, numbers.index))
        stages[index] = replace(stage, segment=segment, backward=_with_program(changed, program, values))
    return replace(touched, value=numbers.index)


def _hands_on(
    backward: StageProgram, positions: Sequence[int], own: frozenset[int], value: int, adds: bool, values: list[Value]
) -> StageProgram:
    """The visit that writes the gradients of its parameters `own` to a value, or `adds` them to what is there."""
    rest = backward.rest and _hands_on(backward.rest, positions, own, value, adds, values)
    changed = replace(
        backward,
        parameter_gradients=tuple(index for index in backward.parameter_gradients if index not in own),
        value_gradients=(*backward.value_gradients, value),
        added=(*backward.added, adds),
        rest=rest,
        tied=backward.tied + len(positions),
    )
    return _with_program(changed, handing_on(backward.program, positions), values)


def _with_program(backward: StageProgram, program: Program, values: Sequence[Value]) -> StageProgram:
    """The visit with that program, which is to be compiled, and its patterns of accumulation."""
    added = [
        adds
        for value, adds in zip(backward.value_gradients, backward.added, strict=True)
        for _ in values[value].fields(gradient=True)
    ]

    def pattern(later: bool) -> tuple[bool, ...]:
        summed = {Role.PARAMETER_GRADIENT: later, Role.VALUE: False, Role.BUFFER_UPDATE: False}
        ports = [port.role for port in program.outputs]
        plain = [summed[role] for role in ports if role is not Role.VALUE_GRADIENT]
        found = (*plain, *added)
        return found if any(found) else ()

    return replace(backward, program=program, first=pattern(False), later=pattern(True), kernel=None)


def _touched(compiled: Sequence[CompiledModel], tie: Tie) -> list[TouchedRows] | None:
    """The rows of a tie that a step looks up, for each micro-batch; None where whole gradients are kept instead."""
    found = [looked_up(model, tie) for model in compiled]
    port = _first_port(compiled[0], tie)
    count = 0
    for indices in found:
        if indices is None:
            return None
        count += sum(math.prod(one.expression.shape) for one in indices)
    kept = min(count, port.shape[0])
    if kept > WORTH * port.shape[0]:
        return None
    return [TouchedRows(tie.names[0], port.shape[0], kept, indices or (), -1) for indices in found]


def _first_port(compiled: CompiledModel, tie: Tie) -> Port:
    stage = compiled.stages[tie.stages[0]]
    assert stage.backward is not None
    return stage.backward.program.outputs[gradient_positions(stage, tie.names)[0]]


def _of_concern(compiled: Sequence[CompiledModel]) -> list[Tie]:
    """The ties whose gradients the order of visits would add in another order than PyTorch."""
    found = [find_ties(model) for model in dict.fromkeys(compiled)]
    alike = [next((tie for tie in row if tie.problem), row[0]) for row in zip(*found, strict=True)]
    return [tie for tie in alike if len(compiled) > 1 or sums_uses_first(compiled[0], tie)]


def _names(ties: Sequence[Tie]) -> frozenset[str]:
    return frozenset(name for tie in ties for name in tie.names)


def _listed(names: frozenset[str]) -> str:
    """The names, the first few of many."""
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
