"""Cutting a traced model into segments at its block calls.

Every node that is not a block call belongs to a stage: stage 0 before the first block, stage k after block k - 1.
A node belongs to the earliest stage in which its inputs exist. Nodes that only the last stage uses and that depend on
no block (shifted labels, for example) move to the last stage. A stage with nodes becomes a segment. Invariant: nodes
keep their order within a stage, and each runs with gradients on or off as it did in the model.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from relay.capture import BLOCK, SET_GRAD_ENABLED, BlockCall, fingerprint
from relay.capture.guards.mutated_arguments import call_recorded
from relay.capture.memory_order import order_of
from relay.errors import PartitionError
from relay.graph.mutations import bind_writes, written_by
from relay.graph.pytree import TensorTree, tensor_leaves
from relay.partition.graph_segment import GraphSegment, copied_graph, described
from relay.partition.segments import Partition, Segment, Value
from relay.partition.written_arguments import copied, refuse_written_and_read


def cut_graph(
    traced: fx.GraphModule,
    states: dict[str, torch.Tensor],
    calls: Sequence[BlockCall],
    names: dict[int, str],
    has_loss: bool,
    result_tree: TensorTree,
) -> Partition:
    """The partition of a model traced with `relay.capture.blocks_as_ops`.

    `states` are the parameters and buffers by name, in the order of the trace's first inputs; `calls` the block calls
    in order; `names` the canonical names of tensors by id. With `has_loss` the first result of the trace is the loss,
    and `result_tree` nests the other results. Raises PartitionError.
    """
    return GraphCut(traced, states, calls, names, has_loss).partition(result_tree)


class BlockSegment(nn.Module):
    """One call of a block as a module: argument tensors -> those of its output tensors that are used.

    `indices[i]` is the index among the segment's inputs of the block's argument i: a value that is passed to the block
    twice is one input, with one gradient. `used` are the indices of the output tensors that are returned.
    """

    def __init__(self, call: BlockCall, indices: Sequence[int], used: Sequence[int]) -> None:
        super().__init__()
        self.block = call.block
        self.input_tree = call.input_tree
        self.indices = tuple(indices)
        self.used = tuple(used)
        self.recorded = call.recorded
        self.gradients = call.gradients
        self.written = frozenset(self.indices[number] for number in call.memory.writes)

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = copied(values, self.written)
        args, kwargs = self.input_tree.fill([values[index] for index in self.indices])
        # `forward`, and not the module itself: the module's hooks are in the trace around the call already.
        with contextlib.nullcontext() if self.gradients else torch.no_grad():
            output, _ = call_recorded(self.block.forward, args, kwargs, self.recorded)
        outputs, _ = tensor_leaves(output)
        return tuple(outputs[number] for number in self.used)


def layer_segment(
    before: Sequence[Segment], call: str, module: BlockSegment, sources: tuple[int, ...], names: Mapping[int, str]
) -> Segment:
    """The segment of a layer's call after those `before`, still without outputs. `names` are those of tensors by id."""

    def names_of(members: Any) -> dict[str, str]:
        return {own: names.get(id(one), f"{call}.{own.removeprefix('block.')}") for own, one in members}

    count = sum(segment.name.split("#")[0] == call for segment in before)
    alike = (
        module.block, module.input_tree.spec, module.input_tree.constants, module.indices, module.used,
        module.gradients, module.recorded, module.written,
    )  # fmt: skip
    return Segment(
        len(before),
        call if count == 0 else f"{call}#{count + 1}",
        module,
        sources,
        (),
        names_of(module.named_parameters(remove_duplicate=False)),
        names_of(module.named_buffers(remove_duplicate=False)),
        alike,
        "layer",
    )


class GraphCut:
    """The cut of a traced model. The arguments are those of `cut_graph`.

    `stage` gives the stage of each node, and `value_of` the value of each key (`key`) once `partition` was called.
    """

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
        # Where a model looks at the batch, a stage may be empty for one micro-batch and not for another.
        self.begins_with_ops = _begins_with_ops(traced.graph)
        _drop_unused(traced.graph)
        self.alias_groups = bind_writes(traced.graph, set(self.state_nodes))
        self.output_node = next(iter(reversed(traced.graph.nodes)))
        self.results: list[fx.Node] = list(self.output_node.args[0])
        self.block_nodes = [node for node in traced.graph.nodes if node.target is BLOCK]
        refuse_written_and_read(self.block_nodes, [calls[node.args[0]] for node in self.block_nodes], self.state_nodes)
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
            # Another block may use the same copy with gradients. A block under no_grad makes none in any case.
            self.gradients_on[node] = gradients_on or node in self.copies
            if node.target is BLOCK:
                continue
            source = node.args[0] if node.target is operator.getitem else None
            if isinstance(source, fx.Node) and source.target is BLOCK:
                self.item[node] = (source, node.args[1])
                continue
            self.stage[node] = max((self._stage_of_input(other) for other in node.all_input_nodes), default=0)
        self._count_where_it_runs()
        self._keep_alias_groups()
        bound = {node: group for group in self.alias_groups for node in group}
        for node in reversed(self.traced.graph.nodes):
            if node.target is operator.getitem and node not in bound:
                continue  # it stays with what it takes an item of
            items = [user for user in node.users if user.target is operator.getitem and user not in bound]
            together = bound.get(node, [node, *items])
            users = {user for member in together for user in member.users if user not in together}
            if (
                self.stage.get(node) == 0
                and users
                and all(self._stage_of_user(user) == self.last_stage for user in users)
                and all(self.stage.get(member) == 0 for member in together)
            ):
                self.stage.update(dict.fromkeys(together, self.last_stage))

    def _count_where_it_runs(self) -> None:
        """Put writes to a buffer that depend on nothing else, such as a BatchNorm's count, where they run."""
        done = 0
        alone: dict[fx.Node, int] = {}
        for node in self.traced.graph.nodes:
            done += node.target is BLOCK
            if written_by(node) in self.state_nodes and len(node.all_input_nodes) == 1 and not node.users:
                alone[node] = done
        for group in self.alias_groups:
            members = [node for node in group if node in self.stage]
            if all(node in alone for node in members):
                self.stage.update((node, alone[node]) for node in members)

    def _keep_alias_groups(self) -> None:
        """Move nodes that share memory which is written to into the latest of their stages."""
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
                    f"layer {self.calls[number].name!r} takes a tensor ({late[0].target}) that the model changes in "
                    "place after the layer has run, so the recompute would read the changed tensor. Clone the tensor "
                    "before changing it."
                )

    def move_to_head(self, nodes: Collection[fx.Node]) -> None:
        """Move those nodes that no layer depends on to the last stage, with all that is computed from them."""
        graph = self.traced.graph
        reaching: set[fx.Node] = set()  # what a layer depends on
        for node in reversed(graph.nodes):
            if any(user.target is BLOCK or user in reaching for user in node.users):
                reaching.add(node)
        moved = {node for node in nodes if node in self.stage and node not in reaching}
        count = -1
        while count < len(moved):
            count = len(moved)
            for node in self.stage:
                if any(source in moved for source in node.all_input_nodes):
                    moved.add(node)
            for group in self.alias_groups:
                if any(member in moved for member in group):
                    moved.update(member for member in group if member in self.stage)
        if not moved & reaching:
            self.stage.update(dict.fromkeys(moved, self.last_stage))

    def _stage_of_input(self, node: fx.Node) -> int:
        if node in self.item:
            return self.block_nodes.index(self.item[node][0]) + 1
        return self.stage.get(node, 0)

    def _stage_of_user(self, user: fx.Node) -> int:
        if user is self.output_node:
            return self.last_stage
        return -1 if user.target is BLOCK else self.stage.get(user, -1)

    def partition(self, result_tree: TensorTree) -> Partition:
        """The partition, its segments in the order of the model."""
        for node in self.batch_nodes:
            self._new_value(node, node.meta["val"], None)
        by_stage: dict[int, list[fx.Node]] = {}
        for node in self.traced.graph.nodes:
            if node in self.stage:
                by_stage.setdefault(self.stage[node], []).append(node)
        for stage in range(self.last_stage + 1):
            name = "prologue" if stage == 0 else "epilogue" if stage == self.last_stage else f"interlude.{stage}"
            if stage in by_stage or stage == self.last_stage or (stage == 0 and self.begins_with_ops):
                self._add_stage(name, by_stage.get(stage, []), stage == self.last_stage)
            if stage < self.last_stage:
                self._add_block(self.block_nodes[stage], self.calls[stage])
        result_values = self.segments[-1].outputs[1:] if self.has_loss else self.segments[-1].outputs
        inputs = tuple(self.value_of[node] for node in self.batch_nodes)
        return Partition(self.segments, self.values, inputs, self.has_loss, result_values, result_tree)

    def _new_value(self, key: Any, example: torch.Tensor, producer: int | None) -> int:
        # The memory order of an output is known once its segment has been captured.
        order = order_of(example) if producer is None else ()
        value = Value(len(self.values), tuple(example.shape), example.dtype, producer, order=order)
        self.values.append(value)
        self.value_of[key] = value.index
        return value.index

    def key(self, node: fx.Node) -> Any:
        """The key of a node in `value_of`: (block node, number) for an item of a block's output, else the node."""
        return self.item.get(node, node)

    def _add_block(self, node: fx.Node, call: BlockCall) -> None:
        index = len(self.segments)
        items = [other for other in node.users if other in self.item]
        used = sorted({self.item[item][1] for item in items if item.users})
        given: Any = node.args[1]
        arguments = [self.value_of[self.key(other)] for other in given]
        sources = tuple(dict.fromkeys(arguments))
        indices = tuple(sources.index(argument) for argument in arguments)
        outputs = []
        for number in used:
            outputs.append(self._new_value((node, number), node.meta["val"][number], index))
        module = BlockSegment(call, indices, used)
        segment = layer_segment(self.segments, call.name, module, sources, self.names)
        segment.outputs = tuple(outputs)
        self._append(segment)

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
        used_states = [self.state_nodes[node] for node in states]
        module = GraphSegment(graph, used_states)
        keys = list(dict.fromkeys(self.key(node) for node in sources))
        if len(keys) != len(sources):
            raise PartitionError(f"the {name} uses one output of a layer under two names. Please report this model.")
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
                module.names_of(used_states, parameters=True),
                module.names_of(used_states, parameters=False),
                (None, last and self.has_loss, fingerprint(graph, [], [], {}), described(used_states)),
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
        graph, environment = copied_graph(self.traced, nodes, [*states, *sources], self.gradients_on)
        outputs = [environment[node] for node in results]
        if last and self.has_loss:
            # Only the loss requires a gradient.
            outputs[1:] = [graph.call_function(torch.ops.aten.detach.default, (node,)) for node in outputs[1:]]
        graph.output(tuple(outputs))
        return graph

    def _append(self, segment: Segment) -> None:
        for source in segment.inputs:
            self.values[source].consumers.append(segment.index)
        self.segments.append(segment)


def _drop_skipped(graph: fx.Graph, calls: Sequence[BlockCall]) -> None:
    for node in reversed(list(graph.nodes)):
        source = node.args[0] if node.target is operator.getitem else node
        if isinstance(source, fx.Node) and source.target is BLOCK and calls[source.args[0]].skipped:  # type: ignore[index]
            graph.erase_node(node)


def _begins_with_ops(graph: fx.Graph) -> bool:
    """Whether there are ops before the first layer."""
    for node in graph.nodes:
        if node.target is BLOCK:
            return False
        if node.op == "call_function" and node.target is not SET_GRAD_ENABLED:
            return True
    return False


def _drop_unused(graph: fx.Graph) -> None:
    """Drop ops without effect whose results nothing uses, which could keep what they read in an early stage."""
    for node in reversed(list(graph.nodes)):
        if node.users or not isinstance(node.target, torch._ops.OpOverload) or node.target is BLOCK:
            continue
        if torch.Tag.nondeterministic_seeded not in node.target.tags and not node.is_impure():
            graph.erase_node(node)


def _copy_states_given_to_blocks(
    graph: fx.Graph, blocks: Sequence[fx.Node], states: Mapping[fx.Node, tuple[str, torch.Tensor]]
) -> set[fx.Node]:
    """Copy parameters and buffers that are arguments of a block, so that they become values. Returns the copies."""
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
