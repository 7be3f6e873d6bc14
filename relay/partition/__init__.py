"""From a model to segments: prologue, repeated layers, epilogue with the loss, and the values between them.

A model given whole is traced once with fake tensors, with each call of a repeated block as one op. The ops before the
first block become the prologue, those after the last the epilogue, those between two blocks an interlude; the edges
become the values that one segment passes to another. A list of modules is a partition already, and its last segment
includes the loss. Programs are made in `relay.capture`, and segments are run in `relay.runtime`; no model class is
known by name here. `relay.runtime` and the folders above it may import this folder.

Invariant: run in order, the segments compute what the model computes, op for op, dropout and buffers included.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from relay.capture import GuardTracer, as_fake, autocast, blocks_as_ops, call_with, run_fake, trace
from relay.capture.guards.attribute_reads import Reads, recorded_reads
from relay.capture.guards.executed_code import recorded_code
from relay.capture.guards.plain_tensors import PlainTensors, constants_of
from relay.capture.guards.unsupported import check_module, check_outside
from relay.capture.memory_order import order_of
from relay.data.loss_weight import LossWeight
from relay.errors import PartitionError
from relay.graph.pytree import TensorTree, tensor_leaves
from relay.models.huggingface import without_cache
from relay.partition.find_blocks import find_blocks
from relay.partition.graph_split import cut_graph
from relay.partition.loss_forms import find_loss_weight
from relay.partition.segments import Partition, Segment, Value


def partition_model(
    model: nn.Module,
    batch: Sequence[torch.Tensor],
    tree: TensorTree,
    compute: torch.dtype = torch.float32,
    active: Sequence[str] | None = None,
) -> Partition:
    """Cut a whole model into segments.

    The model is called as `model(**tree.fill(batch))`, under PyTorch's autocast to `compute` where that is not float32.
    With `active`, the names of some of its repeated blocks, the other blocks return their first argument unchanged.

    Raises PartitionError if the model cannot be cut, and CaptureError if it cannot be traced.
    """
    check_module(model)
    blocks = find_blocks(model)
    if not blocks:
        raise PartitionError(
            f"{type(model).__name__} has no repeated layers: no ModuleList or Sequential in it holds two or more "
            "layers of one class. Pass the model as a list of modules, with loss=."
        )
    names = _canonical_names(model)
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    states = [*parameters.values(), *buffers.values()]
    state_names = [*parameters, *buffers]
    structure: list[TensorTree] = []
    has_loss: list[bool] = []

    reads: Reads = {}

    def run(state: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        with recorded_reads(model) as seen, recorded_code():
            output = call_with(model, states, state, (), tree.fill(leaves))
        reads.update(seen)
        loss = loss_of(output)
        results, output_tree = tensor_leaves(output)
        structure.append(output_tree)
        has_loss.append(loss is not None)
        return ([loss] if loss is not None else []) + results

    skipped = set() if active is None else set(blocks) - set(active)
    check_outside(model, blocks)
    guard_tracer = GuardTracer(batch)
    with PlainTensors(model) as plain:
        with blocks_as_ops(blocks, skipped, compute) as calls, without_cache(model), autocast(compute):
            traced = trace(run, (states, list(batch)), type(model).__name__, guard_tracer)
    plain.refuse_states(type(model).__name__, constants_of(traced))
    if not calls:
        raise PartitionError(
            f"{type(model).__name__} did not call any of its repeated layers ({', '.join(list(blocks)[:3])}, ...) for "
            "this batch. Pass the model as a list of modules, with loss=."
        )
    state_of_name = dict(zip(state_names, states, strict=True))
    partition = cut_graph(traced, state_of_name, calls, names, has_loss[0], structure[0])
    partition.guards = tuple(guard_tracer.guards)
    partition.reads = reads
    return partition


def partition_list(
    modules: Sequence[nn.Module],
    loss: Callable[..., torch.Tensor] | None,
    inputs: Sequence[torch.Tensor],
    input_tree: TensorTree,
    targets: Sequence[torch.Tensor],
    target_tree: TensorTree | None,
    compute: torch.dtype = torch.float32,
    active: Sequence[str] | None = None,
) -> Partition:
    """Cut a list of modules into segments, one for each module.

    Each module is called with the output of the module before it; the last segment also calls `loss(output, targets)`.
    `input_tree` and `target_tree` nest the tensors of `inputs` and `targets` as the modules and the loss take them.
    Without `target_tree` there is no loss, and the last module's output is the result. With `active`, indices into the
    list written as strings, the other modules are left out.

    Raises PartitionError if the loss is not a scalar, and CaptureError if a module fails on fake tensors.
    """
    model = list_as_model(modules, loss)
    check_module(model)
    names = _canonical_names(model)
    values: list[Value] = []

    def new_values(tensors: Sequence[torch.Tensor], producer: int | None) -> tuple[int, ...]:
        made = [
            Value(
                len(values) + number,
                tuple(tensor.shape),
                tensor.dtype,
                producer,
                order=order_of(tensor) if producer is None else (),
            )
            for number, tensor in enumerate(tensors)
        ]
        values.extend(made)
        return tuple(value.index for value in made)

    batch_inputs = new_values(inputs, None)
    batch_targets = new_values(targets, None)
    segments: list[Segment] = []
    current, tree = batch_inputs, input_tree
    everything = as_fake([*inputs, *targets])
    fakes, fake_targets = everything[: len(inputs)], everything[len(inputs) :]
    weight: LossWeight | None = None
    doubt: str | None = None
    taking_part = [
        (str(index), module) for index, module in enumerate(modules) if active is None or str(index) in active
    ]
    for index, (name, module) in enumerate(taking_part):
        call = ModuleCall(module, tree)
        last = index == len(taking_part) - 1
        with autocast(compute):
            fakes = call.outputs_of(fakes, f"{name} ({type(module).__name__})")
        sources = current
        alike: tuple[Any, ...] = (module, tree.spec, tree.constants)
        if last and target_tree is not None:
            assert loss is not None
            weight, doubt = find_loss_weight(
                functools.partial(_call_loss, loss, call.output_tree, target_tree), fakes, fake_targets, len(inputs)
            )
            ending = LossCall(call, loss, target_tree, len(current))
            alike = ([module, loss], tree.spec, tree.constants, target_tree.spec, target_tree.constants)
            segment_module: nn.Module = ending
            sources = (*current, *batch_targets)
            run_fake(_LossAlone(ending, len(fakes)), [*fakes, *fake_targets], "loss")
            outputs = new_values([torch.empty(()), *fakes], index)
        else:
            segment_module = call
            outputs = new_values(fakes, index)
        segments.append(
            Segment(
                index,
                name,
                segment_module,
                sources,
                outputs,
                _own_names(segment_module, module, f"{name}.", names, buffers=False),
                _own_names(segment_module, module, f"{name}.", names, buffers=True),
                alike,
                None if last else type(module),
            )
        )
        for source in sources:
            values[source].consumers.append(index)
        current, tree = outputs, call.output_tree
    has_loss = target_tree is not None
    results = segments[-1].outputs[1:] if has_loss else segments[-1].outputs
    return Partition(segments, values, (*batch_inputs, *batch_targets), has_loss, results, tree, weight, doubt)


def list_as_model(modules: Sequence[nn.Module], loss: Any) -> nn.Module:
    """One module that holds the modules under their indices, and the loss under `loss` if it is a module too."""
    named = [(str(index), module) for index, module in enumerate(modules)]
    return nn.Sequential(OrderedDict([*named, ("loss", loss)] if isinstance(loss, nn.Module) else named))


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss in a model's output: `.loss`, or the key `loss`, or None. Raises PartitionError if not a scalar."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is not None:
        _check_scalar(loss)
    return loss


def _check_scalar(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise PartitionError(f"The loss must be a scalar tensor; got {type(loss).__name__}.")
    if loss.dim() != 0 or not loss.dtype.is_floating_point:
        raise PartitionError(
            f"The loss must be a scalar of a floating-point dtype; got shape {tuple(loss.shape)} of {loss.dtype}. "
            "Reduce it, for example with .mean()."
        )


def _call_loss(
    loss: Callable[..., torch.Tensor],
    output_tree: TensorTree,
    target_tree: TensorTree,
    outputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
) -> torch.Tensor:
    return loss(output_tree.fill(outputs), target_tree.fill(targets))


class ModuleCall(nn.Module):
    """One module of a list, as a function from the tensors of its argument to the tensors of its output."""

    output_tree: TensorTree

    def __init__(self, module: nn.Module, input_tree: TensorTree) -> None:
        super().__init__()
        self.module = module
        self.input_tree = input_tree

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output, self.output_tree = tensor_leaves(self.module(self.input_tree.fill(tensors)))
        return tuple(output)

    def outputs_of(self, fakes: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
        """The module's outputs for fake tensors. Sets `output_tree`. `name` is used in errors."""
        return run_fake(self, fakes, name)


class LossCall(nn.Module):
    """The last module of a list with the loss: (argument tensors, target tensors) -> (loss, output tensors)."""

    def __init__(
        self, call: ModuleCall, loss: Callable[..., torch.Tensor], target_tree: TensorTree, input_count: int
    ) -> None:
        super().__init__()
        self.call = call
        self.loss = loss
        self.target_tree = target_tree
        self.input_count = input_count

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.call(*tensors[: self.input_count])
        loss = self.loss(self.call.output_tree.fill(outputs), self.target_tree.fill(tensors[self.input_count :]))
        return (loss, *(output.detach() for output in outputs))


class _LossAlone(nn.Module):
    """The loss of a list of modules alone, checked to be a scalar: (output tensors, target tensors) -> (loss,)."""

    def __init__(self, ending: LossCall, output_count: int) -> None:
        super().__init__()
        self.loss = ending.loss
        self.trees = ending.call.output_tree, ending.target_tree
        self.output_count = output_count

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor]:
        output_tree, target_tree = self.trees
        outputs, targets = tensors[: self.output_count], tensors[self.output_count :]
        loss = self.loss(output_tree.fill(outputs), target_tree.fill(targets))
        _check_scalar(loss)
        return (loss,)


def _canonical_names(model: nn.Module) -> dict[int, str]:
    """The first name of every parameter and buffer, by the tensor's id. A tied tensor has one name."""
    names: dict[int, str] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        names.setdefault(id(tensor), name)
    return names


def _own_names(
    wrapper: nn.Module, module: nn.Module, prefix: str, names: dict[int, str], buffers: bool
) -> dict[str, str]:
    members = (
        wrapper.named_buffers(remove_duplicate=False) if buffers else wrapper.named_parameters(remove_duplicate=False)
    )
    return {name: names.get(id(tensor), prefix + name) for name, tensor in members}
