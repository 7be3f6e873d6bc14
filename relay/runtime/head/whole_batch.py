"""The models of a batch's micro-batches, compiled with one head that runs over the whole batch.

The layers are captured for each shape of micro-batch, and the head once. Its program takes what the layers of every
micro-batch made, joins it, and returns the gradients in the same pieces (`relay.partition.whole_head`). So each model
ends in the part of the head that is its micro-batch's, and the head has values of its own: the batch's tensors, the
loss, the outputs. Nothing is allocated here. Invariant: all parts have one program, which runs once a step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from hal.program import Program, Role
from relay.capture import Captured, Lowering
from relay.capture.memory_order import Order
from relay.errors import PartitionError
from relay.partition.segments import Partition, Segment, WholeHead
from relay.partition.whole_head import JoinedHead
from relay.runtime.compiling.capture_segments import Capturing, example_of
from relay.runtime.compiling.make_stages import add_saved, connect, make_stage
from relay.runtime.gradient_layout import refuse_without_gradient, settle_gradients
from relay.runtime.stages import CompiledModel, Stage, StageProgram


def build_over_batch(
    partitions: Sequence[Partition], sizes: Sequence[int], capturing: Capturing, results: bool
) -> list[CompiledModel]:
    """The compiled model of each micro-batch, with one head.

    `partitions[j]`, of micro-batch j with `sizes[j]` samples, each have a head; those of one shape are one object. With
    `results` a forward pass computes the head's outputs besides the loss.
    """
    head = partitions[0].head
    assert head is not None
    if any(other.head is None or other.head.form != head.form for other in partitions):
        raise PartitionError(
            "What comes after the last layer is computed in another way beside one micro-batch than beside the others, "
            "so it cannot run once over the whole batch. Make the batch a multiple of microbatches, or use "
            "microbatches=1."
        )
    distinct = list(dict.fromkeys(partitions))
    captured_layers: dict[Partition, tuple[list[list[torch.Tensor]], list[Captured]]] = {}
    for partition in distinct:
        captured_layers[partition] = capturing.forwards(partition, partition.segments[:-1])
    joined = _joined(head, sizes)
    known = {partition: _requires_grad(partition, captured_layers[partition][1]) for partition in distinct}
    inputs = [
        example_of(partition.values[number], partition.values[number].order).requires_grad_(
            capturing.training and known[partition].get(number, False)
        )
        for partition in partitions
        for number in partition.segments[-1].inputs
    ]
    captured = _capture_head(head, joined, inputs, capturing)
    trained = capturing.training and head.partition.has_loss
    if trained:
        refuse_without_gradient(captured)
        captured = _settle_head(partitions, head, joined, inputs, captured, capturing)
        for partition in distinct:
            given, found = captured_layers[partition]
            orders = _orders_of(partitions, partition, captured)
            for number, order in orders.items():
                partition.values[number].gradient_order = order
            again = functools.partial(capturing.capture, partition)
            settle_gradients(partition, given, found, again, orders)
    for partition in distinct:
        for number, own_number in zip(partition.segments[-1].outputs, joined.outputs, strict=False):
            partition.values[number].dtype = head.partition.values[own_number].dtype
    program = _program_of(captured, trained, results, head.partition.has_loss)
    own = _own_part(head, joined, captured, program, trained, len(inputs))
    whole = CompiledModel(head.partition, [own])
    made: dict[Partition, CompiledModel] = {}
    for partition in distinct:
        built = list(zip(partition.segments, captured_layers[partition][1], strict=False))
        for segment, found_for in built:
            add_saved(segment, found_for, partition)
        stages = [make_stage(segment, one, partition, capturing.training, results) for segment, one in built]
        stages.append(_part(partitions, partition, joined, captured, program, trained))
        connect(stages)
        made[partition] = CompiledModel(partition, stages, whole)
    return [made[partition] for partition in partitions]


def _joined(head: WholeHead, sizes: Sequence[int]) -> Segment:
    """The head as a segment that takes the micro-batches' values."""
    (segment,) = head.partition.segments
    return replace(
        segment,
        module=JoinedHead(segment.module, head.joins, sizes, head.arguments),
        parameters={f"head.{own}": name for own, name in segment.parameters.items()},
        buffers={f"head.{own}": name for own, name in segment.buffers.items()},
    )


def _requires_grad(partition: Partition, found: Sequence[Captured]) -> dict[int, bool]:
    known = {value.index: value.requires_grad for value in partition.values}
    for segment, captured in zip(partition.segments, found, strict=False):
        known.update(zip(segment.outputs, captured.output_requires_grad, strict=True))
    return known


def _capture_head(
    head: WholeHead,
    joined: Segment,
    inputs: Sequence[torch.Tensor],
    capturing: Capturing,
    orders: dict[int, Order] | None = None,
) -> Captured:
    """Capture the head for these values of micro-batches, and its own values' dtypes and orders with it."""
    partition = head.partition
    values = [partition.values[number] for number in joined.inputs]
    if capturing.lowering is Lowering.CORE:
        for value in partition.values:
            value.order = ()
    whole = [example_of(value, value.order) for value in values]
    for example, value in zip(whole, values, strict=True):
        example.requires_grad_(capturing.training and value.requires_grad)
    captured = capturing.capture(partition, joined, [*inputs, *whole], {}, orders or {}, frozenset())
    for index, number in enumerate(joined.outputs):
        partition.values[number].dtype = captured.forward.outputs[index].dtype
        partition.values[number].order = captured.output_orders.get(index, ())
    for index, order in captured.gradient_orders.items():
        if index >= len(inputs):
            partition.values[joined.inputs[index - len(inputs)]].gradient_order = order
    return captured


def _settle_head(
    partitions: Sequence[Partition],
    head: WholeHead,
    joined: Segment,
    inputs: Sequence[torch.Tensor],
    captured: Captured,
    capturing: Capturing,
) -> Captured:
    """The head captured so that micro-batches of one shape have gradients in one order of memory."""
    count = len(head.joins)
    wanted: dict[int, Order] = {}
    for number, partition in enumerate(partitions):
        first = partitions.index(partition)
        for index in range(count):
            order = captured.gradient_orders.get(first * count + index)
            own = captured.gradient_orders.get(number * count + index)
            if order is not None and own is not None and own != order:
                wanted[number * count + index] = order
    return _capture_head(head, joined, inputs, capturing, wanted) if wanted else captured


def _orders_of(partitions: Sequence[Partition], partition: Partition, captured: Captured) -> dict[int, Order]:
    """The orders of the gradients that the head computes for micro-batches of one shape, by value."""
    given = partition.segments[-1].inputs
    first = partitions.index(partition) * len(given)
    return {
        number: captured.gradient_orders[first + index]
        for index, number in enumerate(given)
        if first + index in captured.gradient_orders
    }


def _program_of(captured: Captured, trained: bool, results: bool, has_loss: bool) -> Program:
    if trained:
        assert captured.joint is not None
        return captured.joint
    only_loss = has_loss and not results and captured.loss is not None
    return captured.loss if only_loss and captured.loss is not None else captured.forward


def _stage_of(segment: Segment, captured: Captured, program: StageProgram, trained: bool) -> Stage:
    parameters = tuple(segment.parameters[names[0]] for names in captured.parameter_names)
    buffers = tuple(segment.buffers[name] for name in captured.buffer_names)
    dtypes = tuple(port.dtype for port in captured.forward.inputs[: len(parameters) + len(buffers)])
    forward, backward = (None, program) if trained else (program, None)
    return Stage(segment, captured, parameters, buffers, dtypes, forward, backward)


def _indices(program: Program, role: Role) -> list[int]:
    return [port.index for port in (*program.inputs, *program.outputs) if port.role is role]


def _part(
    partitions: Sequence[Partition],
    partition: Partition,
    joined: Segment,
    captured: Captured,
    program: Program,
    trained: bool,
) -> Stage:
    """The part of the head that belongs to a micro-batch of that shape: what it takes of it, and differentiates."""
    last = partition.segments[-1]
    count = len(last.inputs)
    first = partitions.index(partition) * count
    segment = partition.segments[-1] = replace(
        joined, index=last.index, inputs=last.inputs, outputs=last.outputs, layer_index=last.layer_index
    )

    def own(indices: Sequence[int], start: int) -> tuple[int, ...]:
        return tuple(last.inputs[index - start] for index in indices if start <= index < start + count)

    taken = [port.index for port in program.inputs if port.role is Role.VALUE]
    made = _indices(program, Role.VALUE_GRADIENT)
    for number, other in enumerate(partitions):  # micro-batches of one shape share the stage
        if other is partition:
            assert own(made, number * count) == own(made, first)
    part = StageProgram(
        program=program,
        reads=own(taken, first),
        seeds=last.outputs if _indices(program, Role.SEED) else (),
        writes=(),
        updates=tuple(_indices(program, Role.BUFFER_UPDATE)),
        parameter_gradients=tuple(_indices(program, Role.PARAMETER_GRADIENT)),
        value_gradients=own(made, first),
    )
    return _stage_of(segment, captured, part, trained)


def _own_part(
    head: WholeHead, joined: Segment, captured: Captured, program: Program, trained: bool, given: int
) -> Stage:
    """The part of the head that belongs to no micro-batch: the batch's tensors, the loss and the outputs."""

    def own(indices: Sequence[int]) -> tuple[int, ...]:
        return tuple(joined.inputs[index - given] for index in indices if index >= given)

    taken = [port.index for port in program.inputs if port.role is Role.VALUE]
    part = StageProgram(
        program=program,
        reads=own(taken),
        seeds=joined.outputs[:1] if _indices(program, Role.SEED) else (),
        writes=tuple(joined.outputs[port.index] for port in program.outputs if port.role is Role.VALUE),
        updates=tuple(_indices(program, Role.BUFFER_UPDATE)),
        parameter_gradients=tuple(_indices(program, Role.PARAMETER_GRADIENT)),
        value_gradients=own(_indices(program, Role.VALUE_GRADIENT)),
    )
    part.added = (False,) * len(part.value_gradients)
    # The program counts the micro-batches' values before the batch's own, and those are no values of this partition.
    segment = replace(joined, inputs=((-1,) * given + joined.inputs))
    return _stage_of(segment, captured, part, trained)
