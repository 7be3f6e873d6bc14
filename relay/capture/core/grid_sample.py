"""Decompositions of grid_sample, for images and volumes.

Part of the core lowering (`relay.capture.core.lowering`): functions to trace with, written in PyTorch ops. A sample is
a sum over taps: along each dimension of space there are a few positions with a weight each, 2 for (bi)linear, 1 for
nearest and 4 for bicubic. The value is the sum over all combinations, each times the product of its weights. In the
gradient of a coordinate the slope of one weight replaces that weight. Padding is as in ATen's GridSampler.h. Source of
the cubic weights: Keys, "Cubic convolution interpolation for digital image processing", IEEE ASSP 29 (1981), with a =
-0.75.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal.dtypes import widened

aten = torch.ops.aten

LINEAR, NEAREST, CUBIC = range(3)
ZEROS, BORDER, REFLECTION = range(3)
A = -0.75


@dataclass(frozen=True)
class _Tap:
    """One integer position (a float tensor) along one dimension, its weight, and the derivative of that by the grid."""

    position: Tensor
    weight: Tensor
    slope: Tensor


def _reflected(x: Tensor, low: float, span: float) -> tuple[Tensor, Tensor]:
    """`x` reflected into `low` to `low + span`, as often as needed, and the derivative of that by `x`, 1 or -1.

    Computed as in PyTorch's CPU kernel, so that numbers too large for exact results give the same ones. These may lie
    beyond the span.
    """
    if span == 0:
        return torch.zeros_like(x), torch.zeros_like(x)
    apart = x - low
    size = apart.abs()
    rest = size - torch.floor(size / (2 * span)) * (2 * span)
    odd = rest > 2 * span - rest
    turned = torch.where((apart < 0) != odd, -1.0, 1.0)
    return torch.minimum(rest, 2 * span - rest) + low, turned


def _kept_inside(x: Tensor, extent: int, padding: int, aligned: bool) -> tuple[Tensor, Tensor]:
    """The coordinate after padding, and its derivative by the coordinate. NaN becomes 0, as in PyTorch's kernel."""
    slope = torch.ones_like(x)
    if padding == ZEROS:
        return x, slope
    if padding == REFLECTION:
        x, slope = _reflected(x, 0.0, extent - 1.0) if aligned else _reflected(x, -0.5, float(extent))
    between = (x > 0) & (x < extent - 1)
    return torch.where(x > 0, x, 0.0).clamp(max=extent - 1), torch.where(between, slope, 0.0)


def _cubic(t: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Weights and slopes of the four positions around a point that is `t` after the second."""

    def near(x: Tensor) -> tuple[Tensor, Tensor]:
        return ((A + 2) * x - (A + 3)) * x * x + 1, (3 * (A + 2) * x - 2 * (A + 3)) * x

    def far(x: Tensor) -> tuple[Tensor, Tensor]:
        return ((A * x - 5 * A) * x + 8 * A) * x - 4 * A, (3 * A * x - 10 * A) * x + 8 * A

    before, after = [far(t + 1), near(t)], [near(1 - t), far(2 - t)]
    return [*before, *((weight, -slope) for weight, slope in after)]


def _taps(coordinate: Tensor, extent: int, mode: int, padding: int, aligned: bool) -> list[_Tap]:
    scale = (extent - 1) / 2 if aligned else extent / 2
    x = (coordinate + 1) / 2 * (extent - 1) if aligned else ((coordinate + 1) * extent - 1) / 2
    if mode == CUBIC:
        low = torch.floor(x)
        found = []
        for number, (weight, slope) in enumerate(_cubic(x - low)):
            position, _ = _kept_inside(low + (number - 1), extent, padding, aligned)
            found.append(_Tap(position, weight, slope * scale))
        return found
    x, inner = _kept_inside(x, extent, padding, aligned)
    if mode == NEAREST:
        return [_Tap(torch.round(x), torch.ones_like(x), torch.zeros_like(x))]
    low, slope = torch.floor(x), inner * scale
    return [_Tap(low, low + 1 - x, -slope), _Tap(low + 1, x - low, slope)]


@dataclass(frozen=True)
class _Corner:
    """One combination of taps: its index in the flat input (N, 1, P), whether it is inside (0 or 1), and its taps."""

    flat: Tensor
    inside: Tensor
    taps: tuple[_Tap, ...]

    def weight(self, sloped: int | None = None) -> Tensor:
        """(N, 1, P): the product of the weights, where dimension `sloped` contributes its slope instead."""
        product = self.inside
        for number, tap in enumerate(self.taps):
            product = product * (tap.slope if number == sloped else tap.weight)
        return product


def _corners(grid: Tensor, sizes: tuple[int, ...], mode: int, padding: int, aligned: bool) -> list[_Corner]:
    """All corners for a grid (N, ..., D), whose last dimension holds the coordinates in reverse order of dimensions."""
    points = grid.flatten(1, -2)
    along = [
        _taps(points[..., len(sizes) - 1 - dim].unsqueeze(1), extent, mode, padding, aligned)
        for dim, extent in enumerate(sizes)
    ]
    corners = []
    for taps in itertools.product(*along):
        flat = torch.zeros_like(taps[0].position, dtype=torch.int64)
        inside = torch.ones_like(taps[0].position, dtype=torch.bool)
        for tap, extent in zip(taps, sizes, strict=True):
            within = (tap.position >= 0) & (tap.position < extent)
            inside = inside & within
            flat = flat * extent + torch.where(within, tap.position, 0.0).to(torch.int64)
        corners.append(_Corner(flat, inside.to(grid.dtype), taps))
    return corners


def _wide(x: Tensor) -> Tensor:
    return x.to(widened(x.dtype))


def _sample(x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Tensor:
    image = _wide(x).flatten(2)
    result: Tensor | None = None
    for corner in _corners(_wide(grid), tuple(x.shape[2:]), mode, padding, align_corners):
        part = image.gather(2, corner.flat.expand(-1, x.shape[1], -1)) * corner.weight()
        result = part if result is None else result + part
    assert result is not None
    return result.view(*x.shape[:2], *grid.shape[1:-1]).to(x.dtype)


def _sample_backward(
    gradient: Tensor, x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool, output_mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    image, seed = _wide(x).flatten(2), _wide(gradient).flatten(2)
    space = x.dim() - 2
    of_image = torch.zeros_like(image)
    of_grid = [torch.zeros_like(seed[:, 0]) for _ in range(space)]
    for corner in _corners(_wide(grid), tuple(x.shape[2:]), mode, padding, align_corners):
        indices = corner.flat.expand(-1, x.shape[1], -1)
        if output_mask[0]:
            of_image = of_image.scatter_add(2, indices, seed * corner.weight())
        if output_mask[1] and mode != NEAREST:
            through = (image.gather(2, indices) * seed).sum(1)
            for dim in range(space):
                of_grid[dim] = of_grid[dim] + through * corner.weight(dim).squeeze(1)
    coordinates = torch.stack(of_grid[::-1], -1).view(grid.shape)
    return (
        of_image.view(x.shape).to(x.dtype) if output_mask[0] else None,
        coordinates.to(grid.dtype) if output_mask[1] else None,
    )


SAMPLING: dict[Any, Callable[..., Any]] = {
    aten.grid_sampler_2d.default: _sample,
    aten.grid_sampler_3d.default: _sample,
    aten.grid_sampler_2d_backward.default: _sample_backward,
    aten.grid_sampler_3d_backward.default: _sample_backward,
}
"""Decompositions by the overload that they replace."""
