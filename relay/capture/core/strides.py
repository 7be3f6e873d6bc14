"""Ops that name elements by where they lie in memory, in terms of ops that the core lowering knows.

Part of the core lowering (`relay.capture.core.lowering`): functions to trace with, in PyTorch's own words. Strides mean
nothing in a core program, so places in memory become places among a tensor's own elements, put in the order in which
they lie. That is possible where the tensor fills its memory; one that is a part of another (a slice) is left, to be
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _order(x: Tensor) -> list[int] | None:
    """The dimensions from the outermost in memory to the innermost; None where the tensor does not fill its memory."""
    order = sorted(range(x.dim()), key=lambda dim: (-x.stride(dim), -x.shape[dim]))
    expected = 1
    for dim in reversed(order):
        if x.shape[dim] != 1 and x.stride(dim) != expected:
            return None
        expected *= x.shape[dim]
    return order if x.storage_offset() == 0 else None


def _places(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Tensor | None:
    """For each element of the strided view the number of the one of `x`, by memory; None where it reaches beyond."""
    last = (offset or 0) + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    if last >= x.numel() or 0 in size:
        return None
    found = torch.full([1] * len(size), offset or 0, dtype=torch.int64, device=x.device)
    for dim, (extent, step) in enumerate(zip(size, stride, strict=True)):
        along = torch.arange(extent, dtype=torch.int64, device=x.device) * step
        found = found + along.view(-1, *[1] * (len(size) - 1 - dim))
    return found


def _as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    order, places = _order(x), _places(x, size, stride, storage_offset)
    if order is None or places is None:
        return NotImplemented
    return x.permute(order).reshape(-1)[places]


def _as_strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    """`x` with those elements replaced; in PyTorch too they must not be one and the same."""
    order, places = _order(x), _places(x, size, stride, storage_offset)
    if order is None or places is None:
        return NotImplemented
    turned = x.permute(order)
    flat = turned.reshape(-1).index_put((places.reshape(-1),), source.reshape(-1))
    return flat.view(turned.shape).permute([order.index(dim) for dim in range(x.dim())])


STRIDES: dict[Any, Callable[..., Any]] = {
    aten.as_strided.default: _as_strided,
    aten.as_strided_scatter.default: _as_strided_scatter,
}
"""By the overload that is traced."""
