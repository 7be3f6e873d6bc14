"""Building a core graph: nodes whose shapes and dtypes come from the table of `hal.ops`, each made once.

Part of the core lowering (`relay.capture.core.lowering`). It knows the form of calls, not which calls to make.
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
    """A graph under construction. Equal calls are made once: the ops of the table are functions of their values."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._made: dict[str, fx.Node] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node of that op, whose shapes and dtypes come from the table. ValueError where they do not fit."""
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
        """One result of an op that has several."""
        signature = f"item {source} {index}"
        node = self._made.get(signature)
        if node is None:
            node = self.graph.call_function(operator.getitem, (source, index))
            node.meta = {"val": source.meta["val"][index]}
            self._made[signature] = node
        return node

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`x` in that dtype."""
        if part_spec(x).dtype is dtype:
            return x
        constant = constant_of(x)
        if constant is not None:
            return self.full(part_spec(x).shape, constant, dtype)
        return self.call(aten._to_copy.default, x, dtype=dtype)

    def full(self, shape: Sequence[int], value: Any, dtype: torch.dtype) -> fx.Node:
        """A tensor of one number, which is rounded to the dtype here."""
        with unset_fake_temporarily():  # a number, also where the model has no memory
            rounded = torch.full((), value, dtype=dtype).item()
        return self.call(aten.full.default, list(shape), rounded, dtype=dtype)

    def view(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        """`x` under another shape, through any views before it."""
        if constant_of(x) is not None:
            return self.full(shape, constant_of(x), part_spec(x).dtype)
        if x.target in (aten.view.default, aten.unsqueeze.default, aten.squeeze.dims):
            x = x.args[0]  # type: ignore[assignment]
        return x if part_spec(x).shape == tuple(shape) else self.call(aten.view.default, x, list(shape))

    def permute(self, x: fx.Node, dims: Sequence[int]) -> fx.Node:
        """`x` with its dimensions in another order, through any permutation before it."""
        rank = len(part_spec(x).shape)
        order = [dim % rank for dim in dims]
        if x.target is aten.permute.default:
            inner: Any = x.args[1]
            order, x = [inner[dim] for dim in order], x.args[0]  # type: ignore[assignment]
        return x if order == list(range(rank)) else self.call(aten.permute.default, x, order)

    def expand(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        """`x` repeated along dimensions of 1, and along new ones in front."""
        if part_spec(x).shape == tuple(shape):
            return x
        if constant_of(x) is not None:
            return self.full(shape, constant_of(x), part_spec(x).dtype)
        return self.call(aten.expand.default, x, list(shape))

    def slice(self, x: fx.Node, dim: int, start: int, end: int, step: int = 1) -> fx.Node:
        """Part of `x`, or `x` where that is all of it."""
        if step == 1 and start == 0 and end == part_spec(x).shape[dim]:
            return x
        return self.call(aten.slice.Tensor, x, dim, start, end, step)


def constant_of(node: Any) -> Any:
    """The number that a tensor is full of, where the graph says so, else None."""
    return node.args[1] if isinstance(node, fx.Node) and node.target is aten.full.default else None


def _blank(results: Any) -> Any:
    if results is None:
        return None
    if isinstance(results, Spec):
        return torch.empty(results.shape, dtype=results.dtype, device="meta")
    return tuple(_blank(result) for result in results)
