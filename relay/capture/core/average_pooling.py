"""Decompositions of average pooling and replicated padding: sums over windows along each dimension of space.

Part of the core lowering (`relay.capture.core.lowering`): functions to trace with, written in PyTorch ops, for any
dtype and device. A function returns NotImplemented in a case that it does not cover; then the op is left for a rewrite.

The mean over a box is the mean along its sides, one after another. Invariant: a window is gathered, and not a product
with a matrix that has zeros elsewhere; so an infinity or NaN reaches the windows that hold it, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

Side = tuple[int, int, int]
"""Size, step and padding of the windows along one dimension."""


def indices_of(count: int, like: Tensor) -> Tensor:
    """0 to count - 1."""
    return torch.arange(count, device=like.device, dtype=torch.int64)


def windows_of(space: int, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> list[Side]:
    """The windows along each dimension, from arguments that may have one number for all."""
    sides = [list(value) * (space if len(value) == 1 else 1) for value in (kernel, stride or kernel, padding)]
    return list(zip(*sides, strict=True))


def window_count(extent: int, window: Side, up: bool) -> int:
    """The number of windows, as PyTorch's pooling_output_shape counts them.

    With `up` (ceil_mode) the last window must begin inside the input or its left padding.
    """
    size, step, pad = window
    room = extent + 2 * pad - size
    count = (room + step - 1 if up else room) // step + 1
    return count - 1 if up and (count - 1) * step >= extent + pad else count


@dataclass(frozen=True)
class Windows:
    """For each position of a result the positions of the input from `first` to before `last`, which may be none.

    Both are functions of a position, on numbers and on tensors alike: shapes are static, so the longest window is known
    while tracing.
    """

    outputs: int
    extent: int
    first: Callable[[Any], Any]
    last: Callable[[Any], Any]

    def sums(self, x: Tensor, dim: int) -> Tensor:
        """The sums over the windows along a dimension of `x`."""
        lengths = [min(self.last(o), self.extent) - max(self.first(o), 0) for o in range(self.outputs)]
        longest = max(1, *lengths) if lengths else 1
        out = indices_of(self.outputs, x)
        first, last = self._bounds(out)
        places = first.unsqueeze(1) + indices_of(longest, x)  # (outputs, longest)
        found = x.movedim(dim, -1)[..., places.clamp(0, self.extent - 1)]
        if any(length != longest for length in lengths):
            found = torch.where(places < last.unsqueeze(1), found, 0.0)
        return found.sum(-1).movedim(-1, dim)

    def counts(self, like: Tensor) -> Tensor:
        """The number of positions in each window."""
        first, last = self._bounds(indices_of(self.outputs, like))
        return last - first

    def _bounds(self, out: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(out).clamp(min=0), self.last(out).clamp(max=self.extent)


def _along(values: Tensor, dim: int, x: Tensor) -> Tensor:
    """One number for each position along a dimension of `x`, in a shape that broadcasts."""
    return values.to(x.dtype).view(-1, *[1] * (x.dim() - 1 - dim % x.dim()))


def _adaptive(outputs: int, extent: int) -> Windows:
    """Windows from floor(o I / O) to ceil((o + 1) I / O), as in `torch.nn.AdaptiveAvgPool2d`."""
    return Windows(outputs, extent, lambda o: (o * extent) // outputs, lambda o: -((-(o + 1) * extent) // outputs))


def _adaptive_backward(outputs: int, extent: int) -> Windows:
    """For each input the outputs whose windows hold it."""
    return Windows(extent, outputs, lambda i: (i * outputs) // extent, lambda i: ((i + 1) * outputs - 1) // extent + 1)


def _adaptive_pool(x: Tensor, sizes: Sequence[int]) -> Tensor:
    for position, outputs in enumerate(sizes):
        dim = x.dim() - len(sizes) + position
        windows = _adaptive(outputs, x.shape[dim])
        summed = windows.sums(x, dim)
        x = summed / _along(windows.counts(x), dim, summed)
    return x


def _adaptive_pool_backward(space: int) -> Callable[[Tensor, Tensor], Tensor]:
    def backward(gradient: Tensor, x: Tensor) -> Tensor:
        for dim in range(x.dim() - space, x.dim()):
            outputs, extent = gradient.shape[dim], x.shape[dim]
            share = gradient / _along(_adaptive(outputs, extent).counts(x), dim, gradient)
            gradient = _adaptive_backward(outputs, extent).sums(share, dim)
        return gradient

    return backward


def _regular(outputs: int, extent: int, side: Side) -> Windows:
    size, step, pad = side
    return Windows(outputs, extent, lambda o: o * step - pad, lambda o: o * step - pad + size)


def _regular_backward(outputs: int, extent: int, side: Side) -> Windows:
    size, step, pad = side
    return Windows(extent, outputs, lambda i: (i + pad - size) // step + 1, lambda i: (i + pad) // step + 1)


def _divisors(windows: Windows, side: Side, padded: bool, like: Tensor) -> Tensor:
    """What each sum is divided by. With `padded` the padding counts as elements of a window."""
    if not padded:
        return windows.counts(like)
    size, step, pad = side
    starts = indices_of(windows.outputs, like) * step - pad
    return (starts + size).clamp(max=windows.extent + pad) - starts


def _average_pool(space: int) -> Callable[..., Any]:
    def pool(
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        up: bool = False,
        count_include_pad: bool = True,
        divisor: int | None = None,
    ) -> Any:
        sides = windows_of(space, kernel, stride, padding)
        if space == 2 and not _uneven(sides, up, count_include_pad, divisor):
            return NotImplemented  # it is rewritten as a convolution
        for position, side in enumerate(sides):
            dim = x.dim() - space + position
            windows = _regular(window_count(x.shape[dim], side, up), x.shape[dim], side)
            summed = windows.sums(x, dim)
            x = summed
            if divisor is None:
                x = summed / _along(_divisors(windows, side, count_include_pad, x), dim, summed)
        return x if divisor is None else x / divisor

    return pool


def _average_pool_backward(space: int) -> Callable[..., Any]:
    def backward(
        gradient: Tensor,
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        up: bool,
        count_include_pad: bool,
        divisor: int | None,
    ) -> Any:
        sides = windows_of(space, kernel, stride, padding)
        if space == 2 and not _uneven(sides, up, count_include_pad, divisor):
            return NotImplemented
        for position, side in enumerate(sides):
            dim = x.dim() - space + position
            outputs, extent = gradient.shape[dim], x.shape[dim]
            if divisor is None:
                windows = _regular(outputs, extent, side)
                gradient = gradient / _along(_divisors(windows, side, count_include_pad, x), dim, gradient)
            gradient = _regular_backward(outputs, extent, side).sums(gradient, dim)
        return gradient if divisor is None else gradient / divisor

    return backward


def _uneven(sides: Sequence[Side], up: bool, count_include_pad: bool, divisor: int | None) -> bool:
    return up or (any(pad for _, _, pad in sides) and not count_include_pad and divisor is None)


def _replication_backward(gradient: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """Each element receives the sum of the gradients of its copies: those in the padding belong to the outermost."""
    for position in range(len(padding) // 2):
        dim = x.dim() - 1 - position
        gradient = _copies(x.shape[dim], gradient.shape[dim], padding[2 * position]).sums(gradient, dim)
    return gradient


def _copies(extent: int, copies: int, before: int) -> Windows:
    """Output o is a copy of input clamp(o - before, 0, extent - 1). Negative padding crops."""

    def first(i: Any) -> Any:
        return _at_edge(i, i == 0, 0, i + before)

    def last(i: Any) -> Any:
        return _at_edge(i, i == extent - 1, copies, i + before + 1)

    return Windows(extent, copies, first, last)


def _at_edge(position: Any, edge: Any, there: int, elsewhere: Any) -> Any:
    """`there` at the edge, else `elsewhere`, for a number or a tensor of positions."""
    if isinstance(position, Tensor):
        return torch.where(edge, there, elsewhere)
    return there if edge else elsewhere


AVERAGES: dict[Any, Callable[..., Any]] = {
    aten._adaptive_avg_pool2d.default: _adaptive_pool,
    aten._adaptive_avg_pool3d.default: _adaptive_pool,
    aten._adaptive_avg_pool2d_backward.default: _adaptive_pool_backward(2),
    aten._adaptive_avg_pool3d_backward.default: _adaptive_pool_backward(3),
    aten.avg_pool2d.default: _average_pool(2),
    aten.avg_pool3d.default: _average_pool(3),
    aten.avg_pool2d_backward.default: _average_pool_backward(2),
    aten.avg_pool3d_backward.default: _average_pool_backward(3),
    aten.replication_pad1d_backward.default: _replication_backward,
    aten.replication_pad2d_backward.default: _replication_backward,
    aten.replication_pad3d_backward.default: _replication_backward,
}
"""Decompositions by the overload that they replace."""
