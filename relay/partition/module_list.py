"""A list of modules as a partition: one segment for each module, the last with the loss.

The modules are called in order, each with the output of the one before. Invariant: a module is called on fake tensors
only, and is left as it was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from relay.capture import as_fake, autocast, blocks_as_ops, call_with, fingerprint, run_fake, trace
from relay.capture.guards.attribute_reads import Reads, recorded_reads
from relay.capture.guards.executed_code import recorded_code
from relay.capture.guards.held_tensors import replacing
from relay.capture.guards.mutated_arguments import MemoryUse, WatchedMemory
from relay.capture.guards.unsupported import check_module
from relay.capture.memory_order import order_of
from relay.capture.states.own_generators import BY_PYTHON, decide, have_drawn, python_numbers
from relay.capture.states.shared_states import SharedStates
from relay.data.loss_weight import LossPlan
from relay.data.microbatches import Piece
from relay.errors import RelayError
from relay.graph.pytree import TensorTree, tensor_leaves
from relay.partition.batch_analysis import TracedModel, plan_for
from relay.partition.find_blocks import undisturbed
from relay.partition.graph_segment import GraphSegment, graph_of_loss
from relay.partition.named_outputs import scalar_loss
from relay.partition.segments import Partition, Segment, Value
from relay.partition.written_arguments import copied, written_elsewhere


def partition_list(
    modules: Sequence[nn.Module],
    loss: Callable[..., torch.Tensor] | None,
    inputs: Sequence[torch.Tensor],
    input_tree: TensorTree,
    targets: Sequence[torch.Tensor],
    target_tree: TensorTree | None,
    compute: torch.dtype = torch.float32,
    active: Sequence[str] | None = None,
    whole: Piece | None = None,
    size: int = 0,
) -> Partition:
    """Cut a list of modules into segments, one for each module.

    Each module is called with the output of the module before it; the last segment also calls `loss(output, targets)`.
    `input_tree` and `target_tree` nest the tensors of `inputs` and `targets` as the modules and the loss take them.
    Without `target_tree` there is no loss, and the last module's output is the result. With `active`, indices into the
    list written as strings, the other modules are left out. If `inputs` and `targets` are a micro-batch's, of `size`
    samples, `whole` is the batch that it is cut from.

    Raises PartitionError if the loss is not a scalar, and CaptureError if a module fails on fake tensors.
    """
    model = list_as_model(modules, loss)
    check_module(model)
    names = canonical_names(model)
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
    taking_part = [
        (str(index), module) for index, module in enumerate(modules) if active is None or str(index) in active
    ]
    plan, reads, shared, states = LossPlan(), Reads(), False, SharedStates()
    loss_graph: GraphSegment | None = None
    further: tuple[int, ...] = ()
    if whole is not None:
        traced = TracedList(model, taking_part, loss, input_tree, len(inputs), target_tree, compute)
        reads = traced.reads
        with undisturbed(model):  # the whole batch is traced, which the model never sees
            plan, loss_graph, given = traced.planned([*inputs, *targets], whole, size)
        further = new_values(given, None)
    for index, (name, module) in enumerate(taking_part):
        call = ModuleCall(module, tree)
        last = index == len(taking_part) - 1
        with autocast(compute), states.call(id(module), name, list(module.named_modules())):
            fakes = call.outputs_of(fakes, f"{name} ({type(module).__name__})")
        if call.memory.writes and shared:
            raise written_elsewhere(name)
        shared |= call.memory.shares_others
        sources = current
        alike: tuple[Any, ...] = (module, tree.spec, tree.constants, call.memory.writes)
        if last and target_tree is not None:
            assert loss is not None
            ending = LossCall(call, loss, target_tree, len(current))
            alike = ([module, loss], tree.spec, tree.constants, target_tree.spec, target_tree.constants)
            alone = _LossAlone(ending, len(fakes))
            with states.call("loss", "loss", list(alone.named_modules())):
                run_fake(alone, [*fakes, *fake_targets], "loss")
            if loss_graph is not None:
                ending = LossCall(call, loss_graph, target_tree, len(current))
                form = fingerprint(loss_graph.graph.graph, [], [], {}), loss_graph.described()
                alike = ([module], *alike[1:], *form)
            segment_module: nn.Module = ending
            sources = (*current, *batch_targets, *further)
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
                own_names(segment_module, f"{name}.", names, buffers=False),
                own_names(segment_module, f"{name}.", names, buffers=True),
                alike,
                None if last else type(module),
            )
        )
        for source in sources:
            values[source].consumers.append(index)
        current, tree = outputs, call.output_tree
    states.check()
    has_loss = target_tree is not None
    results = segments[-1].outputs[1:] if has_loss else segments[-1].outputs
    batch = (*batch_inputs, *batch_targets, *further)
    return Partition(segments, values, batch, has_loss, results, tree, plan, reads=reads)


def list_as_model(modules: Sequence[nn.Module], loss: Any) -> nn.Module:
    """One module that holds the modules under their indices, and the loss under `loss` if it is a module too."""
    named = [(str(index), module) for index, module in enumerate(modules)]
    return nn.Sequential(OrderedDict([*named, ("loss", loss)] if isinstance(loss, nn.Module) else named))


class TracedList(nn.Module):
    """A list of modules as one function, traced with each module as an opaque call."""

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[tuple[str, nn.Module]],
        loss: Callable[..., torch.Tensor] | None,
        input_tree: TensorTree,
        input_count: int,
        target_tree: TensorTree | None,
        compute: torch.dtype,
    ) -> None:
        super().__init__()
        self.model = model
        self.modules_in_order = list(modules)
        self.loss = loss
        self.input_tree, self.input_count, self.target_tree = input_tree, input_count, target_tree
        self.compute = compute
        self.reads: Reads = {}

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        value = self.input_tree.fill(tensors[: self.input_count])
        for _, module in self.modules_in_order:
            value = module(value)
        outputs, tree = tensor_leaves(value)
        if self.loss is None or self.target_tree is None:
            return list(outputs)
        # A trace names a tensor by the last op that returned it, which may be one of the loss's.
        handed_on = [torch.ops.aten.alias.default(output) for output in outputs]
        loss = self.loss(tree.fill(outputs), self.target_tree.fill(tensors[self.input_count :]))
        return [scalar_loss(loss), *handed_on]

    def planned(
        self, batch: Sequence[torch.Tensor], whole: Piece, size: int
    ) -> tuple[LossPlan, GraphSegment | None, list[torch.Tensor]]:
        """The plan for the loss; if the loss was rewritten its graph, and fakes of what that is given besides."""
        states = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        drawn = python_numbers()
        try:
            traced = self.traced(batch)
            if have_drawn(drawn) and decide(traced.module, lambda: self.traced(batch).module):
                return LossPlan(unknown=f"{BY_PYTHON} decide it"), None, []
        except RelayError as failure:
            return LossPlan(unknown=f"it cannot be traced ({str(failure).split('. ')[0]})"), None, []
        plan, changed = plan_for(traced, (), lambda tensors, _: self.traced(tensors), whole, size, states)
        if not changed:
            return plan, None, []
        placeholders = traced.module.graph.find_nodes(op="placeholder")
        of_states = dict(zip(placeholders, states.items(), strict=False))
        rest = placeholders[len(states) + self.input_count :]
        loss, *handed_on = traced.results
        outputs = [node.all_input_nodes[0] for node in handed_on]
        graph = graph_of_loss(traced.module, loss, of_states, [*outputs, *rest])
        return plan, graph, [node.meta["val"] for node in placeholders[len(states) + len(batch) :]]

    def traced(self, tensors: Sequence[torch.Tensor]) -> TracedModel:
        """The trace of the modules, and of the loss if there is one, for the batch's tensors."""
        originals = [*self.model.parameters(), *self.model.buffers()]
        blocks = {id(module): (name, module) for name, module in reversed(self.modules_in_order)}

        def run(state: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
            with recorded_reads(self.model) as seen, recorded_code(), replacing(originals, state, "loss"):
                results: list[torch.Tensor] = call_with(self, originals, state, leaves)
            self.reads.update(seen)
            return results

        with blocks_as_ops(dict(blocks.values()), (), self.compute) as calls, autocast(self.compute):
            traced = trace(run, (originals, list(tensors)), "loss")
        return TracedModel(traced, calls, self.loss is not None and self.target_tree is not None, self.input_tree)


class ModuleCall(nn.Module):
    """One module of a list, as a function from the tensors of its argument to the tensors of its output."""

    output_tree: TensorTree

    def __init__(self, module: nn.Module, input_tree: TensorTree) -> None:
        super().__init__()
        self.module = module
        self.input_tree = input_tree
        self.memory = MemoryUse()
        self._watches = False

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = copied(tensors, self.memory.writes)
        with WatchedMemory() if self._watches else nullcontext() as watched:
            output, self.output_tree = tensor_leaves(self.module(self.input_tree.fill(given)))
        if watched is not None:
            self.memory = watched.use(given, output, self.module)
        return tuple(output)

    def outputs_of(self, fakes: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
        """The module's outputs for fake tensors. Sets `output_tree` and `memory`. `name` is used in errors."""
        self._watches = True
        try:
            return run_fake(self, fakes, name)
        finally:
            self._watches = False


class LossCall(nn.Module):
    """The last module of a list with the loss: (argument tensors, target tensors) -> (loss, output tensors).

    A loss that was rewritten is a graph: (output tensors, target tensors, what it is given of the whole batch) -> loss.
    """

    def __init__(
        self, call: ModuleCall, loss: Callable[..., torch.Tensor], target_tree: TensorTree, input_count: int
    ) -> None:
        super().__init__()
        self.call = call
        self.loss = loss
        self.target_tree = target_tree
        self.input_count = input_count

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, rest = self.call(*tensors[: self.input_count]), tensors[self.input_count :]
        if isinstance(self.loss, GraphSegment):
            (loss,) = self.loss(*outputs, *rest)
        else:
            loss = scalar_loss(self.loss(self.call.output_tree.fill(outputs), self.target_tree.fill(rest)))
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
        return (scalar_loss(self.loss(output_tree.fill(outputs), target_tree.fill(targets))),)


def list_of_modules(
    model: nn.Module | Sequence[nn.Module], loss: Callable[..., torch.Tensor] | None
) -> list[nn.Module] | None:
    """The modules of a model given as a list, or as a Sequential with a loss beside it; None for a whole model."""
    if isinstance(model, nn.Module) and not (isinstance(model, (nn.Sequential, nn.ModuleList)) and loss is not None):
        if loss is not None:
            raise ValueError("loss= goes with a list of modules; a whole model gives its loss in output.loss")
        return None
    modules: list[nn.Module] = list(model)
    if not modules or loss is None:
        raise ValueError("a list of modules needs at least one module, and loss=callable(output, targets)")
    if not all(isinstance(module, nn.Module) for module in modules):
        raise TypeError("model must be an nn.Module or a list of nn.Module")
    return modules


def canonical_names(model: nn.Module) -> dict[int, str]:
    """The first name of every parameter and buffer, by the tensor's id. A tied tensor has one name."""
    names: dict[int, str] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        names.setdefault(id(tensor), name)
    return names


def own_names(wrapper: nn.Module, prefix: str, names: dict[int, str], buffers: bool) -> dict[str, str]:
    """The model's names of a segment's parameters (or else buffers), by the names that the segment has for them."""
    members = (
        wrapper.named_buffers(remove_duplicate=False) if buffers else wrapper.named_parameters(remove_duplicate=False)
    )
    return {name: names.get(id(tensor), prefix + name) for name, tensor in members}
