"""The memory order of tensors: the order of their dimensions in memory, preserved between segments.

PyTorch's kernels choose an algorithm by strides (channels-last convolutions, products of transposed matrices), and
other algorithms give other roundings. So values and their gradients are stored in the memory order in which they were
made: the memory is contiguous with permuted dimensions, and graphs permute them back by a view. Core graphs have no
strides, and take every value in the order of its dimensions.

Not preserved are gaps (slices, expanded tensors) and the strides of dimensions of length one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

Order = tuple[int, ...]
"""Dimensions from the slowest in memory to the fastest; empty for the order of the tensor's dimensions."""


def order_in_memory(value: torch.Tensor) -> list[int] | None:
    """The dimensions from the slowest in memory to the fastest; None if the tensor has gaps."""
    if value.is_contiguous():
        return list(range(value.dim()))
    # Dimensions of length one come first: their strides are arbitrary, and equal layouts must have equal orders.
    order = sorted(range(value.dim()), key=lambda dim: (value.shape[dim] != 1, -value.stride()[dim], dim))
    expected = 1
    for dim in reversed(order):
        if value.shape[dim] != 1 and value.stride(dim) != expected:
            return None
        expected *= value.shape[dim]
    return order


def order_of(value: torch.Tensor) -> Order:
    """The memory order of a tensor. For a tensor with gaps it is that of a copy."""
    order = order_in_memory(value)
    if order is None:
        order = order_in_memory(torch.empty_like(value, device="meta")) or list(range(value.dim()))
    return () if order == list(range(len(order))) else tuple(order)


def stored_shape(shape: Sequence[int], order: Order) -> tuple[int, ...]:
    """The shape of the contiguous memory that holds a tensor of `shape` in that order."""
    return tuple(shape[dim] for dim in order) if order else tuple(shape)


def inverse(order: Sequence[int]) -> Order:
    """The inverse of a permutation."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def stored(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """The tensor with its dimensions permuted to memory order, contiguous. A view if it has that order already."""
    return (tensor.permute(order) if order else tensor).contiguous()


def as_written(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """The inverse of `stored`: a view of the tensor with its own order of dimensions."""
    return tensor.permute(inverse(order)) if order else tensor


def permuted(graph: fx.Graph, node: fx.Node, order: Sequence[int]) -> fx.Node:
    """A node that permutes the dimensions of `node`, or `node` itself if `order` is the identity."""
    if list(order) == list(range(len(order))):
        return node
    result = graph.call_function(aten.permute.default, (node, list(order)))
    result.meta = {"val": in_order(node.meta["val"], order), "relaid": True}
    return result


def in_order(value: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """A meta tensor with the shape and strides of `value.permute(order)`. Fake tensors allow no ops outside a trace."""
    shape, strides = ([of[dim] for dim in order] for of in (value.shape, value.stride()))
    return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")


class Seeded(torch.autograd.Function):
    """The identity, whose gradient is a tensor that is passed to the forward.

    Tracing assumes that the gradient of an output has the strides of the output. With this function the backward is
    traced for a gradient with other strides.
    """

    @staticmethod
    def forward(context: Any, value: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        """A copy of `value`. `seed` is its gradient, of the same shape, with its own strides."""
        context.save_for_backward(seed)
        return value.clone()

    @staticmethod
    def backward(context: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """The seed, whatever the incoming gradient."""
        return context.saved_tensors[0], None
