"""Convolution and pooling, forward and backward, in ONNX.

As in `elementwise`: the `Model`, then the op's arguments; the name or names of its results. Shapes: N samples, C
channels in, O channels out, G groups; space may have one to three dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from backends.onnx.model import Model, Operand, Value
from hal.ops.window_rules import transposed_windows


def _conv(
    m: Model, x: Operand, weight: Operand, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> str:
    pads = [*padding, *padding]
    return m.call("Conv", x, weight, bias, strides=stride, pads=pads, dilations=dilation, group=groups)


def _transposed(
    m: Model, x: Operand, weight: Operand, bias: Any, stride: Any, padding: Any, dilation: Any, extra: Any, groups: int
) -> str:
    return m.call(
        "ConvTranspose",
        x,
        weight,
        bias,
        strides=stride,
        pads=[*padding, *padding],
        dilations=dilation,
        output_padding=extra,
        group=groups,
    )


def _convolution(
    m: Model,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> str:
    if transposed:
        return _transposed(m, x, weight, bias, stride, padding, dilation, output_padding, groups)
    return _conv(m, x, weight, bias, stride, padding, dilation, groups)


def _swapped(m: Model, x: Operand, rank: int) -> str:
    return m.call("Transpose", x, perm=[1, 0, *range(2, rank)])


def _weight_gradient(
    m: Model, outer: Value, inner: Value, kernel: Sequence[int], stride: Any, padding: Any, dilation: Any, groups: int
) -> str:
    """(O, C / G, kernel) of a convolution from `inner` (N, C, ...) to `outer` (N, O, ...).

    It is a convolution of the input by the gradient, with samples for channels and stride and dilation in each
    other's place; what the stride left over at the end is cut off.
    """
    rank = len(inner.shape)
    parts = []
    for group in range(groups):
        pair = []
        for value in (inner, outer):
            size = value.shape[1] // groups
            pair.append(value.name if groups == 1 else m.slice(value, 1, group * size, (group + 1) * size))
        swapped = [_swapped(m, value, rank) for value in pair]  # (C / G, N, ...) and (O / G, N, ...)
        result = _conv(m, swapped[0], swapped[1], None, dilation, padding, stride, 1)
        for dim, extent in enumerate(kernel):
            result = m.slice(result, dim + 2, 0, extent)
        parts.append(_swapped(m, result, rank))
    return parts[0] if groups == 1 else m.call("Concat", *parts, axis=0)


def _convolution_backward(
    m: Model,
    gradient: Value,
    x: Value,
    weight: Value,
    bias_sizes: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> list[str | None]:
    """(gradient of the input, of the weight, of the bias); None where `wanted` is False."""
    kernel = weight.shape[2:]
    by_input = by_weight = by_bias = None
    if wanted[0] and transposed:
        by_input = _conv(m, gradient, weight, None, stride, padding, dilation, groups)
    elif wanted[0]:
        least = transposed_windows(gradient.shape[2:], kernel, stride, padding, dilation)
        extra = [extent - came for extent, came in zip(x.shape[2:], least, strict=True)]
        by_input = _transposed(m, gradient, weight, None, stride, padding, dilation, extra, groups)
    if wanted[1]:
        outer, inner = (x, gradient) if transposed else (gradient, x)
        by_weight = _weight_gradient(m, outer, inner, kernel, stride, padding, dilation, groups)
    if wanted[2]:
        by_bias = m.call("ReduceSum", gradient, m.ints([0, *range(2, len(x.shape))]), keepdims=0)
    return [by_input, by_weight, by_bias]


def _max_pool(
    m: Model, x: Value, kernel: Sequence[int], stride: Sequence[int], padding: Any, dilation: Any, up: bool
) -> list[str]:
    """(largest of each window, its index in the plane). ONNX counts indices through the whole tensor.

    ONNX Runtime's MaxPool passes over NaN, so a second one finds the windows that hold one.
    """
    plane = m.number(x.shape[-2] * x.shape[-1], torch.int64)
    batch: Operand = x if len(x.shape) == 4 else m.reshape(x, (1, *x.shape))
    windows: Any = {"kernel_shape": kernel, "strides": stride, "pads": [*padding, *padding], "dilations": dilation}
    best, indices = m.calls(2, "MaxPool", batch, **windows)
    unknown = m.call("MaxPool", m.cast(m.call("IsNaN", batch), x.dtype), **windows)
    best = m.call("Where", m.call("Greater", unknown, m.number(0, x.dtype)), m.number(math.nan, x.dtype), best)
    indices = m.call("Mod", indices, plane)
    if len(x.shape) == 4:
        return [best, indices]
    return [m.call("Squeeze", value, m.ints([0])) for value in (best, indices)]


def _max_pool_backward(
    m: Model, gradient: Value, x: Value, kernel: Any, stride: Any, padding: Any, dilation: Any, up: bool, indices: Value
) -> str:
    """The gradient of each window goes to the element that was its largest."""
    plane = x.shape[-2] * x.shape[-1]
    planes = math.prod(x.shape[:-2])
    flat = (planes, math.prod(gradient.shape[-2:]))
    zeros = m.expand(m.number(0, x.dtype), (planes, plane))
    index, updates = m.reshape(indices, flat), m.reshape(gradient, flat)
    return m.reshape(m.call("ScatterElements", zeros, index, updates, axis=1, reduction="add"), x.shape)


def functions() -> dict[str, Callable[..., Any]]:
    """By the names of `hal.ops.OPS`."""
    return {
        "aten.convolution.default": _convolution,
        "aten.convolution_backward.default": _convolution_backward,
        "aten.max_pool2d_with_indices.default": _max_pool,
        "aten.max_pool2d_with_indices_backward.default": _max_pool_backward,
    }
