"""Decompositions of ops that address elements by their offset in memory: as_strided and its scatter.

Part of the core lowering (`relay.capture.core.lowering`): functions to trace with, written in PyTorch ops. Core
programs have no strides, so an offset in memory becomes an index into the tensor's elements in memory order. That is
possible for a tensor that fills its memory. The ops are left for a tensor that is part of another (a slice), and are
then refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _order(x: Tensor) -> list[int] | None:
    """The dimensions from the slowest in memory to the fastest; None if the tensor does not fill its memory."""
    order = sorted(range(x.dim()), key=lambda dim: (-x.stride()[dim], -x.shape[dim]))
    expected = 1
    for dim in reversed(order):
        if x.shape[dim] != 1 and x.stride(dim) != expected:
            return None
        expected *= x.shape[dim]
    return order if x.storage_offset() == 0 else None


def _indices(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Tensor | None:
    """For each element of the strided view its offset in the memory of `x`; None if the view reaches beyond it."""
    last = (offset or 0) + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    if last >= x.numel() or 0 in size:
        return None
    found = torch.full([1] * len(size), offset or 0, dtype=torch.int64, device=x.device)
    for dim, (extent, step) in enumerate(zip(size, stride, strict=True)):
        along = torch.arange(extent, dtype=torch.int64, device=x.device) * step
        found = found + along.view(-1, *[1] * (len(size) - 1 - dim))
    return found


def _as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    order, indices = _order(x), _indices(x, size, stride, storage_offset)
    if order is None or indices is None:
        return NotImplemented
    return x.permute(order).reshape(-1)[indices]


def _as_strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    """`x` with the elements of the view replaced. The view must not overlap itself, in PyTorch either."""
    order, indices = _order(x), _indices(x, size, stride, storage_offset)
    if order is None or indices is None:
        return NotImplemented
    turned = x.permute(order)
    flat = turned.reshape(-1).index_put((indices.reshape(-1),), source.reshape(-1))
    return flat.view(turned.shape).permute([order.index(dim) for dim in range(x.dim())])


STRIDES: dict[Any, Callable[..., Any]] = {
    aten.as_strided.default: _as_strided,
    aten.as_strided_scatter.default: _as_strided_scatter,
}
"""Decompositions by the overload that they replace."""
