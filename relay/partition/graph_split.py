"""Cutting a traced model at its opaque block calls into segments.

Every node that is not a block call belongs to a stage: stage 0 before the first block, stage k after block k - 1.
A node stands in the earliest stage that has its inputs; what only the last stage uses and no block feeds (labels
being shifted, say) moves there. A stage with nodes becomes a segment. Invariant: within a stage nodes keep their
order, and each runs with gradients on or off as it did in the model.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from relay.capture import BLOCK, SET_GRAD_ENABLED, BlockCall, fingerprint
from relay.capture.fake_tensors import is_fake
from relay.capture.guards.mutated_arguments import call_observed
from relay.capture.memory_order import order_of
from relay.data.loss_weight import loss_weight_of
from relay.errors import PartitionError
from relay.graph.mutations import bind_writes
from relay.graph.pytree import TensorTree, tensor_leaves
from relay.partition.loss_forms import doubt_about
from relay.partition.segments import Partition, Segment, Value


def cut_graph(
    traced: fx.GraphModule,
    states: dict[str, torch.Tensor],
    calls: Sequence[BlockCall],
    names: dict[int, str],
    has_loss: bool,
    result_tree: TensorTree,
) -> Partition:
    """The partition of a traced model. `states` are its parameters and buffers in the order they were traced."""
    return _Cut(traced, states, calls, names, has_loss).partition(result_tree)


class GraphSegment(nn.Module):
    """A stage of a traced model as a module: holds the model's own parameters and buffers that it uses."""

    def __init__(self, graph: fx.Graph, states: Sequence[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self.graph = fx.GraphModule(nn.Module(), graph)
        self.state_names = [name.replace(".", "__") for name, _ in states]
        for name, (_, tensor) in zip(self.state_names, states, strict=True):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def names_of(self, states: Sequence[tuple[str, torch.Tensor]], parameters: bool) -> dict[str, str]:
        """The module's own names to the model's, of its parameters or of its buffers."""
        return {
            local: full
            for local, (full, tensor) in zip(self.state_names, states, strict=True)
            if isinstance(tensor, nn.Parameter) == parameters
        }

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states = [getattr(self, name) for name in self.state_names]
        return tuple(self.graph(*states, *values))


class BlockSegment(nn.Module):
    """One call of a block as a module: the tensors of its arguments -> the tensors of its output that are used.

    `places` says for each argument which of the values it is: one value may be given to a block twice, and has one
    gradient then.
    """

    def __init__(self, call: BlockCall, places: Sequence[int], used: Sequence[int]) -> None:
        super().__init__()
        self.block = call.block
        self.input_tree = call.input_tree
        self.places = tuple(places)
        self.used = tuple(used)
        self.changes = call.changes
        self.gradients = call.gradients

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.input_tree.fill([values[place] for place in self.places])
        # Not the block's call but its forward: its hooks are in the trace around it already.
        with contextlib.nullcontext() if self.gradients else torch.no_grad():
            result, given = call_observed(self.block.forward, args, kwargs)
        outputs, _ = tensor_leaves((result, given) if self.changes else result)
        return tuple(outputs[number] for number in self.used)


class _Cut:
    def __init__(
        self,
        traced: fx.GraphModule,
        states: dict[str, torch.Tensor],
        calls: Sequence[BlockCall],
        names: dict[int, str],
        has_loss: bool,
    ) -> None:
        self.traced = traced
        self.names = names
        self.has_loss = has_loss
        self.states = states
        placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
        self.state_nodes = dict(zip(placeholders, states.items(), strict=False))
        self.batch_nodes = placeholders[len(states) :]
        _drop_skipped(traced.graph, calls)
        self.alias_groups = bind_writes(traced.graph, set(self.state_nodes))
        self.output_node = next(iter(reversed(traced.graph.nodes)))
        self.results: list[fx.Node] = list(self.output_node.args[0])
        self.block_nodes = [node for node in traced.graph.nodes if node.target is BLOCK]
        self.copies = _copy_states_given_to_blocks(traced.graph, self.block_nodes, self.state_nodes)
        self.last_stage = len(self.block_nodes)
        self.calls = [calls[node.args[0]] for node in self.block_nodes]
        self.stage: dict[fx.Node, int] = {}
        self.item: dict[fx.Node, tuple[fx.Node, int]] = {}
        self.gradients_on: dict[fx.Node, bool] = {}
        self._assign_stages()
        self.values: list[Value] = []
        self.value_of: dict[Any, int] = {}
        self.segments: list[Segment] = []

    def _assign_stages(self) -> None:
        gradients_on = True
        for node in self.traced.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if node.target is SET_GRAD_ENABLED:
                gradients_on = bool(node.args[0])
                continue
            # Another block may be given the same copy, with gradients; one under no_grad runs without them anyway.
            self.gradients_on[node] = gradients_on or node in self.copies
            if node.target is BLOCK:
                continue
            source = node.args[0] if node.target is operator.getitem else None
            if isinstance(source, fx.Node) and source.target is BLOCK:
                self.item[node] = (source, node.args[1])
                continue
            self.stage[node] = max((self._stage_of_input(other) for other in node.all_input_nodes), default=0)
        self._keep_alias_groups()
        bound = {node: group for group in self.alias_groups for node in group}
        for node in reversed(self.traced.graph.nodes):
            together = bound.get(node, [node])
            users = {user for member in together for user in member.users if user not in together}
            if (
                self.stage.get(node) == 0
                and users
                and all(self._stage_of_user(user) == self.last_stage for user in users)
                and all(self.stage.get(member) == 0 for member in together)
            ):
                self.stage.update(dict.fromkeys(together, self.last_stage))

    def _keep_alias_groups(self) -> None:
        """Raise the stages of what shares memory that is written to, to the latest of them."""
        changed = True
        while changed:
            changed = False
            for group in self.alias_groups:
                members = [node for node in group if node in self.stage]
                latest = max((self.stage[node] for node in members), default=0)
                for node in members:
                    changed |= self.stage[node] != latest
                    self.stage[node] = latest
            for node in self.stage:
                least = max((self._stage_of_input(other) for other in node.all_input_nodes), default=0)
                if self.stage[node] < least:
                    self.stage[node], changed = least, True
        for number, block in enumerate(self.block_nodes):
            late = [node for node in block.all_input_nodes if self._stage_of_input(node) > number]
            if late:
                raise PartitionError(
                    f"{self.calls[number].name} is given a tensor ({late[0].target}) that is written to in place "
                    "after it has run, so what it reads cannot be kept for the recompute. Clone the tensor before "
                    "changing it."
                )

    def _stage_of_input(self, node: fx.Node) -> int:
        if node in self.item:
            return self.block_nodes.index(self.item[node][0]) + 1
        return self.stage.get(node, 0)

    def _stage_of_user(self, user: fx.Node) -> int:
        if user is self.output_node:
            return self.last_stage
        return -1 if user.target is BLOCK else self.stage.get(user, -1)

    def partition(self, result_tree: TensorTree) -> Partition:
        """Make segments in order."""
        for node in self.batch_nodes:
            self._new_value(node, node.meta["val"], None)
        by_stage: dict[int, list[fx.Node]] = {}
        for node in self.traced.graph.nodes:
            if node in self.stage:
                by_stage.setdefault(self.stage[node], []).append(node)
        for stage in range(self.last_stage + 1):
            name = "prologue" if stage == 0 else "epilogue" if stage == self.last_stage else f"interlude.{stage}"
            if stage in by_stage or stage == self.last_stage:
                self._add_stage(name, by_stage.get(stage, []), stage == self.last_stage)
            if stage < self.last_stage:
                self._add_block(self.block_nodes[stage], self.calls[stage])
        result_values = self.segments[-1].outputs[1:] if self.has_loss else self.segments[-1].outputs
        held = {node: tensor for node, (_, tensor) in self.state_nodes.items()}
        weight = loss_weight_of(self.traced, self.results[0], self.batch_nodes, held) if self.has_loss else None
        doubt = doubt_about(self.traced, self.results[0], self.batch_nodes) if self.has_loss else None
        inputs = tuple(self.value_of[node] for node in self.batch_nodes)
        return Partition(self.segments, self.values, inputs, self.has_loss, result_values, result_tree, weight, doubt)

    def _new_value(self, key: Any, example: torch.Tensor, producer: int | None) -> int:
        # Segments' outputs lie as their programs make them; that is known once they are captured.
        order = order_of(example) if producer is None else ()
        value = Value(len(self.values), tuple(example.shape), example.dtype, producer, order=order)
        self.values.append(value)
        self.value_of[key] = value.index
        return value.index

    def _key(self, node: fx.Node) -> Any:
        """Under what a node's value is known: an item of a block's output by block and number."""
        return self.item.get(node, node)

    def _add_block(self, node: fx.Node, call: BlockCall) -> None:
        index = len(self.segments)
        items = [other for other in node.users if other in self.item]
        used = sorted({self.item[item][1] for item in items if item.users})
        arguments = [self.value_of[self._key(other)] for other in node.args[1]]  # type: ignore[union-attr]
        sources = tuple(dict.fromkeys(arguments))
        places = tuple(sources.index(argument) for argument in arguments)
        outputs = []
        for number in used:
            outputs.append(self._new_value((node, number), node.meta["val"][number], index))
        module = BlockSegment(call, places, used)
        count = sum(1 for segment in self.segments if segment.name.split("#")[0] == call.name)
        self._append(
            Segment(
                index,
                call.name if count == 0 else f"{call.name}#{count + 1}",
                module,
                sources,
                tuple(outputs),
                self._names_of(module, f"{call.name}.", module.named_parameters(remove_duplicate=False)),
                self._names_of(module, f"{call.name}.", module.named_buffers(remove_duplicate=False)),
                (call.block, call.input_tree.spec, call.input_tree.constants, places, tuple(used), call.gradients),
                "layer",
            )
        )

    def _names_of(self, module: nn.Module, prefix: str, members: Any) -> dict[str, str]:
        return {name: self.names.get(id(tensor), prefix + name.removeprefix("block.")) for name, tensor in members}

    def _add_stage(self, name: str, nodes: Sequence[fx.Node], last: bool) -> None:
        index = len(self.segments)
        inside = set(nodes)
        used = dict.fromkeys(other for node in nodes for other in node.all_input_nodes if other not in inside)
        if last:
            used.update(dict.fromkeys(node for node in self.results if node not in inside))
        states = [node for node in used if node in self.state_nodes]
        sources = [node for node in used if node not in self.state_nodes]
        results = self.results if last else [node for node in nodes if any(user not in inside for user in node.users)]
        results = [node for node in results if last or isinstance(node.meta.get("val"), torch.Tensor)]
        graph = self._stage_graph(nodes, states, sources, results, last)
        held = [self.state_nodes[node] for node in states]
        module = GraphSegment(graph, held)
        keys = list(dict.fromkeys(self._key(node) for node in sources))
        if len(keys) != len(sources):
            raise PartitionError(f"{name} uses one output of a block under two names")
        outputs = tuple(
            self._new_value((name, position) if last else node, node.meta["val"], index)
            for position, node in enumerate(results)
        )
        self._append(
            Segment(
                index,
                name,
                module,
                tuple(self.value_of[key] for key in keys),
                outputs,
                module.names_of(held, parameters=True),
                module.names_of(held, parameters=False),
                (None, last and self.has_loss, fingerprint(graph, [], [], {}), _described(held)),
            )
        )

    def _stage_graph(
        self,
        nodes: Sequence[fx.Node],
        states: Sequence[fx.Node],
        sources: Sequence[fx.Node],
        results: Sequence[fx.Node],
        last: bool,
    ) -> fx.Graph:
        graph = fx.Graph()
        environment: dict[fx.Node, fx.Node] = {}
        for position, node in enumerate([*states, *sources]):
            environment[node] = graph.placeholder(f"input_{position}")
        gradients_on = True
        for node in nodes:
            if self.gradients_on[node] != gradients_on:
                gradients_on = self.gradients_on[node]
                graph.call_function(SET_GRAD_ENABLED, (gradients_on,))
            if node.op == "get_attr":
                constant = getattr(self.traced, node.target)
                raise_if_left_behind(constant, self.traced)
                raise_if_large(constant, node)
                environment[node] = graph.call_function(torch.tensor, (constant.tolist(),), {"dtype": constant.dtype})
            else:
                environment[node] = graph.node_copy(node, environment.__getitem__)
        if not gradients_on:
            graph.call_function(SET_GRAD_ENABLED, (True,))
        outputs = [environment[node] for node in results]
        if last and self.has_loss:
            # Only the loss asks for gradients.
            outputs[1:] = [graph.call_function(torch.ops.aten.detach.default, (node,)) for node in outputs[1:]]
        graph.output(tuple(outputs))
        return graph

    def _append(self, segment: Segment) -> None:
        for source in segment.inputs:
            self.values[source].consumers.append(segment.index)
        self.segments.append(segment)


def _described(states: Sequence[tuple[str, torch.Tensor]]) -> list[Any]:
    return [(name, tensor.shape, tensor.dtype, tensor.requires_grad, type(tensor)) for name, tensor in states]


def _drop_skipped(graph: fx.Graph, calls: Sequence[BlockCall]) -> None:
    for node in reversed(list(graph.nodes)):
        source = node.args[0] if node.target is operator.getitem else node
        if isinstance(source, fx.Node) and source.target is BLOCK and calls[source.args[0]].skipped:  # type: ignore[index]
            graph.erase_node(node)


def _copy_states_given_to_blocks(
    graph: fx.Graph, blocks: Sequence[fx.Node], states: Mapping[fx.Node, tuple[str, torch.Tensor]]
) -> set[fx.Node]:
    """A parameter or buffer of the model that is given to a block becomes a value: what is handed on is a copy."""
    copies: dict[fx.Node, fx.Node] = {}
    for block in blocks:
        for source in block.all_input_nodes:
            if source not in states:
                continue
            if source not in copies or not isinstance(states[source][1], nn.Parameter):
                with graph.inserting_before(block):
                    copies[source] = graph.call_function(torch.ops.aten.clone.default, (source,))
                copies[source].meta = dict(source.meta)
            block.replace_input_with(source, copies[source])
    return set(copies.values())


def raise_if_left_behind(constant: torch.Tensor, traced: fx.GraphModule) -> None:
    """A tensor without numbers in a trace is one that got past it: by an attribute that a layer put it into, say."""
    if is_fake(constant):
        raise PartitionError(f"the model {traced.meta['unseen'].why(constant)}")


def raise_if_large(constant: torch.Tensor, node: fx.Node) -> None:
    """Constants made in a model's forward are small; a large one would be a parameter in disguise."""
    if constant.numel() > 1 << 16:
        raise PartitionError(
            f"the model's forward makes a constant tensor of {constant.numel():,} elements ({node.target}). "
            "Register it as a buffer."
        )
