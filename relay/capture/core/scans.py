"""Decompositions of scans other than sums and products, and of embedding bags.

Part of the core lowering (`relay.capture.core.lowering`): functions to trace with, written in PyTorch ops. A scan with
an associative operation takes log2(n) passes over the data; pass k joins the result at each position with the result
2^k positions before. Source: Hillis and Steele, "Data parallel algorithms", CACM 29 (1986).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hal.dtypes import widened

aten = torch.ops.aten

Join = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
"""(result of the earlier elements, result of the later elements) -> result of all of them."""


def _scan(parts: Sequence[Tensor], before: Sequence[Any], dim: int, join: Join) -> Sequence[Tensor]:
    """The join of all elements up to each position along `dim`. `before` is the identity of `join`."""
    extent, rank = parts[0].shape[dim], parts[0].dim()
    shift = 1
    while shift < extent:
        sides = [0, 0] * (rank - 1 - dim) + [shift, 0]
        earlier = [
            aten.constant_pad_nd(part.narrow(dim, 0, extent - shift), sides, fill)
            for part, fill in zip(parts, before, strict=True)
        ]
        parts = join(earlier, parts)
        shift *= 2
    return parts


def _running_extreme(largest: bool) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    def scan(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Running extreme and its index: the last of equal elements, or the first NaN."""
        if not x.dim():
            return x.clone(), torch.zeros_like(x, dtype=torch.int64)
        dim %= x.dim()
        positions = torch.arange(x.shape[dim], device=x.device).view(-1, *[1] * (x.dim() - 1 - dim)).expand(x.shape)

        def join(old: Sequence[Tensor], new: Sequence[Tensor]) -> Sequence[Tensor]:
            stays = old[0] > new[0] if largest else old[0] < new[0]
            if x.dtype.is_floating_point:
                stays = stays | ((old[0] != old[0]) & (new[0] == new[0]))
            return [torch.where(stays, old_part, new_part) for old_part, new_part in zip(old, new, strict=True)]

        if x.dtype.is_floating_point:
            least: float = -math.inf if largest else math.inf
        else:
            least = torch.iinfo(x.dtype).min if largest else torch.iinfo(x.dtype).max
        values, found = _scan([x, positions], [least, 0], dim, join)
        return values, found

    return scan


def _logcumsumexp(x: Tensor, dim: int) -> Tensor:
    if not x.dim():
        return x.clone()

    def join(old: Sequence[Tensor], new: Sequence[Tensor]) -> Sequence[Tensor]:
        large, small = torch.maximum(old[0], new[0]), torch.minimum(old[0], new[0])
        return [torch.where(large.abs() == math.inf, large, large + torch.log1p(torch.exp(small - large)))]

    return _scan([x.to(widened(x.dtype))], [-math.inf], dim % x.dim(), join)[0].to(x.dtype)


# -- embeddings of bags ---------------------------------------------------------------------------------------------

SUM, MEAN, MAX = range(3)


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The embedding of each bag (zeros for an empty bag), the bag of each index, the sizes of the bags, and for MAX
    the row of each largest element."""
    indices, offsets = indices.long(), offsets.long()
    bags = offsets.shape[0] - include_last_offset
    positions = torch.arange(indices.shape[0], device=weight.device)
    bag = (offsets <= positions.unsqueeze(1)).sum(1) - 1
    counts = (indices != padding_idx) if padding_idx >= 0 else torch.ones_like(indices, dtype=torch.bool)
    # Indices after the last offset belong to no bag. They are counted in one extra bag, which is dropped.
    sizes = torch.zeros_like(offsets, dtype=torch.int64).index_put((bag,), counts.long(), accumulate=True)[:bags]
    rows = weight[indices]
    if mode == MAX:
        rows = torch.where(counts.unsqueeze(1), rows, -math.inf)
        owner = bag.unsqueeze(1).expand(rows.shape)

        def join(old: Sequence[Tensor], new: Sequence[Tensor]) -> Sequence[Tensor]:
            stays = (old[1] == new[1]) & (old[0] >= new[0])  # of equal elements the first
            return [torch.where(stays, old[0], new[0]), new[1], torch.where(stays, old[2], new[2])]

        parts = [rows, owner, indices.unsqueeze(1).expand(rows.shape)]
        values, _, found = _scan(parts, [0.0, -1, 0], 0, join)
        last = (bag == torch.arange(bags, device=weight.device).unsqueeze(1)).sum(1).cumsum(0) - 1
        last = last.clamp(min=0)
        full = (sizes > 0).unsqueeze(1)
        return torch.where(full, values[last], 0.0), bag, sizes, torch.where(full, found[last], -1)
    taken = torch.where(counts.unsqueeze(1), rows, 0.0)
    if per_sample_weights is not None:
        taken = taken * per_sample_weights.unsqueeze(1)
    total = weight.new_zeros(offsets.shape[0], weight.shape[1]).index_put((bag,), taken, accumulate=True)[:bags]
    if mode == MEAN:
        total = total / sizes.clamp(min=1).unsqueeze(1).to(weight.dtype)
    return total, bag, sizes, torch.zeros_like(sizes)


def _embedding_bag_backward(
    gradient: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bag: Tensor,
    sizes: Tensor,
    largest: Tensor,
    count: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Any:
    """The gradient of the table of embeddings.

    scale_grad_by_freq is not covered: PyTorch's CPU kernel divides by the count of another index than the one it
    scales.
    """
    if sparse or scale_grad_by_freq:
        return NotImplemented
    table = gradient.new_zeros(count, gradient.shape[1])
    if mode == MAX:
        return table.scatter_add(0, largest.clamp(min=0), torch.where(largest < 0, 0.0, gradient))
    indices, last = indices.long(), gradient.shape[0] - 1
    if mode == MEAN:
        gradient = gradient / sizes.clamp(min=1).unsqueeze(1).to(gradient.dtype)
    rows = gradient[bag.clamp(max=last)]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    counted = _counted(bag, last, indices, padding_idx).unsqueeze(1)
    return table.index_put((indices,), torch.where(counted, rows, 0.0), accumulate=True)


def _counted(bag: Tensor, last: int, indices: Tensor, padding: int) -> Tensor:
    """Whether each index is in a bag and is not padding."""
    return (bag <= last) & (indices != padding) if padding >= 0 else bag <= last


def _embedding_bag_weights_backward(
    gradient: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, bag: Tensor, mode: int, padding_idx: int = -1
) -> Tensor:
    """The gradient of the weight of each index."""
    last = gradient.shape[0] - 1
    found = (gradient[bag.clamp(max=last)] * weight[indices.long()]).sum(1)
    return torch.where(_counted(bag, last, indices, padding_idx), found, 0.0)


SCANS: dict[Any, Callable[..., Any]] = {
    aten.cummax.default: _running_extreme(True),
    aten.cummin.default: _running_extreme(False),
    aten.logcumsumexp.default: _logcumsumexp,
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_forward_only.default: _embedding_bag,
    aten._embedding_bag_backward.default: _embedding_bag_backward,
    aten._embedding_bag_per_sample_weights_backward.default: _embedding_bag_weights_backward,
}
"""Decompositions by the overload that they replace."""
