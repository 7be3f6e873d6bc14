"""The shape and dtype rules of convolution and pooling, and their FLOPs. Rules are as in `hal.ops.rules`.

Backends take the number of windows from here. Space may have any number of dimensions; nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hal.ops.rules import Spec, int64, one_dtype, require


def windows(extents: Sequence[int], kernel: Sequence[int], stride: Any, pad: Any, dilation: Any) -> tuple[int, ...]:
    """How many windows fit into a padded input, in each dimension of space."""
    return tuple(
        (extent + 2 * padding - spread * (size - 1) - 1) // step + 1
        for extent, size, step, padding, spread in zip(extents, kernel, stride, pad, dilation, strict=True)
    )


def transposed_windows(
    extents: Sequence[int], kernel: Sequence[int], stride: Any, pad: Any, dilation: Any
) -> tuple[int, ...]:
    """The extents of a transposed convolution's output, without output padding: the least with so many windows."""
    return tuple(
        (extent - 1) * step - 2 * padding + spread * (size - 1) + 1
        for extent, size, step, padding, spread in zip(extents, kernel, stride, pad, dilation, strict=True)
    )


def convolution(
    x: Spec,
    weight: Spec,
    bias: Spec | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Spec:
    require(len(x.shape) == len(weight.shape), f"{x.shape} under {weight.shape}")
    kernel = weight.shape[2:]
    if transposed:
        require(x.shape[1] == weight.shape[0], f"{x.shape} under {weight.shape}")
        channels = weight.shape[1] * groups
        least = transposed_windows(x.shape[2:], kernel, stride, padding, dilation)
        extents = tuple(extent + extra for extent, extra in zip(least, output_padding, strict=True))
    else:
        require(x.shape[1] == weight.shape[1] * groups, f"{x.shape} under {weight.shape} in {groups} groups")
        channels = weight.shape[0]
        extents = windows(x.shape[2:], kernel, stride, padding, dilation)
    require(bias is None or bias.shape == (channels,), f"a bias of {bias} for {channels} channels")
    return Spec((x.shape[0], channels, *extents), one_dtype(x, weight))


def convolution_flops(x: Spec, weight: Spec, bias: Spec | None, *rest: Any) -> int:
    result = convolution(x, weight, bias, *rest)
    transposed = rest[3]
    points = x.shape[2:] if transposed else result.shape[2:]
    return 2 * x.shape[0] * math.prod(points) * weight.count


def convolution_backward(
    gradient: Spec, x: Spec, weight: Spec, bias_sizes: Sequence[int] | None, *rest: Any
) -> tuple[Spec | None, ...]:
    """The gradients of the input, the weight and the bias; None for those that the mask, the last argument, leaves."""
    *window, mask = rest
    expected = convolution(x, weight, None, *window)
    require(gradient == expected, f"a gradient of {gradient} for a result of {expected}")
    results = (x, weight, Spec((gradient.shape[1],), x.dtype))
    return tuple(result if wanted else None for result, wanted in zip(results, mask, strict=True))


def convolution_backward_flops(
    gradient: Spec, x: Spec, weight: Spec, bias_sizes: Sequence[int] | None, *rest: Any
) -> int:
    mask = rest[-1]
    return (bool(mask[0]) + bool(mask[1])) * convolution_flops(x, weight, None, *rest[:-1])


def max_pool(
    x: Spec, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], up: bool
) -> tuple[Spec, ...]:
    require(not up, "pooling that rounds up")
    shape = (*x.shape[:-2], *windows(x.shape[-2:], kernel, stride, padding, dilation))
    return Spec(shape, x.dtype), Spec(shape, torch.int64)


def max_pool_backward(gradient: Spec, x: Spec, *rest: Any) -> Spec:
    int64(rest[-1])
    return Spec(x.shape, one_dtype(gradient, x))
