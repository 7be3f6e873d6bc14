"""Where the indices of an op may lie, and which of them a program proves to lie there.

An op of the table that takes indices raises an error for one outside of its domain, as PyTorch does
(`hal.errors.IndexOutOfDomain`). A device checks an index only where nothing in the program proves it: positions from a
sort, a range or a constant need no check. It computes nothing and knows no device. Invariant: an index without a check
is inside of its domain for every input of the program.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hal.errors import IndexOutOfDomain
from hal.ops import name_of, spec_of
from hal.program import Program

Bounds = tuple[int, int] | None
"""The least and the largest value that an integer tensor may have, or None if nothing is known."""


@dataclass(frozen=True)
class IndexDomain:
    """An index of an op: the node, the dimension of the operand that it indexes, and from where to where it may lie."""

    index: fx.Node
    op: str
    dim: int
    low: int
    high: int

    def error(self, program: str, value: int) -> IndexOutOfDomain:
        """The error for a value outside."""
        return IndexOutOfDomain(
            f"{program!r} indexes with {value} ({self.op}). The index must be from {self.low} to {self.high}. Correct "
            "what computes the index, or enlarge what is indexed."
        )

    def holds(self, low: int, high: int) -> bool:
        """Whether all values between two are inside."""
        return self.low <= low and high <= self.high


def domains_of(node: fx.Node) -> list[IndexDomain]:
    """The indices that an op takes, in the order of the dimensions that they index."""
    op = name_of(node.target) if node.op == "call_function" else ""
    arguments: tuple[Any, ...] = node.args
    if op == "aten.embedding.default":
        return [IndexDomain(arguments[1], op, 0, 0, _extent(arguments[0], 0) - 1)]
    if op == "aten.gather.default" or op.startswith("aten.scatter"):
        return [IndexDomain(arguments[2], op, arguments[1], 0, _extent(arguments[0], arguments[1]) - 1)]
    found = []
    if op in ("aten.index.Tensor", "aten.index_put.default"):
        for dim, index in enumerate(arguments[1]):
            if index is not None and index.meta["val"].dtype is not torch.bool:
                extent = _extent(arguments[0], dim)
                found.append(IndexDomain(index, op, dim, -extent, extent - 1))
    return found


def unproven_domains(program: Program) -> dict[fx.Node, list[IndexDomain]]:
    """The indices to check in each run of a core program, by the op that takes them."""
    bounds: dict[fx.Node, Bounds] = {}
    found: dict[fx.Node, list[IndexDomain]] = {}
    for node in program.graph.nodes:
        bounds[node] = _bounds(node, bounds, program.constants)
        checked = []
        for domain in domains_of(node):
            known = bounds[domain.index]
            if math.prod(domain.index.meta["val"].shape) and (known is None or not domain.holds(*known)):
                checked.append(domain)
        if checked:
            found[node] = checked
    return found


def _extent(node: fx.Node, dim: int) -> int:
    shape = node.meta["val"].shape
    return int(shape[dim]) if len(shape) else 1


def _bounds(node: fx.Node, known: Mapping[fx.Node, Bounds], constants: Mapping[str, torch.Tensor]) -> Bounds:
    """The bounds of a node's result, those of the nodes before it being known."""
    if node.op == "get_attr":
        return _of_values(constants[str(node.target)])
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return _of_position(node)
    spec = spec_of(node.meta["val"])
    if isinstance(spec, tuple) or spec.dtype.is_floating_point:
        return None
    op = name_of(node.target)
    rule = _RULES.get(op)
    return rule(node, known) if rule is not None else None


def _of_values(constant: torch.Tensor) -> Bounds:
    if constant.is_floating_point() or constant.is_complex() or constant.is_meta or not constant.numel():
        return None
    values = constant.detach().to(torch.int64)
    return int(values.min()), int(values.max())


def _of_position(node: fx.Node) -> Bounds:
    """The second results of sort and topk are positions along a dimension."""
    source, number = node.args
    assert isinstance(source, fx.Node)
    op = name_of(source.target)
    dims = {"aten.sort.default": 1, "aten.topk.default": 2}
    if number != 1 or op not in dims:
        return None
    operand, dim = source.args[0], source.args[dims[op]]
    assert isinstance(operand, fx.Node)
    assert isinstance(dim, int)
    return 0, max(0, _extent(operand, dim) - 1)


Rule = Callable[[fx.Node, Mapping[fx.Node, Bounds]], Bounds]


def _same(node: fx.Node, known: Mapping[fx.Node, Bounds]) -> Bounds:
    source = node.args[0]
    return known[source] if isinstance(source, fx.Node) else None


def _cast(node: fx.Node, known: Mapping[fx.Node, Bounds]) -> Bounds:
    """Only to int64, which holds every other integer."""
    return _same(node, known) if node.kwargs.get("dtype") is torch.int64 else None


def _full(node: fx.Node, known: Mapping[fx.Node, Bounds]) -> Bounds:
    value: Any = node.args[1]
    return int(value), int(value)


def _range(node: fx.Node, known: Mapping[fx.Node, Bounds]) -> Bounds:
    start, _, step = node.args[:3]
    count = math.prod(node.meta["val"].shape)
    if not (isinstance(start, int) and isinstance(step, int) and count):
        return None
    ends = (start, start + step * (count - 1))
    return min(ends), max(ends)


def _clamped(node: fx.Node, known: Mapping[fx.Node, Bounds]) -> Bounds:
    least, most = (int(bound) if isinstance(bound, (int, float)) else None for bound in node.args[1:3])
    before = _same(node, known)
    if before is not None:
        low, high = before
    elif least is not None and most is not None:
        low, high = least, most
    else:
        return None
    if least is not None:
        low, high = max(low, least), max(high, least)
    if most is not None:
        low, high = min(low, most), min(high, most)
    return low, high


def _of_all(sources: list[Any], known: Mapping[fx.Node, Bounds]) -> Bounds:
    bounds = [known[source] if isinstance(source, fx.Node) else None for source in sources]
    found = [bound for bound in bounds if bound is not None]
    if not found or len(found) < len(bounds):
        return None
    return min(low for low, _ in found), max(high for _, high in found)


def _joined(node: fx.Node, known: Mapping[fx.Node, Bounds]) -> Bounds:
    return _of_all(list(node.args[0]), known)  # type: ignore[arg-type]  # a list of nodes


def _either(node: fx.Node, known: Mapping[fx.Node, Bounds]) -> Bounds:
    return _of_all(list(node.args[1:3]), known)


def _argument(node: fx.Node, known: Mapping[fx.Node, Bounds]) -> Bounds:
    source, dim = node.args[:2]
    assert isinstance(source, fx.Node)
    return (0, max(0, _extent(source, dim) - 1)) if isinstance(dim, int) else None


def _remainder(node: fx.Node, known: Mapping[fx.Node, Bounds]) -> Bounds:
    divisor = node.args[1]
    return (0, divisor - 1) if isinstance(divisor, int) and divisor > 0 else None


_RULES: dict[str, Rule] = {
    **{
        f"aten.{name}": _same
        for name in (
            "view.default",
            "permute.default",
            "expand.default",
            "squeeze.dims",
            "unsqueeze.default",
            "select.int",
            "slice.Tensor",
            "flip.default",
            "amax.default",
            "amin.default",
            "embedding.default",
            "index.Tensor",
            "gather.default",
        )
    },
    "aten._to_copy.default": _cast,
    "aten.full.default": _full,
    "aten.arange.start_step": _range,
    "aten.clamp.default": _clamped,
    "aten.cat.default": _joined,
    "aten.where.self": _either,
    "aten.argmax.default": _argument,
    "aten.argmin.default": _argument,
    "aten.remainder.Scalar": _remainder,
}
"""By the ops' names. Ops without a rule give values of which nothing is known."""
