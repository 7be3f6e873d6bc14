"""Convolution and pooling as array code: a loop over the kernel's points, each a product of whole arrays.

Part of `hal.kit.arrays.ops`, whose rules hold here. Shapes: N samples, C channels in, O channels out, G groups; space
may have any number of dimensions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hal.kit.arrays.dtypes import Arrays
from hal.ops.window_rules import transposed_windows, windows


def _window(point: Sequence[int], stride: Sequence[int], dilation: Sequence[int], out: Sequence[int]) -> Any:
    """Of a padded input, the elements that a kernel's point meets: one for each element of the output."""
    return tuple(
        slice(start * spread, start * spread + (extent - 1) * step + 1, step)
        for start, step, spread, extent in zip(point, stride, dilation, out, strict=True)
    )


def _padded(a: Arrays, x: Any, padding: Sequence[int], value: float = 0.0) -> Any:
    widths = [(0, 0)] * (x.ndim - len(padding)) + [(pad, pad) for pad in padding]
    return a.xp.pad(x, widths, constant_values=value)


def _cropped(x: Any, padding: Sequence[int], extents: Sequence[int]) -> Any:
    return x[(..., *(slice(pad, pad + extent) for pad, extent in zip(padding, extents, strict=True)))]


def _correlate(a: Arrays, x: Any, weight: Any, out: Sequence[int], stride: Any, padding: Any, dilation: Any) -> Any:
    """(N, G, C/G, ...) under (G, O/G, C/G, ...) to (N, G, O/G, ...)."""
    padded = _padded(a, x, padding)
    result = a.xp.zeros((x.shape[0], *weight.shape[:2], *out), dtype=a.total)
    for point in itertools.product(*map(range, weight.shape[3:])):
        met = padded[(..., *_window(point, stride, dilation, out))]
        result += a.xp.einsum("ngc...,goc->ngo...", met, weight[(..., *point)])
    return result.astype(x.dtype, copy=False)


def _spread(
    a: Arrays, gradient: Any, weight: Any, extents: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> Any:
    """The transpose of `_correlate`: (N, G, O/G, ...) to (N, G, C/G, ...)."""
    out = gradient.shape[3:]
    full = [extent + 2 * pad for extent, pad in zip(extents, padding, strict=True)]
    result = a.xp.zeros((gradient.shape[0], weight.shape[0], weight.shape[2], *full), dtype=a.total)
    for point in itertools.product(*map(range, weight.shape[3:])):
        met = (..., *_window(point, stride, dilation, out))
        result[met] += a.xp.einsum("ngo...,goc->ngc...", gradient, weight[(..., *point)])
    return _cropped(result, padding, extents).astype(gradient.dtype, copy=False)


def _weight_gradient(
    a: Arrays, gradient: Any, x: Any, kernel: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> Any:
    """(N, G, O/G, ...) and (N, G, C/G, ...) to (G, O/G, C/G, kernel)."""
    padded = _padded(a, x, padding)
    out = gradient.shape[3:]
    result = a.xp.zeros((gradient.shape[1], gradient.shape[2], x.shape[2], *kernel), dtype=gradient.dtype)
    flat = gradient.reshape((*gradient.shape[:3], math.prod(gradient.shape[3:])))
    for point in itertools.product(*map(range, kernel)):
        met = padded[(..., *_window(point, stride, dilation, out))]
        met = met.reshape((*met.shape[:3], math.prod(met.shape[3:])))
        result[(..., *point)] = a.xp.einsum("ngop,ngcp->goc", flat, met)
    return result


def _grouped(x: Any, groups: int) -> Any:
    return x.reshape((x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))


def _split_weight(weight: Any, groups: int) -> Any:
    return weight.reshape((groups, weight.shape[0] // groups, *weight.shape[1:]))


def convolution(
    a: Arrays,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """As `torch.nn.functional.conv2d` and `conv_transpose2d`, in any number of dimensions."""
    grouped, kernels = _grouped(x, groups), _split_weight(weight, groups)
    if transposed:
        least = transposed_windows(x.shape[2:], weight.shape[2:], stride, padding, dilation)
        extents = [extent + extra for extent, extra in zip(least, output_padding, strict=True)]
        result = _spread(a, grouped, kernels, extents, stride, padding, dilation)
    else:
        out = windows(x.shape[2:], weight.shape[2:], stride, padding, dilation)
        result = _correlate(a, grouped, kernels, out, stride, padding, dilation)
    result = result.reshape((x.shape[0], result.shape[1] * result.shape[2], *result.shape[3:]))
    return result if bias is None else result + bias.reshape((-1, *[1] * (x.ndim - 2)))


def convolution_backward(
    a: Arrays,
    gradient: Any,
    x: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> Any:
    """(gradient of the input, of the weight, of the bias); None where `wanted` is False."""
    outer, inner, kernels = _grouped(gradient, groups), _grouped(x, groups), _split_weight(weight, groups)
    kernel = weight.shape[2:]
    by_input = by_weight = by_bias = None
    if wanted[0] and transposed:
        by_input = _correlate(a, outer, kernels, x.shape[2:], stride, padding, dilation).reshape(x.shape)
    elif wanted[0]:
        by_input = _spread(a, outer, kernels, x.shape[2:], stride, padding, dilation).reshape(x.shape)
    if wanted[1]:
        pair = (inner, outer) if transposed else (outer, inner)
        by_weight = _weight_gradient(a, *pair, kernel, stride, padding, dilation).reshape(weight.shape)
    if wanted[2]:
        dims = (0, *range(2, x.ndim))
        by_bias = gradient.sum(axis=dims, dtype=a.total).astype(gradient.dtype, copy=False)
    return by_input, by_weight, by_bias


def max_pool(
    a: Arrays, x: Any, kernel: Sequence[int], stride: Sequence[int], padding: Any, dilation: Any, up: bool
) -> Any:
    """(largest of each window, its index in the plane, counted row by row)."""
    height, width = x.shape[-2:]
    out = windows((height, width), kernel, stride, padding, dilation)
    padded = _padded(a, x, padding, -np.inf)
    rows, columns = a.xp.arange(out[0]).reshape(-1, 1), a.xp.arange(out[1])
    best = a.xp.full((*x.shape[:-2], *out), -np.inf, dtype=x.dtype)
    indices = a.xp.full(best.shape, -1, dtype=np.int64)
    for point in itertools.product(*map(range, kernel)):
        met = padded[(..., *_window(point, stride, dilation, out))]
        row = rows * stride[0] - padding[0] + point[0] * dilation[0]
        column = columns * stride[1] - padding[1] + point[1] * dilation[1]
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        better = inside & ((met > best) | (indices < 0) | a.xp.isnan(met))
        best = a.xp.where(better, met, best)
        indices = a.xp.where(better, row * width + column, indices)
    return best, indices


def max_pool_backward(
    a: Arrays, gradient: Any, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, up: bool, indices: Any
) -> Any:
    """The gradient of each window goes to the element that was its largest."""
    planes = x.size // (x.shape[-2] * x.shape[-1])
    result = a.xp.zeros((planes, x.shape[-2] * x.shape[-1]), dtype=x.dtype)
    which = a.xp.arange(planes).reshape(-1, 1)
    a.xp.add.at(result, (which, indices.reshape(planes, -1)), gradient.reshape(planes, -1))
    return result.reshape(x.shape)
