"""The indices in a batch, held against what they index before anything runs: tokens, classes, positions.

Devices differ in what an index outside of its domain does: PyTorch's CPU raises, a GPU loses its context, others read
memory that is not theirs or count from the end. So the relay computes on the host those indices that follow from the
integers of a batch alone, with the ops of the captured programs, and checks them. Indices that a model computes from
activations are not known here; devices check those (`hal.ops.index_domains`).

Invariant: a batch that plain PyTorch refuses with an IndexError for such an index is refused with one, before the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hal.ops import name_of
from hal.ops.index_domains import domains_of
from hal.program import Program, Role
from relay.errors import IndexOutOfRange


@dataclass(frozen=True)
class Visit:
    """A program that a micro-batch runs through: the layer's name, and the numbers of its input and output values."""

    layer: str
    program: Program
    inputs: Sequence[int]
    outputs: Sequence[int]


@dataclass(frozen=True)
class Domain:
    """Where an index may lie: from `low` to `high`, or at `ignored`. `layer` and `op` are for errors."""

    layer: str
    op: str
    low: int
    high: int
    ignored: int | None = None


class IndexChecks:
    """The checks of a model for one shape of micro-batch.

    Args:
        visits: its forward programs, in order.
        inputs: the numbers of the values that are a micro-batch's tensors.

    `used` are the positions of those tensors that the checks need: integers, and seldom all of a micro-batch.
    """

    def __init__(self, visits: Sequence[Visit], inputs: Sequence[int]) -> None:
        self._domains: list[Domain] = []
        builder = _Builder(len(inputs))
        known = {value: builder.given(position) for position, value in enumerate(inputs)}
        wanted: list[fx.Node] = []
        for visit in visits:
            builder.enter(visit, known)
            for node in visit.program.graph.nodes:
                for index, domain in _domains_of(node, visit.layer):
                    if builder.follows(index):
                        wanted.append(builder.copy(index))
                        self._domains.append(domain)
            builder.leave(visit, known)
        self._compute, self.used = builder.finish(wanted)

    def check(self, tensors: Sequence[torch.Tensor], microbatch: int) -> None:
        """Check the indices of a micro-batch.

        Args:
            tensors: those of the micro-batch's tensors that are `used`, as they are sent to the device.
            microbatch: its number, for the error.

        Raises:
            IndexOutOfRange: an index is outside of its domain.
        """
        if not self._domains or any(tensor.is_meta for tensor in tensors):
            return
        with torch.no_grad():
            found = self._compute(*tensors)
        for index, domain in zip(found, self._domains, strict=True):
            if index.numel():
                low, high = (int(bound) for bound in torch.aminmax(index))
                if low < domain.low or high > domain.high:
                    _refuse(index, domain, microbatch)


def _refuse(index: torch.Tensor, domain: Domain, microbatch: int) -> None:
    outside = (index < domain.low) | (index > domain.high)
    if domain.ignored is not None:
        outside &= index != domain.ignored
    if bool(outside.any()):
        besides = "" if domain.ignored is None else f", or {domain.ignored} for a target that does not count"
        raise IndexOutOfRange(
            f"Layer {domain.layer!r} indexes with {int(index[outside][0])} in micro-batch {microbatch} ({domain.op}). "
            f"The index must be from {domain.low} to {domain.high}{besides}. Correct the batch, or enlarge what is "
            "indexed (the vocabulary, the number of classes). Nothing was changed."
        )


class _Builder:
    """Makes one graph, from a micro-batch's tensors to the wanted values, of parts of several programs' graphs."""

    def __init__(self, count: int) -> None:
        self._graph = fx.Graph()
        self._constants: dict[str, torch.Tensor] = {}
        self._given = [self._graph.placeholder(f"input_{position}") for position in range(count)]
        self._following: dict[fx.Node, fx.Node | None] = {}  # nodes of the program; None if not copied yet
        self._of_batch: set[fx.Node] = set()  # those that do not follow from constants alone
        self._program: Program | None = None

    def given(self, position: int) -> fx.Node:
        return self._given[position]

    def enter(self, visit: Visit, known: dict[int, fx.Node]) -> None:
        """Begin with a program: find which of its values follow from known integers alone."""
        self._program, self._following, self._of_batch = visit.program, {}, set()
        placeholders = visit.program.graph.find_nodes(op="placeholder")
        for node, port in zip(placeholders, visit.program.inputs, strict=False):
            if port.role is Role.VALUE and not port.dtype.is_floating_point and not port.dtype.is_complex:
                value = known.get(visit.inputs[port.index])
                if value is not None:
                    self._following[node] = value
                    self._of_batch.add(node)
        for node in visit.program.graph.nodes:
            if node.op == "get_attr" or (node.op == "call_function" and self._can_follow(node)):
                self._following[node] = None
                if not self._of_batch.isdisjoint(node.all_input_nodes):
                    self._of_batch.add(node)

    def _can_follow(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex():
            return False
        return all(source in self._following for source in node.all_input_nodes)

    def follows(self, node: fx.Node) -> bool:
        """Whether a value follows from known integers, at least one of them the batch's."""
        return node in self._of_batch

    def copy(self, node: fx.Node) -> fx.Node:
        """The value in the graph that is made."""
        assert self._program is not None
        own = self._following[node]
        if own is None:
            if node.op == "get_attr":
                name = f"constant_{len(self._constants)}"
                self._constants[name] = self._program.constants[str(node.target)]
                own = self._graph.get_attr(name)
            else:
                for source in node.all_input_nodes:
                    self.copy(source)
                own = self._graph.node_copy(node, lambda source: self._following[source])
                if own.target is torch.ops.aten.view.default:  # in core graphs every tensor counts as contiguous
                    own.target = torch.ops.aten.reshape.default
            self._following[node] = own
        return own

    def leave(self, visit: Visit, known: dict[int, fx.Node]) -> None:
        """End with a program: its outputs that follow are known to the programs after it."""
        results = next(iter(reversed(visit.program.graph.nodes))).args[0]
        for node, port in zip(results, visit.program.outputs, strict=True):
            if port.role is Role.VALUE and port.index < len(visit.outputs) and self.follows(node):
                known[visit.outputs[port.index]] = self.copy(node)

    def finish(self, wanted: Sequence[fx.Node]) -> tuple[fx.GraphModule, tuple[int, ...]]:
        """The graph as a module, and the positions of the tensors that it takes."""
        self._graph.output(tuple(wanted))
        used = tuple(position for position, node in enumerate(self._given) if node.users)
        for node in self._given:
            if not node.users:
                self._graph.erase_node(node)
        module = torch.nn.Module()
        for name, tensor in self._constants.items():
            module.register_buffer(name, tensor)
        return fx.GraphModule(module, self._graph), used


def _domains_of(node: fx.Node, layer: str) -> Iterator[tuple[fx.Node, Domain]]:
    """The indices that an op takes, and their domains."""
    op = name_of(node.target) if node.op == "call_function" else ""
    arguments: tuple[Any, ...] = node.args
    for known in domains_of(node):
        yield known.index, Domain(layer, known.op, known.low, known.high)
    if op == "aten.index_select.default":
        yield arguments[2], Domain(layer, op, 0, _extent(arguments[0], arguments[1]) - 1)
    elif op in ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default"):
        classes = _extent(arguments[0], 0 if arguments[0].meta["val"].dim() == 1 else 1)
        yield arguments[1], Domain(layer, op, 0, classes - 1, arguments[4])


def _extent(node: fx.Node, dim: int) -> int:
    shape = node.meta["val"].shape
    return int(shape[dim]) if len(shape) else 1
