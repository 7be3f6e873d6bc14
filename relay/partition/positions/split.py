"""Splitting the last segment: what is prepared once for a micro-batch, and what runs for each chunk of positions.

The preparation holds what follows from the batch alone: shifted and padded labels, masks, how many targets count. It
comes first in the partition, since it needs no layer and the slots of the last layers are in use until the turn. The
chunk's graph takes the rows of one chunk and returns its part of the loss. Nothing is captured or run here.

Invariant: run over all chunks, the parts of the loss and of every gradient sum to those of the segment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from relay.capture import autocast, call_with, fingerprint, trace
from relay.errors import RelayError
from relay.graph.mutations import bind_writes
from relay.partition.graph_segment import GraphSegment
from relay.partition.positions.flow import PositionFlow
from relay.partition.positions.fused_loss import write_out_fused
from relay.partition.positions.labels import Count, Kind, Label, NotByPosition, OfBatch, OfState
from relay.partition.positions.op_calls import IDENTITIES, RESHAPES, name_of, shape_of
from relay.partition.segments import Partition, PositionChunks, Segment, Value

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class LastSegment:
    """The last segment of a partition as a graph whose positions were followed.

    `positions` is how many a micro-batch has, `width` the most elements that one has in any tensor.
    """

    partition: Partition
    graph: fx.GraphModule
    loss: fx.Node
    states: Mapping[fx.Node, tuple[str, torch.Tensor]]
    values: Mapping[fx.Node, int]
    flow: PositionFlow

    @property
    def positions(self) -> int:
        """How many positions a micro-batch has."""
        return math.prod(self.flow.leading)

    @property
    def width(self) -> int:
        """The most elements that one position has in any tensor: the number of classes of a language model."""
        return self.flow.width


def follow_positions(partition: Partition, compute: torch.dtype) -> LastSegment:
    """Follow the positions through the last segment. Raises NotByPosition where chunks would not compute the loss."""
    segment = partition.segments[-1]
    if not partition.has_loss:
        raise NotByPosition("the model gives no loss")
    made = [partition.values[number] for number in segment.inputs if partition.values[number].producer is not None]
    hidden = next((value for value in made if value.dtype.is_floating_point and len(value.shape) > 1), None)
    if hidden is None:
        raise NotByPosition("the loss reads no rows of a layer")
    if getattr(segment.module, "runs_eagerly", False):
        raise NotByPosition("the code after the last layer runs eagerly")
    try:
        module, states, inputs = _as_graph(segment, partition, compute)
    except RelayError as why:  # such a module has no graph, and runs eagerly
        raise NotByPosition(f"it has no graph: {str(why).split('. ')[0]}") from why
    for name, tensor in states.values():
        if tensor.requires_grad and tensor.dtype not in (torch.float32, torch.float64):
            raise NotByPosition(f"the gradient of {name} would be summed over chunks in {tensor.dtype}")
    leading = hidden.shape[:-1]
    labels = {node: Label(Kind.STATE, trained=tensor.requires_grad) for node, (_, tensor) in states.items()}
    for node, number in inputs.items():
        value = partition.values[number]
        if value.producer is None and not value.requires_grad:
            labels[node] = Label(Kind.GIVEN)
        elif value.shape[: len(leading)] == leading:
            labels[node] = Label(Kind.ROWS, len(leading))
    write_out_fused(module.graph, compute)
    loss = _results(module)[0]
    return LastSegment(partition, module, loss, states, inputs, PositionFlow(module.graph, loss, labels, leading))


def in_chunks(last: LastSegment, size: int) -> Partition:
    """The partition with its last segment over chunks of `size` positions, the last chunk smaller where it must be.

    Other outputs of the model than the loss are left out. The partition that was followed is used up.
    """
    return _Split(last, size).partition()


def _results(module: fx.GraphModule) -> list[fx.Node]:
    found: list[fx.Node] = list(next(iter(reversed(module.graph.nodes))).args[0])
    return found


def _as_graph(
    segment: Segment, partition: Partition, compute: torch.dtype
) -> tuple[fx.GraphModule, dict[fx.Node, tuple[str, torch.Tensor]], dict[fx.Node, int]]:
    """The last segment as a graph, whose first inputs are its parameters and buffers: by name, and the values."""
    module, names = segment.module, segment.parameters | segment.buffers
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    if isinstance(module, GraphSegment):
        own = fx.Graph()
        own.output(own.graph_copy(module.graph.graph, {}))
        graph = fx.GraphModule(module.graph, own)
        tensors = [getattr(module, name) for name in module.state_names]
        full = [names[name] for name in module.state_names]
    else:
        tensors, full = list(state.values()), [names[name] for name in state]
        values = [partition.values[number] for number in segment.inputs]
        examples = [torch.empty(value.shape, dtype=value.dtype) for value in values]

        def run(given: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
            return list(call_with(module, tensors, given, tuple(leaves)))

        with autocast(compute):
            graph = trace(run, (tensors, examples), segment.name)
        bind_writes(graph.graph, set(graph.graph.find_nodes(op="placeholder")[: len(tensors)]))
    placeholders = graph.graph.find_nodes(op="placeholder")
    states = dict(zip(placeholders, zip(full, tensors, strict=True), strict=False))
    inputs = dict(zip(placeholders[len(tensors) :], segment.inputs, strict=True))
    for node, (_, tensor) in states.items():
        node.meta.setdefault("val", tensor)
    for node, number in inputs.items():
        value = partition.values[number]
        node.meta.setdefault("val", torch.empty(value.shape, dtype=value.dtype, device="meta"))
    for node in graph.graph.nodes:
        if node.target is torch.tensor:
            node.meta["val"] = torch.tensor(*node.args, **node.kwargs)
    _drop_broadcasts(graph.graph)
    return graph, states, inputs


def _drop_broadcasts(graph: fx.Graph) -> None:
    """Replace the results of broadcasts that change nothing by what is broadcast. PyTorch's losses begin with one."""
    for node in graph.nodes:
        if node.target is aten.broadcast_tensors.default:
            for item in list(node.users):
                source: Any = node.args[0][item.args[1]]
                if source.meta["val"].shape == item.meta["val"].shape:
                    item.replace_all_uses_with(source)


class _Half:
    """A graph in the making: the preparation, or the graph of a chunk."""

    def __init__(self, last: LastSegment) -> None:
        self.last = last
        self.graph = fx.Graph()
        self.states: dict[str, tuple[fx.Node, torch.Tensor]] = {}
        self.inputs: dict[Any, fx.Node] = {}
        self.copies: dict[fx.Node, fx.Node] = {}
        self._first = self.graph.create_node("placeholder", "start")

    def state(self, node: fx.Node) -> fx.Node:
        """The placeholder of a parameter or a buffer."""
        name, tensor = self.last.states[node]
        if name not in self.states:
            with self.graph.inserting_before(self._first):
                self.states[name] = self.graph.placeholder(f"state_{len(self.states)}"), tensor
        return self.states[name][0]

    def input(self, key: Any) -> fx.Node:
        """The placeholder of a value."""
        if key not in self.inputs:
            last = next(reversed(self.inputs.values()), self._first)
            with self.graph.inserting_after(last):
                self.inputs[key] = self.graph.placeholder(f"input_{len(self.inputs)}")
        return self.inputs[key]

    def copied(self, node: fx.Node) -> fx.Node:
        """A copy of what computes a node, as the model has it."""
        if node in self.copies:
            return self.copies[node]
        if node in self.last.states:
            return self.state(node)
        if node in self.last.values:
            return self.input(self.last.values[node])
        for source in node.all_input_nodes:
            self.copies.setdefault(source, self.copied(source))
        made = self.copies[node] = self._copy(node)
        return made

    def _copy(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr":
            constant = getattr(self.last.graph, str(node.target))
            return self.call(torch.tensor, constant.tolist(), dtype=constant.dtype)
        return self.graph.node_copy(node, self.copied)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call at the end of the graph."""
        return self.graph.call_function(target, args, kwargs)

    def finished(self, results: Sequence[fx.Node]) -> GraphSegment:
        """The module, with the parameters and buffers that it uses."""
        self.graph.output(tuple(results))
        self.graph.erase_node(self._first)
        self.graph.lint()
        return GraphSegment(self.graph, self.named())

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters and buffers by the model's names."""
        return [(name, tensor) for name, (_, tensor) in self.states.items()]


class _Split:
    def __init__(self, last: LastSegment, size: int) -> None:
        self.last, self.flow = last, last.flow
        self.size = min(size, last.positions)
        self.prepared, self.chunk = _Half(last), _Half(last)
        self.results: list[tuple[fx.Node, tuple[int, ...], torch.dtype]] = []
        self.leads: dict[Any, int] = {}
        self.found: dict[Any, fx.Node] = {}
        self.body: dict[fx.Node, fx.Node] = {}

    def partition(self) -> Partition:
        """The split partition."""
        for node in self.last.graph.graph.nodes:
            if node in self.flow.needed and node not in self.last.states:
                self._write(node)
        partition = self.last.partition
        segment = partition.segments[-1]
        values, segments = list(partition.values), list(partition.segments)
        numbers: dict[int, int] = {}
        first = int(bool(self.results))
        if first:
            for value in values:
                value.producer = None if value.producer is None else value.producer + 1
                value.consumers = [index + 1 for index in value.consumers]
            for other in segments:
                other.index += 1
            for number, (_, shape, dtype) in enumerate(self.results):
                numbers[number] = len(values)
                values.append(Value(len(values), shape, dtype, 0))
        index = segment.index
        for value in values:
            value.consumers = [consumer for consumer in value.consumers if consumer != index]
        made = []
        if first:
            module = self.prepared.finished([node for node, _, _ in self.results])
            inputs = tuple(self.prepared.inputs)
            made.append(_segment(0, "preparation", module, self.prepared, inputs, tuple(numbers.values()), -1, ()))
        body = self.chunk.finished([self.body[self.last.loss]])
        keys = list(self.chunk.inputs)
        inputs = tuple(key if isinstance(key, int) else numbers[key[1]] for key in keys)
        chunks = PositionChunks(self.last.positions, self.size, tuple(self.leads[key] for key in keys))
        made.append(
            _segment(index, segment.name, body, self.chunk, inputs, segment.outputs[:1], segment.layer_index, chunks)
        )
        made[-1].chunks = chunks
        for one in made:
            for source in one.inputs:
                values[source].consumers = sorted({*values[source].consumers, one.index})
        whole = [*made[:-1], *segments[:-1], made[-1]]
        return replace(partition, segments=whole, values=values, results=(), leading=first)

    # -- the chunk's graph ------------------------------------------------------------------------------------

    def _write(self, node: fx.Node) -> None:
        label = self.flow.labels[node]
        if label.kind not in (Kind.ROWS, Kind.TERM):
            return
        if node in self.last.values:
            number = self.last.values[node]
            self.body[node] = self._input(number, label.lead)
            return
        written = self.flow.written[node]
        if isinstance(written, fx.Node):
            self.body[node] = self.body[written]
            return
        args, kwargs = _mapped(written.args, self._operand), _mapped(written.kwargs, self._operand)
        made = self.chunk.call(written.target, *args, **kwargs)
        if isinstance(written.divisor, Count):
            made = self.chunk.call(aten.div.Tensor, made, self._count(written.divisor))
        elif written.divisor is not None:
            made = self.chunk.call(aten.div.Tensor, made, written.divisor)
        self.body[node] = made

    def _operand(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.body[value]
        if isinstance(value, OfState):
            node = self.chunk.copied(value.node)
            return node if value.shape is None else self.chunk.call(aten.reshape.default, node, list(value.shape))
        if isinstance(value, OfBatch):
            return self._given(value)
        return value

    # -- the preparation --------------------------------------------------------------------------------------

    def _given(self, value: OfBatch) -> fx.Node:
        shape = shape_of(value.node)
        positions = self.last.positions
        rest = value.shape[value.lead :] if value.lead is not None else value.shape
        root = _unchanged(value.node)
        if root in self.last.values and not value.part and (shape == value.shape or value.lead is None):
            key, sizes = self.last.values[root], shape_of(root)
            lead = 0 if value.lead is None else _leading(sizes, positions)
            if self.leads.get(key, lead) == lead:
                node = self._input(key, lead)
                wanted = [-1, *rest] if lead else list(value.shape)
                return self._shaped(node, wanted, sizes[lead:] != rest)
        known = (value.node, value.shape, value.lead, value.part, value.fill)
        if known not in self.found:
            node = self.prepared.copied(value.node)
            if shape != value.shape:
                node = self.prepared.call(aten.expand.default, node, list(value.shape))
            final: tuple[int, ...] = value.shape
            if value.part:
                node = self._padded(node, value)
            if value.lead is not None:
                final = (positions, *rest)
                node = self.prepared.call(aten.reshape.default, node, list(final))
            node = self.prepared.call(aten.clone.default, node, memory_format=torch.contiguous_format)
            self.found[known] = self._result(node, final, value.node.meta["val"].dtype, value.lead is not None)
        return self.found[known]

    def _shaped(self, node: fx.Node, shape: Sequence[int], changed: bool) -> fx.Node:
        return self.chunk.call(aten.reshape.default, node, list(shape)) if changed else node

    def _padded(self, node: fx.Node, value: OfBatch) -> fx.Node:
        """Targets of a slice of the positions, padded to all positions with what is ignored."""
        sizes = list(self.flow.leading)
        padding: list[int] = [0, 0] * len(sizes)
        for dim, start, stop in value.part:
            at = 2 * (len(sizes) - 1 - dim)
            padding[at : at + 2] = [start, sizes[dim] - stop]
            sizes[dim] = stop - start
        node = self.prepared.call(aten.reshape.default, node, sizes)
        return self.prepared.call(aten.constant_pad_nd.default, node, padding, value.fill)

    def _count(self, count: Count) -> fx.Node:
        known = (count.target, count.weight, count.ignored)
        if known not in self.found:
            half = self.prepared
            target = half.call(aten.reshape.default, half.copied(count.target), [-1])
            counted = half.call(aten.ne.Scalar, target, count.ignored)
            if count.weight is not None:
                weight = half.copied(count.weight)
                zero = half.call(aten.zeros_like.default, target)
                inside = half.call(aten.where.self, counted, target, zero)
                picked = half.call(aten.index_select.default, weight, 0, inside)
                counted = half.call(aten.where.self, counted, picked, half.call(aten.zeros_like.default, picked))
            whole = half.call(aten.sum.default, half.call(aten.to.dtype, counted, torch.float32))
            self.found[known] = self._result(whole, (), torch.float32, False)
        return self.found[known]

    def _result(self, node: fx.Node, shape: tuple[int, ...], dtype: torch.dtype, by_position: bool) -> fx.Node:
        self.results.append((node, shape, dtype))
        return self._input(("prepared", len(self.results) - 1), int(by_position))

    def _input(self, key: Any, lead: int) -> fx.Node:
        self.leads[key] = lead
        return self.chunk.input(key)


def _segment(
    index: int, name: str, module: GraphSegment, half: _Half, inputs: tuple[int, ...], outputs: tuple[int, ...],
    layer_index: int, form: Any,
) -> Segment:  # fmt: skip
    states = half.named()
    alike = (None, index > 0, fingerprint(module.graph.graph, [], [], {}), module.described(), form)
    return Segment(
        index, name, module, inputs, outputs, module.names_of(states, parameters=True),
        module.names_of(states, parameters=False), alike, layer_index=max(layer_index, 0),
    )  # fmt: skip


def _mapped(value: Any, function: Any) -> Any:
    """The nested value with `function` applied to each leaf."""
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(one, function) for one in value)
    if isinstance(value, dict):
        return {key: _mapped(one, function) for key, one in value.items()}
    return function(value)


def _unchanged(node: fx.Node) -> fx.Node:
    """The node that a chain of views and copies starts from."""
    while node.op == "call_function" and (name_of(node) in RESHAPES or name_of(node) in IDENTITIES):
        source = node.args[0]
        if not isinstance(source, fx.Node) or source.meta["val"].dtype != node.meta["val"].dtype:
            break
        node = source
    return node


def _leading(shape: tuple[int, ...], positions: int) -> int:
    """How many first dimensions of a shape make the positions."""
    return next((count for count in range(1, len(shape) + 1) if math.prod(shape[:count]) == positions), len(shape))
