"""Makes captured segments into stages: which values each program reads and writes, and which gradients are added.

It captures nothing and compiles nothing. Invariant: a value's gradient is written by one program of a pass first, and
added to by the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hal.program import Program, Role
from hal.slot.layout import lay_out
from relay.capture import Captured, ObservedGradientPresence
from relay.errors import PartitionError
from relay.partition.segments import Partition, Segment, Value
from relay.runtime.gradient_presence import Backward, derive_presence
from relay.runtime.stages import Stage, StageProgram


def connect(stages: Sequence[Stage]) -> None:
    """Settle which gradients are added to others, and which are made at all, given all stages of a model in order."""
    fed: set[int] = set()
    for stage in reversed(stages):
        if stage.backward is None:
            continue
        stage.backward.added = tuple(value in fed for value in stage.backward.value_gradients)
        if stage.backward.rest is not None:
            stage.backward.rest.added = stage.backward.added
        fed.update(stage.backward.value_gradients)
    for stage in stages:
        for program in stage.programs:
            program.first, program.later = program.accumulate(False), program.accumulate(True)
    _refuse_held_states(stages)
    backwards = [
        Backward(back.program, back.seeds, back.value_gradients, presence_in(stage.captured))
        if (back := stage.backward) is not None
        else None
        for stage in stages
    ]
    for stage, gradient_presence in zip(stages, derive_presence(backwards), strict=True):
        stage.gradient_presence = gradient_presence


def _refuse_held_states(stages: Sequence[Stage]) -> None:
    """Raise PartitionError for a buffer that one segment changes and another one's code holds by itself."""
    changed = {stage.buffers[index]: stage for stage in stages for one in stage.programs for index in one.updates}
    for stage in stages:
        for name in stage.segment.held:
            if changed.get(name, stage) is not stage:
                raise PartitionError(
                    f"{stage.segment.name!r} holds the buffer {name!r}, which {changed[name].segment.name!r} changes "
                    "in its forward. With several micro-batches it would read it too late. Pass it on as a tensor."
                )


def add_saved(segment: Segment, captured: Captured, partition: Partition) -> None:
    """Add one value for all tensors that a segment's forward saves for its backward: one transfer if it streams."""
    ports = [port for port in captured.saved if port.index >= len(segment.outputs)]
    if ports:
        fields, size = lay_out([(port.shape, port.dtype) for port in ports])
        value = Value(len(partition.values), (size,), torch.uint8, segment.index, [segment.index], fields)
        partition.values.append(value)
        segment.outputs = (*segment.outputs, value.index)


def make_stage(segment: Segment, captured: Captured, partition: Partition, training: bool, results: bool) -> Stage:
    """The stage of a captured segment."""
    last = segment.index == len(partition.segments) - 1

    values = [value for value in segment.outputs if not partition.values[value].parts]
    bundle = [value for value in segment.outputs if partition.values[value].parts]
    own = [segment.outputs[port.index] for port in captured.saved if port.index < len(values)]
    known = [*segment.inputs, *own]

    def named(indices: list[int], names: Sequence[int]) -> tuple[int, ...]:
        """The values with these indices. Ports beyond the values are the parts of one value."""
        plain = [names[index] for index in indices if index < len(names)]
        return (*plain, *(bundle if len(plain) < len(indices) else ()))

    def make(program: Program) -> StageProgram:
        ports = program.outputs
        return StageProgram(
            program=program,
            reads=named([port.index for port in program.inputs if port.role is Role.VALUE], known),
            seeds=tuple(segment.outputs[port.index] for port in program.inputs if port.role is Role.SEED),
            writes=named([port.index for port in ports if port.role is Role.VALUE], values),
            updates=tuple(port.index for port in ports if port.role is Role.BUFFER_UPDATE),
            parameter_gradients=tuple(port.index for port in ports if port.role is Role.PARAMETER_GRADIENT),
            value_gradients=tuple(segment.inputs[port.index] for port in ports if port.role is Role.VALUE_GRADIENT),
            chunks=segment.chunks,
        )

    forward = backward = None
    if last and partition.has_loss and training:
        assert captured.joint is not None
        backward = make(captured.joint)
    else:
        only_loss = last and partition.has_loss and not results
        forward = make(captured.loss if only_loss and captured.loss is not None else captured.forward)
        if training and captured.backward is not None:
            backward = make(captured.backward)
    parameters = tuple(segment.parameters[names[0]] for names in captured.parameter_names)
    buffers = tuple(segment.buffers[name] for name in captured.buffer_names)
    ports = captured.forward.inputs[: len(parameters) + len(buffers)]
    return Stage(segment, captured, parameters, buffers, tuple(port.dtype for port in ports), forward, backward)


def presence_in(captured: Captured) -> ObservedGradientPresence | None:
    """The record of which gradients a segment that runs eagerly has computed; None for other segments."""
    return captured.eager.presence if captured.eager is not None else None
