"""A list of modules with a head over the whole batch: the loss, and the last module if that takes samples together.

The other modules are segments as in `relay.partition.module_list`. How their outputs are joined is known from the
labels of the batch's rows; where the modules cannot be followed, from the shapes of their outputs, and that is said.
Invariant: up to the head nothing takes several samples together; if something does, it is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx, nn

from relay.capture import BLOCK, as_fake, autocast, run_fake
from relay.data.loss_weight import LossPlan
from relay.data.microbatches import Piece
from relay.errors import PartitionError, RelayError
from relay.graph.pytree import TensorTree
from relay.partition.batch_analysis import Followed, NotFollowed, follow_batch
from relay.partition.batch_flow.labels import Kind, Label
from relay.partition.cut_head import mixes_early
from relay.partition.module_list import (
    LossCall,
    ModuleCall,
    TracedList,
    canonical_names,
    list_as_model,
    own_names,
    partition_list,
)
from relay.partition.segments import Join, Partition, Segment, Value, WholeHead
from relay.partition.whole_head import LossOfOutputs, join_of


def partition_list_over_batch(
    modules: Sequence[nn.Module],
    loss: Callable[..., torch.Tensor] | None,
    inputs: Sequence[torch.Tensor],
    input_tree: TensorTree,
    targets: Sequence[torch.Tensor],
    target_tree: TensorTree | None,
    compute: torch.dtype,
    active: Sequence[str] | None,
    whole: Piece,
    size: int,
) -> Partition:
    """The partition of a micro-batch of `size` samples of the batch `whole`, whose last segment stands for the head.

    The other arguments are those of `partition_list`. Raises PartitionError where samples are taken together before
    the head.
    """
    model = list_as_model(modules, loss)
    partition = partition_list(modules, None, inputs, input_tree, (), None, compute, active)
    last = partition.segments[-1]
    has_loss = target_tree is not None and loss is not None

    def refused(why: str) -> PartitionError:
        return mixes_early(type(model).__name__, why, "The loss" if has_loss else "An output")

    calls = [segment.module for segment in partition.segments]
    labels, unknown = _labels(model, modules, inputs, input_tree, compute, active, whole, size)
    ending = labels.why_last(last.name) if labels is not None else None
    with_last = ending is not None or loss is None or target_tree is None
    if with_last and len(partition.segments) == 1:
        raise refused(ending or f"module {last.name!r} is the only one")
    shapes, fake_targets = _whole_outputs(calls, whole, compute, len(inputs))
    given = last.inputs if with_last else last.outputs
    small = [partition.values[number].shape for number in given]
    taken_whole = shapes[-2 if with_last else -1]
    joins = _joins(labels, with_last, taken_whole, small, (size, whole.size), refused)

    call = last.module
    assert isinstance(call, ModuleCall)
    module: nn.Module = call
    if has_loss:
        assert loss is not None
        assert target_tree is not None
        count = len(shapes[-1])
        alone = LossOfOutputs(loss, call.output_tree, target_tree, count)
        run_fake(alone, [*shapes[-1], *fake_targets], "loss")
        module = LossCall(call, loss, target_tree, len(given)) if with_last else alone
    first = len(partition.values)
    for number, tensor in enumerate(targets):
        partition.values.append(Value(first + number, tuple(tensor.shape), tensor.dtype, None))
    partition.inputs = (*partition.inputs, *range(first, first + len(targets)))
    if with_last:
        partition.segments.pop()
        for value in partition.values:
            value.consumers = [consumer for consumer in value.consumers if consumer != last.index]
    else:
        last.kind = type(call.module)
    names, prefix = canonical_names(model), f"{last.name}." if with_last else "loss."
    index = len(partition.segments)
    loss_value: tuple[int, ...] = ()
    if has_loss:
        loss_value = (len(partition.values),)
        partition.values.append(Value(loss_value[0], (), torch.float32, index))
    head = Segment(
        index,
        last.name if with_last else "loss",
        module,
        given,
        loss_value,
        own_names(module, prefix, names, buffers=False),
        own_names(module, prefix, names, buffers=True),
        layer_index=index,
    )
    for number in dict.fromkeys(given):
        partition.values[number].consumers.append(index)
    partition.segments.append(head)
    partition.has_loss, partition.results = has_loss, ()
    taken = list(range(len(inputs), len(whole.tensors))) if has_loss else []
    own = _partition_of_head(head, whole, taken, shapes[-1], has_loss, partition.result_tree)
    arguments = tuple(range(len(joins) + len(taken)))
    partition.head = WholeHead(own, joins, arguments, (with_last, joins, str(call.output_tree.spec)))
    partition.loss_plan = LossPlan(unknown=unknown)
    return partition


class _Labels:
    """The labels of a list's values: of its outputs, and of what its last module takes."""

    def __init__(self, followed: Followed) -> None:
        self._followed = followed
        flow = followed.flow
        calls = [node for node in followed.large.module.graph.nodes if node.target is BLOCK]
        taken: Sequence[fx.Node] = calls[-1].args[1]  # type: ignore[assignment]
        self.outputs = [flow.label(node) for node in followed.large.results]
        self.inputs = [flow.label(node) for node in taken]

    def why_last(self, name: str) -> str | None:
        """Why the last module takes samples together, if it does and no module before it does."""
        for label in self.outputs:
            if label.kind is Kind.MIXED and label.cause is not None and label.cause.layer == name:
                return self._followed.where(label.cause)
        return None

    def why(self, label: Label) -> str:
        """Why a value with that label cannot be joined."""
        if label.cause is not None:
            return self._followed.where(label.cause)
        return "a module returns a value that the micro-batches' parts do not make"


def _labels(
    model: nn.Module,
    modules: Sequence[nn.Module],
    inputs: Sequence[torch.Tensor],
    input_tree: TensorTree,
    compute: torch.dtype,
    active: Sequence[str] | None,
    whole: Piece,
    size: int,
) -> tuple[_Labels | None, str | None]:
    """The labels, and what could not be followed: the labels themselves are None if nothing could."""
    numbered = [(str(index), module) for index, module in enumerate(modules)]
    taking_part = [(name, module) for name, module in numbered if active is None or name in active]
    traced = TracedList(model, taking_part, None, input_tree, len(inputs), None, compute)
    states = dict(model.named_parameters()) | dict(model.named_buffers())
    alone = replace(whole, tensors=whole.tensors[: len(inputs)])
    try:
        small = traced.traced(inputs)
        followed = follow_batch(small, (), lambda tensors, _: traced.traced(tensors), alone, size, states)
    except (NotFollowed, RelayError) as why:
        return None, str(why).split(". ")[0]
    unknown = followed.where(followed.assumed[0]) if followed.assumed else None
    return _Labels(followed), unknown


def _whole_outputs(
    calls: Sequence[nn.Module], whole: Piece, compute: torch.dtype, count: int
) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """The whole batch's inputs and each module's outputs for it, as fake tensors, and its targets."""
    everything = as_fake(whole.tensors)
    shapes = [everything[:count]]
    for number, call in enumerate(calls):
        assert isinstance(call, ModuleCall)
        with autocast(compute):
            shapes.append(call.outputs_of(shapes[-1], f"{number} ({type(call.module).__name__})"))
    return shapes, everything[count:]


def _joins(
    labels: _Labels | None,
    with_last: bool,
    whole: Sequence[torch.Tensor],
    small: Sequence[Sequence[int]],
    lengths: tuple[int, int],
    refused: Callable[[str], PartitionError],
) -> tuple[Join, ...]:
    """How each value that the head takes is joined; `whole` and `small` have their shapes."""
    joins = []
    size, length = lengths
    for number, (one, shape) in enumerate(zip(whole, small, strict=True)):
        if labels is not None:
            label = (labels.inputs if with_last else labels.outputs)[number]
            join = join_of(label, one.shape[label.dim] if label.kind is Kind.ROWS else 0, length)
            if join is None:
                raise refused(labels.why(label))
        else:
            dims = [dim for dim, (large, little) in enumerate(zip(one.shape, shape, strict=True)) if large != little]
            if len(dims) != 1 or one.shape[dims[0]] != length or shape[dims[0]] != size:
                raise refused(f"an output of shape {tuple(shape)} has no dimension of {size} samples")
            join = Join("rows", dims[0])
        joins.append(join)
    return tuple(joins)


def _partition_of_head(
    head: Segment,
    whole: Piece,
    taken: Sequence[int],
    outputs: Sequence[torch.Tensor],
    has_loss: bool,
    result_tree: TensorTree,
) -> Partition:
    """A partition of the head alone: the batch's tensors, the loss and the outputs."""
    values = [Value(number, tuple(one.shape), one.dtype, None) for number, one in enumerate(whole.tensors)]
    for number in taken:
        values[number].consumers.append(0)
    count = len(values)
    shapes = [torch.Size(())] * has_loss + [one.shape for one in outputs]
    values += [Value(count + number, tuple(shape), torch.float32, 0) for number, shape in enumerate(shapes)]
    made = tuple(range(count, len(values)))
    segment = Segment(
        0, head.name, head.module, tuple(taken), made, head.parameters, head.buffers, layer_index=head.layer_index
    )
    inputs = tuple(range(len(whole.tensors)))
    return Partition([segment], values, inputs, has_loss, made[int(has_loss) :], result_tree)
