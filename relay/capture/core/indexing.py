"""Rewrites of ops that read and write by index, and of pooling.

Part of the core lowering (`relay.capture.core.lowering`). Each function takes the builder and the call, and returns the
node (or tuple of nodes) that replaces it, or None to leave the op as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from relay.capture.core.builder import Builder, part_spec
from relay.capture.core.call import Call, with_defaults
from relay.capture.core.elementwise import as_number

aten = torch.ops.aten


def _embedding(builder: Builder, call: Call) -> Any:
    return builder.call(aten.embedding.default, call.x, builder.cast(call.args[1], torch.int64))


def _indices(builder: Builder, indices: Sequence[Any]) -> list[Any]:
    result = []
    for index in indices:
        if index is not None and part_spec(index).dtype in (torch.bool, torch.uint8):
            raise ValueError("a mask as index makes shapes depend on the data")
        result.append(None if index is None else builder.cast(index, torch.int64))
    return result


def _index(builder: Builder, call: Call) -> Any:
    return builder.call(aten.index.Tensor, call.x, _indices(builder, call.args[1]))


def _index_put(builder: Builder, call: Call) -> Any:
    values = builder.cast(call.args[2], call.spec.dtype)
    indices = _indices(builder, call.args[1])
    return builder.call(aten.index_put.default, call.x, indices, values, call.get("accumulate"))


def _index_select(builder: Builder, call: Call) -> Any:
    """As an embedding, whose indices may not count from the end either."""
    index = builder.cast(builder.view(call.args[2], [part_spec(call.args[2]).count]), torch.int64)
    shape, dim = list(part_spec(call.x).shape), call.dim()
    if not shape:
        return builder.view(builder.call(aten.index.Tensor, builder.view(call.x, [1]), [index]), call.wanted.shape)
    order = [dim, *(axis for axis in range(len(shape)) if axis != dim)]
    rest = [shape[axis] for axis in order[1:]]
    table = builder.view(builder.permute(call.x, order), [shape[dim], math.prod(rest)])
    rows = builder.view(builder.call(aten.embedding.default, table, index), [*call.wanted.shape[dim : dim + 1], *rest])
    return builder.permute(rows, [order.index(axis) for axis in range(len(shape))])


def _scatter_value(builder: Builder, call: Call) -> Any:
    value = as_number(call.get("value"), call.spec.dtype)
    return builder.call(call.target, call.x, call.dim(), call.get("index"), value)


def _pool(builder: Builder, call: Call) -> Any:
    positional, _ = with_defaults(call.target, call.args, call.kwargs, call.wanted)
    names = [argument.name for argument in call.target._schema.arguments]
    for name in ("kernel_size", "stride", "padding", "dilation"):
        position = names.index(name)
        value = list(positional[position]) or list(positional[names.index("kernel_size")])
        positional[position] = value * 2 if len(value) == 1 else value
    return builder.call(call.target, *positional)


def _average_pool(builder: Builder, call: Call) -> Any:
    """A convolution of each plane with equal weights. Its gradient is the transposed convolution."""
    backward = call.target is aten.avg_pool2d_backward.default
    planes = call.get("self").meta["val"]
    kernel, stride, padding = (
        list(value) * (2 if len(value) == 1 else 1)
        for value in (call.get("kernel_size"), call.get("stride") or call.get("kernel_size"), call.get("padding"))
    )
    divisor = call.get("divisor_override")
    uneven = any(padding) and not call.get("count_include_pad") and divisor is None
    if call.get("ceil_mode") or uneven:
        raise ValueError("pooling that rounds up, or whose windows at the edge divide by less")
    *outer, height, width = planes.shape
    count = math.prod(outer)
    weight = builder.full([1, 1, *kernel], 1.0 / (divisor or math.prod(kernel)), planes.dtype)
    flat = builder.view(call.x, [count, 1, *call.spec.shape[-2:]])
    further = [0, 0]
    if backward:
        further = [
            extent - ((out - 1) * step - 2 * pad + size)
            for extent, out, step, pad, size in zip(
                (height, width), call.spec.shape[-2:], stride, padding, kernel, strict=True
            )
        ]
    result = builder.call(aten.convolution.default, flat, weight, None, stride, padding, [1, 1], backward, further, 1)
    return builder.view(result, call.wanted.shape)


INDEXING: dict[Any, Callable[[Builder, Call], Any]] = {
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten.index_select.default: _index_select,
    aten.avg_pool2d.default: _average_pool,
    aten.avg_pool2d_backward.default: _average_pool,
    aten.scatter.value: _scatter_value,
    aten.max_pool2d_with_indices.default: _pool,
    aten.max_pool2d_with_indices_backward.default: _pool,
}
