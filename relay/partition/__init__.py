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
    """Cut a whole model, called as `model(**tree.fill(batch))` and computed in `compute`.

    Of its repeated blocks only the `active` take part, where given; the others hand on what they are given.
    Raises PartitionError or CaptureError.
    """
    check_module(model)
    blocks = find_blocks(model)
    if not blocks:
        raise PartitionError(
            f"{type(model).__name__} has no repeated layers: no ModuleList or Sequential in it holds two or more "
            "layers of one class. Give the model as a list of modules, with loss=."
        )
    names = _canonical_names(model)
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    states = [*parameters.values(), *buffers.values()]
    state_names = [*parameters, *buffers]
    structure: list[TensorTree] = []
    has_loss: list[bool] = []

    def run(state: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        output = call_with(model, states, state, (), tree.fill(leaves))
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
            "this batch. Give the model as a list of modules, with loss=."
        )
    held = dict(zip(state_names, states, strict=True))
    partition = cut_graph(traced, held, calls, names, has_loss[0], structure[0])
    partition.guards = tuple(guard_tracer.guards)
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
    """Cut a list of modules, each called with the output of the one before; `loss(output, targets)` ends it.

    Of the modules only the `active` (their places in the list, as strings) take part, where given.

    Without `target_tree` the last module's output is the result and there is no loss.
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
        (str(place), module) for place, module in enumerate(modules) if active is None or str(place) in active
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
    """A list of modules as one that holds them under their numbers, and a loss that is a module under `loss`."""
    named = [(str(index), module) for index, module in enumerate(modules)]
    return nn.Sequential(OrderedDict([*named, ("loss", loss)] if isinstance(loss, nn.Module) else named))


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss in a model's output: `.loss`, or the key `loss` of a mapping. Raises PartitionError if not scalar."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is not None:
        _check_scalar(loss)
    return loss


def _check_scalar(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise PartitionError(f"The loss must be a tensor with one number; got {type(loss).__name__}.")
    if loss.dim() != 0 or not loss.dtype.is_floating_point:
        raise PartitionError(
            f"The loss must be a scalar, a mean over the samples; got shape {tuple(loss.shape)} of {loss.dtype}. "
            "Reduce it (for example with .mean())."
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
    """One module of a list: takes the tensors of its argument, returns the tensors of its output."""

    output_tree: TensorTree

    def __init__(self, module: nn.Module, input_tree: TensorTree) -> None:
        super().__init__()
        self.module = module
        self.input_tree = input_tree

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output, self.output_tree = tensor_leaves(self.module(self.input_tree.fill(tensors)))
        return tuple(output)

    def outputs_of(self, fakes: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
        """What the module makes of fake tensors; also learns `output_tree`. `name` is for errors."""
        return run_fake(self, fakes, name)


class LossCall(nn.Module):
    """The last module of a list with the loss: (tensors of its argument, tensors of the targets) -> (loss, ...)."""

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
    """The loss of a list of modules, held to be one number: (tensors of the output, tensors of the targets) -> it."""

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
    """The first name of every parameter and buffer, by identity: tied tensors have one."""
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
