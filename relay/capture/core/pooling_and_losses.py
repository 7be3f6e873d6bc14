"""Decompositions of ops that neither core ATen nor PyTorch decomposes: largest pooling, losses, searches and others.

Part of the core lowering (`relay.capture.core.lowering`): functions to trace with, written in PyTorch ops, for any
dtype and device. A function returns NotImplemented in a case that it does not cover; then the op is left for a rewrite,
or for the device to refuse.

Average pooling is in `relay.capture.core.average_pooling`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from relay.capture.core.average_pooling import indices_of, window_count, windows_of

aten = torch.ops.aten


def _max_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    up: bool = False,
) -> Any:
    """With `up` (ceil_mode): pooling of the input padded with -inf to where the last windows end."""
    if not up:
        return NotImplemented
    spread = list(dilation) * (2 if len(dilation) == 1 else 1)
    windows = [
        (far * (size - 1) + 1, step, pad)
        for (size, step, pad), far in zip(windows_of(2, kernel, stride, padding), spread, strict=True)
    ]
    further = []
    for extent, window in zip(x.shape[-2:], windows, strict=True):
        size, step, pad = window
        further.append(max(0, (window_count(extent, window, True) - 1) * step + size - (extent + 2 * pad)))
    longer = aten.constant_pad_nd(x, [0, further[1], 0, further[0]], -math.inf)
    values, indices = aten.max_pool2d_with_indices(longer, kernel, stride, padding, dilation, False)
    row = indices // longer.shape[-1]
    return values, indices - row * (longer.shape[-1] - x.shape[-1])


def _to_winners(gradient: Tensor, x: Tensor, indices: Tensor, space: int) -> Tensor:
    """Add the gradient of each window to its largest element. `indices` count through the last `space` dimensions."""
    zeros = torch.zeros_like(x).flatten(-space)
    return zeros.scatter_add(-1, indices.flatten(-space), gradient.flatten(-space)).view(x.shape)


def _max_pool_backward(
    gradient: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    up: bool,
    indices: Tensor,
) -> Any:
    return _to_winners(gradient, x, indices, 2) if up else NotImplemented


def _max_pool3d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    up: bool = False,
) -> tuple[Tensor, Tensor]:
    """Pooling over height and width in each slice, then over depth. Of equal elements the first has the index."""
    sides = [list(value) * (3 if len(value) == 1 else 1) for value in (kernel, stride or kernel, padding, dilation)]
    depth, height, width = x.shape[-3:]
    flat, inside = aten.max_pool2d_with_indices(x.reshape(-1, depth, height, width), *(side[1:] for side in sides), up)
    plane = flat.shape[-2:]
    columns = flat.flatten(-2)  # (planes, depth, places)
    deep = [[sides[0][0], 1], [sides[1][0], 1], [sides[2][0], 0], [sides[3][0], 1]]
    values, where = aten.max_pool2d_with_indices(columns.unsqueeze(1), *deep, up)
    count = columns.shape[-1]
    level = where.squeeze(1) // count
    indices = level * (height * width) + inside.flatten(-2).gather(1, level)
    shape = (*x.shape[:-3], values.shape[-2], *plane)
    return values.reshape(shape), indices.reshape(shape)


def _max_pool3d_backward(
    gradient: Tensor, x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, up: bool, indices: Tensor
) -> Tensor:
    return _to_winners(gradient, x, indices, 3)


def _adaptive_max_pool(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The maximum over gathered windows. Shorter windows repeat their last row or column, which changes nothing."""
    lines = []
    for outputs, extent in zip(sizes, x.shape[-2:], strict=True):
        out = indices_of(outputs, x)
        starts, ends = (out * extent) // outputs, ((out + 1) * extent + outputs - 1) // outputs
        longest = max(((o + 1) * extent + outputs - 1) // outputs - o * extent // outputs for o in range(outputs))
        lines.append(torch.minimum(starts.unsqueeze(1) + indices_of(longest, x), ends.unsqueeze(1) - 1))
    rows, columns = lines
    indices = (rows[:, None, :, None] * x.shape[-1] + columns[None, :, None, :]).flatten(-2)  # (H, W, window)
    values, which = x.flatten(-2)[..., indices].max(-1)
    return values, indices.expand(*which.shape, -1).gather(-1, which.unsqueeze(-1)).squeeze(-1)


def _adaptive_max_pool_backward(gradient: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    return _to_winners(gradient, x, indices, 2)


def _trilinear(
    first: Tensor,
    second: Tensor,
    third: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    summed: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """The sum over dimensions of the product of three tensors, each with dimensions of length 1 inserted."""
    widened = []
    for tensor, dims in ((first, expand1), (second, expand2), (third, expand3)):
        for dim in sorted(dims):
            tensor = tensor.unsqueeze(dim)
        widened.append(tensor)
    product = widened[0] * widened[1] * widened[2]
    return product.sum(list(summed)) if summed else product


def _bucketize(x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    before = boundaries <= x.unsqueeze(-1) if right else boundaries < x.unsqueeze(-1)
    return before.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _searchsorted(
    boundaries: Tensor,
    x: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Any:
    if sorter is not None:
        return NotImplemented
    rows = boundaries if boundaries.dim() == 1 else boundaries.unsqueeze(-2)
    return _bucketize(x, rows, out_int32=out_int32, right=right or side == "right")


def _kth(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    if not x.dim():
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    values, indices = torch.sort(x, dim)
    found = values.select(dim, k - 1), indices.select(dim, k - 1)
    return (found[0].unsqueeze(dim), found[1].unsqueeze(dim)) if keepdim else found


def _median(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower of the two middle elements, or the first NaN. (Sorting is stable and puts NaN last.)"""
    if not x.dim() or not x.dtype.is_floating_point:
        return _kth(x, (x.shape[dim] + 1) // 2 if x.dim() else 1, dim, keepdim)
    count = x.shape[dim]
    bad = x.isnan().sum(dim, keepdim=True)
    position = torch.where(bad > 0, count - bad, (count - 1) // 2)
    values, indices = torch.sort(x, dim)
    found = values.gather(dim, position), indices.gather(dim, position)
    return found if keepdim else (found[0].squeeze(dim), found[1].squeeze(dim))


def _median_of_all(x: Tensor) -> Tensor:
    return _median(x.flatten(), 0)[0]


def _scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    if reduce not in ("sum", "mean") or not include_self or not x.dtype.is_floating_point:
        return NotImplemented
    total = x.scatter_add(dim, index, source)
    if reduce == "sum":
        return total
    return total / torch.ones_like(x).scatter_add(dim, index, torch.ones_like(source))


def _counted_from_zero(index: Tensor, extent: int) -> Tensor:
    """`index` as a vector. By a gather, whose indices may not be negative: those of `index_put` count from the end."""
    return torch.arange(extent, device=index.device).gather(0, index.reshape(-1).to(torch.int64))


def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """`x` with the slices of `source` added, alpha times, at indices along a dimension."""
    return _put_slices(x, dim, index, source if alpha == 1 else source * alpha, True)


def _index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """`x` with the slices of `source` at indices along a dimension."""
    return _put_slices(x, dim, index, source, False)


def _put_slices(x: Tensor, dim: int, index: Tensor, source: Tensor, accumulate: bool) -> Tensor:
    whole, slices = (x, source) if x.dim() else (x.reshape(1), source.reshape(1))
    dim %= whole.dim()
    indices = [*[None] * dim, _counted_from_zero(index, whole.shape[dim])]
    return aten.index_put.default(whole, indices, slices, accumulate).view(x.shape)


def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """`x` with the elements of `source`, in order, where the mask is set."""
    x, mask = torch.broadcast_tensors(x, mask)
    order = mask.flatten().to(torch.int64).cumsum(0) - 1
    taken = source.flatten()[order.clamp(0, source.numel() - 1)]
    return torch.where(mask, taken.view(x.shape), x)


def _masked_scatter_backward(gradient: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """The gradient at each element's target. Gradients outside the mask go to one extra element, which is dropped."""
    mask = mask.expand(gradient.shape).flatten()
    count = math.prod(sizes)
    order = torch.where(mask, mask.to(torch.int64).cumsum(0) - 1, count)
    found = gradient.new_zeros(count + 1).scatter_add(0, order, gradient.flatten())
    return found[:count].view(sizes)


def _distances(first: Tensor, second: Tensor, p: float, mode: int | None) -> Any:
    if p not in (1, 2):
        return NotImplemented
    apart = first.unsqueeze(-2) - second.unsqueeze(-3)
    return apart.abs().sum(-1) if p == 1 else (apart * apart).sum(-1).sqrt()


def _distances_backward(gradient: Tensor, first: Tensor, second: Tensor, p: float, distance: Tensor) -> Any:
    """The gradient of the first points. It is 0 for points at distance 0, as in PyTorch."""
    if p not in (1, 2):
        return NotImplemented
    apart = first.unsqueeze(-2) - second.unsqueeze(-3)
    if p == 1:
        return (apart.sign() * gradient.unsqueeze(-1)).sum(-2)
    scale = torch.where(distance == 0, 0.0, gradient / distance)
    return (apart * scale.unsqueeze(-1)).sum(-2)


def _soft_margin_loss_backward(gradient: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    """PyTorch's own decomposition subtracts one from a sigmoid that is nearly one, which loses most digits."""
    scale = 1 / x.numel() if reduction == 1 else 1.0
    return -target * torch.sigmoid(-target * x) * scale * gradient


FURTHER: dict[Any, Callable[..., Any]] = {
    aten.soft_margin_loss_backward.default: _soft_margin_loss_backward,
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
    aten.max_pool3d_with_indices.default: _max_pool3d,
    aten.max_pool3d_with_indices_backward.default: _max_pool3d_backward,
    aten.adaptive_max_pool2d.default: _adaptive_max_pool,
    aten.adaptive_max_pool2d_backward.default: _adaptive_max_pool_backward,
    aten._trilinear.default: _trilinear,
    aten.bucketize.Tensor: _bucketize,
    aten.searchsorted.Tensor: _searchsorted,
    aten.kthvalue.default: _kth,
    aten.median.dim: _median,
    aten.median.default: _median_of_all,
    aten.scatter_reduce.two: _scatter_reduce,
    aten.index_add.default: _index_add,
    aten.index_copy.default: _index_copy,
    aten.masked_scatter.default: _masked_scatter,
    aten.masked_scatter_backward.default: _masked_scatter_backward,
    aten._cdist_forward.default: _distances,
    aten._cdist_backward.default: _distances_backward,
}
"""Decompositions by the overload that they replace."""
