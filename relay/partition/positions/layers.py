"""Layers whose wide pieces run over chunks of positions: the feed-forward network of a transformer, mostly.

A layer's ops are traced once. Consecutive ops that work row by row are a region; the ops between regions (attention)
are left as they are. A region that is wider inside than at its borders runs chunk by chunk, and its results are joined.
The programs are then captured from that graph. In the backward each chunk is computed again shortly before its own
gradient (`relay.graph.late_order`).

Invariant: a row of a region's results is computed by the layer's own ops from the same rows; the gradient of a weight
is summed over chunks, in fp32 under autocast.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from relay.capture import SET_GRAD_ENABLED, autocast, call_with, trace
from relay.capture.guards.attribute_reads import Reads, recorded_reads
from relay.errors import RelayError
from relay.graph.autocast_regions import regions_of
from relay.graph.mutations import bind_writes, needed_by, written_by
from relay.partition.positions.flow import RowRules
from relay.partition.positions.labels import Kind, Label, NotByPosition, OfBatch, OfState
from relay.partition.positions.op_calls import name_of, shape_of

aten = torch.ops.aten
logger = logging.getLogger("relay")
PRODUCTS = {"linear", "matmul", "mm", "addmm"}
"""Ops that autocast runs in its own dtype."""


class ChunkedLayer(nn.Module):
    """A layer as a graph, with the parameters, buffers and submodules of the module that it was traced from.

    `reads` are the attributes that the module's code read.
    """

    def __init__(self, module: nn.Module, graph: fx.GraphModule, names: Sequence[str], reads: Reads) -> None:
        super().__init__()
        self.__dict__["_modules"] = module._modules
        self.__dict__["_parameters"] = module._parameters
        self.__dict__["_buffers"] = module._buffers
        self.__dict__["graph"] = graph
        self.training = module.training
        self.names = tuple(names)
        self.reads = reads

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states = []
        for name in self.names:
            owner, _, own = name.rpartition(".")
            states.append(getattr(self.get_submodule(owner), own))
        return tuple(self.__dict__["graph"](*states, *values))


def in_row_chunks(
    module: nn.Module, inputs: Sequence[torch.Tensor], name: str, compute: torch.dtype, size: int
) -> tuple[nn.Module, str]:
    """The layer with its wide regions over chunks of `size` positions, or the module itself and why it is left whole.

    The log has the reason, too.
    """
    try:
        return _Layer(module, inputs, name, compute, size).chunked(), ""
    except (NotByPosition, RelayError) as problem:
        why = str(problem).split(". ")[0]
        logger.info("mlp_chunk_tokens=%d: layer %r is left whole, since %s", size, name, why)
        return module, why


class _Layer(RowRules):
    """A layer in the making. `level` counts how often a value has left the rows on its way."""

    def __init__(
        self, module: nn.Module, inputs: Sequence[torch.Tensor], name: str, compute: torch.dtype, size: int
    ) -> None:
        first = next((one for one in inputs if one.dim() > 1 and one.is_floating_point()), None)
        if first is None:
            raise NotByPosition("it takes no rows")
        super().__init__({}, tuple(first.shape[:-1]))
        self.module, self.compute, self.size = module, compute, size
        self.positions = math.prod(self.leading)
        state = dict(module.named_parameters()) | dict(module.named_buffers())
        tensors = list(state.values())
        examples = [torch.empty(one.shape, dtype=one.dtype) for one in inputs]

        def run(given: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
            return list(call_with(module, tensors, given, tuple(leaves)))

        with autocast(compute), recorded_reads(module) as self.reads:
            self.traced = trace(run, (tensors, examples), name)
        graph = self.source = self.traced.graph
        placeholders = graph.find_nodes(op="placeholder")
        self.states = dict(zip(placeholders, state, strict=False))
        self.values = placeholders[len(state) :]
        bind_writes(graph, set(self.states))
        if any(node.target is SET_GRAD_ENABLED for node in graph.nodes):
            raise NotByPosition("it turns gradients on or off")
        if any(map(regions_of, graph.nodes)):
            raise NotByPosition("it uses torch.autocast")
        for node in graph.find_nodes(op="get_attr"):
            if any(user.target is not aten.lift_fresh_copy.default for user in node.users):
                raise NotByPosition("its code holds a tensor that is not its own")
        self.results: list[fx.Node] = list(next(iter(reversed(graph.nodes))).args[0])
        self.needed = needed_by(self.results, graph)
        if any(written_by(node) is not None for node in graph.nodes if node in self.needed):
            raise NotByPosition("it writes to a part of a tensor")
        for node, own in self.states.items():
            self.labels[node] = Label(Kind.STATE, trained=state[own].requires_grad)
        for node in self.values:
            self._source(node)

    def _source(self, node: fx.Node) -> None:
        """Label what begins rows: an input, or the result of an op that is not row by row."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return
        if value.dim() > len(self.leading) and tuple(value.shape[: len(self.leading)]) == self.leading:
            self.labels[node] = Label(Kind.ROWS, len(self.leading))

    def chunked(self) -> nn.Module:
        """The module that runs over chunks, or the layer's own."""
        level: dict[fx.Node, int] = dict.fromkeys(self.source.find_nodes(op="placeholder"), 0)
        regions: dict[int, list[fx.Node]] = {}
        for node in self.source.nodes:
            if node.op != "call_function" or node not in self.needed:
                continue
            inner = self._is_inner(node)
            found = [level[one] + (one not in self.written and one not in self.values) * inner
                     for one in node.all_input_nodes if one in level and (not inner or self._is_rows(one))]  # fmt: skip
            level[node] = max(found, default=0)
            if inner:
                regions.setdefault(level[node], []).append(node)
        wide = [nodes for nodes in regions.values() if self._is_wide(nodes)]
        if not wide:
            raise NotByPosition("it has no piece that works position by position and is wider inside than outside")
        if self.size >= self.positions:
            return self.module
        return self._rewritten(wide)

    def _is_inner(self, node: fx.Node) -> bool:
        """Label an op, and tell whether it works row by row."""
        try:
            label = self.label(node)
        except NotByPosition:
            label = None
        if label is not None and label.kind is Kind.STATE:
            self.labels[node] = label
            return False
        if label is not None and label.kind is Kind.ROWS and not label.part and not label.moved:
            self.labels[node] = label
            return True
        self.written.pop(node, None)
        self._source(node)
        return False

    def _is_rows(self, node: fx.Node) -> bool:
        return node in self.labels and self.labels[node].kind is Kind.ROWS

    def _borders(self, nodes: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """The rows that a region reads from outside, and its results that are used outside."""
        inside = set(nodes)
        read = dict.fromkeys(one for node in nodes for one in node.all_input_nodes if self._is_rows(one))
        made = [node for node in nodes if node in self.results or any(user not in inside for user in node.users)]
        return [node for node in read if node not in inside], made

    def _width(self, node: fx.Node) -> int:
        value = node.meta["val"]
        return math.prod(value.shape[self.labels[node].lead :]) if isinstance(value, torch.Tensor) else 0

    def _is_wide(self, nodes: Sequence[fx.Node]) -> bool:
        read, made = self._borders(nodes)
        if any(not isinstance(node.meta["val"], torch.Tensor) for node in made):
            return False
        return max(map(self._width, nodes)) > max(map(self._width, [*read, *made]), default=0)

    # -- the graph --------------------------------------------------------------------------------------------

    def _rewritten(self, regions: Sequence[list[fx.Node]]) -> nn.Module:
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.region_of = {node: region for region in regions for node in region}
        self.drawn: list[fx.Node] = []
        for node in self.source.find_nodes(op="placeholder"):
            self.copies[node] = self.graph.placeholder(str(node.target))
        for node in self.source.nodes:
            if node in self.needed and node.op != "output":
                self._copied(node)
        order = [node for node in self.source.nodes if node in self.drawn]
        if order != self.drawn:
            raise NotByPosition("its random ops would change their order")
        self.graph.output(tuple(self.copies[node] for node in self.results))
        self.graph.lint()
        graph = fx.GraphModule(self.traced, self.graph)
        return ChunkedLayer(self.module, graph, list(self.states.values()), self.reads)

    def _copied(self, node: fx.Node) -> fx.Node | None:
        if node in self.copies:
            return self.copies[node]
        region = self.region_of.get(node)
        if region is not None:
            self._run_region(region)
            return self.copies.get(node)  # what is not used outside has no copy
        for source in node.all_input_nodes:
            self._copied(source)
        made = self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
        if made.target is aten.view.default:  # another device's attention may lie in another order
            made.target = aten.reshape.default
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            self.drawn.append(node)
        return made

    def _run_region(self, region: Sequence[fx.Node]) -> None:
        read, made = self._borders(region)
        count = -(-self.positions // self.size)
        given: dict[fx.Node, fx.Node] = {}
        for node in read:
            source = self._copied(node)
            assert source is not None
            rest = shape_of(node)[self.labels[node].lead :]
            flat = self._call(aten.reshape.default, source, [self.positions, *rest])
            given[node] = self._call(aten.split.Tensor, flat, self.size)
        for node in region:  # parameters and what is made of them, once for all chunks
            for source in node.all_input_nodes:
                if not self._is_rows(source):
                    self._copied(source)
        parts: dict[fx.Node, list[fx.Node]] = {node: [] for node in made}
        for number in range(count):
            chunk = {node: self._call(operator.getitem, given[node], number) for node in read}
            for node in region:
                chunk[node] = self._written(node, chunk)
            for node in made:
                parts[node].append(chunk[node])
        for node in made:
            joined = self._call(aten.cat.default, parts[node], 0)
            self.copies[node] = self._call(aten.reshape.default, joined, list(shape_of(node)))

    def _written(self, node: fx.Node, chunk: dict[fx.Node, fx.Node]) -> fx.Node:
        written = self.written[node]
        if isinstance(written, fx.Node):
            return chunk[written]
        rounds = self.compute is not torch.float32 and name_of(node) in PRODUCTS

        def operand(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(operand(one) for one in value)
            if isinstance(value, fx.Node):
                return chunk[value]
            if isinstance(value, OfBatch):
                raise NotByPosition("a region takes a tensor that is not rows")
            if not isinstance(value, OfState):
                return value
            state = self.copies[value.node]
            if value.shape is not None:
                state = self._call(aten.reshape.default, state, list(value.shape))
            if rounds and value.node.meta["val"].is_floating_point():
                state = self._call(aten.to.dtype, state, self.compute)  # its gradient is summed before rounding
            return state

        return self._call(written.target, *operand(written.args), **{k: operand(v) for k, v in written.kwargs.items()})

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)
