"""Building a core graph, whose shapes and dtypes come from the table of `hal.ops`.

Part of the core lowering (`relay.capture.core.lowering`), which decides what to build. Invariant: a graph holds no two
equal calls.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hal.ops import OPS, arguments_of, name_of, spec_of
from hal.ops.rules import Spec

aten = torch.ops.aten


def part_spec(node: fx.Node) -> Any:
    """Shape and dtype of a node of a core graph."""
    return spec_of(node.meta["val"])


class Builder:
    """A graph under construction. Equal calls are one node, since ops of the table depend on their arguments alone."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._made: dict[str, fx.Node] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node that calls `target`, an op of the table. Raises ValueError if the arguments do not fit it."""
        signature = f"{name_of(target)} {args} {kwargs}"
        node = self._made.get(signature)
        if node is None:
            node = self.graph.call_function(target, args, kwargs)
            row = OPS[name_of(target)]
            specs, named = arguments_of(node)
            node.meta = {"val": _blank(row.results(*specs, **named))}
            self._made[signature] = node
        return node

    def item(self, source: fx.Node, index: int) -> fx.Node:
        """One result of an op that returns several."""
        signature = f"item {source} {index}"
        node = self._made.get(signature)
        if node is None:
            node = self.graph.call_function(operator.getitem, (source, index))
            node.meta = {"val": source.meta["val"][index]}
            self._made[signature] = node
        return node

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`x` cast to that dtype."""
        if part_spec(x).dtype is dtype:
            return x
        constant = constant_of(x)
        if constant is not None:
            return self.full(part_spec(x).shape, constant, dtype)
        return self.call(aten._to_copy.default, x, dtype=dtype)

    def full(self, shape: Sequence[int], value: Any, dtype: torch.dtype) -> fx.Node:
        """A tensor filled with one number, rounded to the dtype."""
        with unset_fake_temporarily():  # a real number, also while fake tensors are in use
            rounded = torch.full((), value, dtype=dtype).item()
        return self.call(aten.full.default, list(shape), rounded, dtype=dtype)

    def view(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        """`x` with another shape. A view of a view is one view."""
        if constant_of(x) is not None:
            return self.full(shape, constant_of(x), part_spec(x).dtype)
        if x.target in (aten.view.default, aten.unsqueeze.default, aten.squeeze.dims):
            x = x.args[0]  # type: ignore[assignment]
        return x if part_spec(x).shape == tuple(shape) else self.call(aten.view.default, x, list(shape))

    def permute(self, x: fx.Node, dims: Sequence[int]) -> fx.Node:
        """`x` with its dimensions in another order. A permutation of a permutation is one permutation."""
        rank = len(part_spec(x).shape)
        order = [dim % rank for dim in dims]
        if x.target is aten.permute.default:
            inner: Any = x.args[1]
            order, x = [inner[dim] for dim in order], x.args[0]  # type: ignore[assignment]
        return x if order == list(range(rank)) else self.call(aten.permute.default, x, order)

    def expand(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        """`x` expanded along dimensions of length 1, and along new leading dimensions."""
        if part_spec(x).shape == tuple(shape):
            return x
        if constant_of(x) is not None:
            return self.full(shape, constant_of(x), part_spec(x).dtype)
        return self.call(aten.expand.default, x, list(shape))

    def slice(self, x: fx.Node, dim: int, start: int, end: int, step: int = 1) -> fx.Node:
        """A slice of `x` along one dimension, or `x` itself if the slice holds all of it."""
        if step == 1 and start == 0 and end == part_spec(x).shape[dim]:
            return x
        return self.call(aten.slice.Tensor, x, dim, start, end, step)


def constant_of(node: Any) -> Any:
    """The number that a tensor is filled with, if its node is a `full`, else None."""
    return node.args[1] if isinstance(node, fx.Node) and node.target is aten.full.default else None


def _blank(results: Any) -> Any:
    if results is None:
        return None
    if isinstance(results, Spec):
        return torch.empty(results.shape, dtype=results.dtype, device="meta")
    return tuple(_blank(result) for result in results)
