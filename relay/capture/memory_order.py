"""How tensors lie in memory: the order of their dimensions, kept where they pass from one segment to another.

PyTorch's kernels choose their way by strides (a convolution in channels-last, a product of a transposed matrix), and
another way rounds otherwise. So a value is stored in the order in which it was made, and so is its gradient: memory
is contiguous, with the dimensions permuted, and the graphs permute them back, which costs nothing. Core graphs have
no strides, and take every value as it is written.

Not kept: gaps (a slice, an expanded tensor) and which of several strides a dimension of length one has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

Order = tuple[int, ...]
"""Dimensions from the slowest in memory to the fastest; empty where that is how they are written."""


def order_in_memory(value: torch.Tensor) -> list[int] | None:
    """The dimensions from the one that is slowest in memory to the fastest; None where the tensor has gaps."""
    if value.is_contiguous():
        return list(range(value.dim()))
    # Dimensions of length one come first: their strides say nothing, and one layout must have one order.
    order = sorted(range(value.dim()), key=lambda dim: (value.shape[dim] != 1, -value.stride(dim), dim))
    expected = 1
    for dim in reversed(order):
        if value.shape[dim] != 1 and value.stride(dim) != expected:
            return None
        expected *= value.shape[dim]
    return order


def order_of(value: torch.Tensor) -> Order:
    """The order of a tensor, of one with gaps as a copy would have it."""
    order = order_in_memory(value)
    if order is None:
        order = order_in_memory(torch.empty_like(value, device="meta")) or list(range(value.dim()))
    return () if order == list(range(len(order))) else tuple(order)


def stored_shape(shape: Sequence[int], order: Order) -> tuple[int, ...]:
    """The shape of the contiguous memory that holds a tensor of `shape` in that order."""
    return tuple(shape[dim] for dim in order) if order else tuple(shape)


def inverse(order: Sequence[int]) -> Order:
    """The permutation that undoes one."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def stored(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """The tensor as contiguous memory holds it; a copy where it lies otherwise."""
    return (tensor.permute(order) if order else tensor).contiguous()


def as_written(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """The tensor that `stored` memory holds, as a view of it."""
    return tensor.permute(inverse(order)) if order else tensor


def permuted(graph: fx.Graph, node: fx.Node, order: Sequence[int]) -> fx.Node:
    """The tensor with its dimensions in another order; itself where they are in that order."""
    if list(order) == list(range(len(order))):
        return node
    result = graph.call_function(aten.permute.default, (node, list(order)))
    result.meta = {"val": in_order(node.meta["val"], order), "relaid": True}
    return result


def in_order(value: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """What stands for a tensor with its dimensions in another order; tensors of a trace take no ops outside of it."""
    shape, strides = ([of[dim] for dim in order] for of in (value.shape, value.stride()))
    return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")


class Seeded(torch.autograd.Function):
    """Hands a tensor on, and takes as its gradient another that is given beforehand.

    Tracing supposes that the gradient of an output lies as the output does; so it does not always, and this way the
    backward is traced for one that lies as it will.
    """

    @staticmethod
    def forward(context: Any, value: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        """`seed` is the gradient, of the value's shape, in strides of its own."""
        context.save_for_backward(seed)
        return value.clone()

    @staticmethod
    def backward(context: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """The seed, whatever came."""
        return context.saved_tensors[0], None
