"""Sums, extremes, scans, softmax and layer norm, matrix products and sorting in ONNX.

As in `elementwise`: the `Model`, then the op's arguments; the name or names of its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from backends.onnx.model import Model, Value


def _reduce(op: str) -> Callable[..., str]:
    def call(m: Model, x: Value, dims: Sequence[int], keep: bool) -> str:
        return m.call(op, x, m.ints(dims), keepdims=int(keep)) if dims else x.name

    return call


def _extreme(op: str) -> Callable[..., str]:
    reduce = _reduce(op)

    def call(m: Model, x: Value, dims: Sequence[int], keep: bool) -> str:
        if x.dtype is not torch.bool:
            return reduce(m, x, dims, keep)
        return m.cast(reduce(m, Value(m.cast(x, torch.int32), x.shape, torch.int32), dims, keep), torch.bool)

    return call


def _mean(m: Model, x: Value, dims: Sequence[int], keep: bool) -> str:
    if not x.floating or 0 not in x.shape:
        return _reduce("ReduceMean")(m, x, dims, keep)
    total = _reduce("ReduceSum")(m, x, dims, keep)  # the mean of nothing is NaN
    count = math.prod(x.shape[dim] for dim in dims)
    return m.call("Div", total, m.number(float(count), x.dtype))


def _any(m: Model, x: Value, dim: int, keep: bool) -> str:
    count = m.call("ReduceSum", m.cast(x, torch.int32), m.ints([dim]), keepdims=int(keep))
    return m.cast(count, torch.bool)


def _argument(op: str) -> Callable[..., str]:
    def call(m: Model, x: Value, dim: int, keep: bool) -> str:
        source: Any = m.cast(x, torch.int32) if x.dtype is torch.bool else x
        return m.call(op, source, axis=dim, keepdims=int(keep))

    return call


def _prod(m: Model, x: Value, dim: int, keep: bool) -> str:
    return m.call("ReduceProd", x, m.ints([dim]), keepdims=int(keep))


def _cumsum(m: Model, x: Value, dim: int) -> str:
    return m.call("CumSum", x, m.number(dim, torch.int64))


def _cumprod(m: Model, x: Value, dim: int) -> str:
    """One after the other, as products of a part may overflow where those from the beginning on do not."""
    return m.scan("Mul", x, dim, 1) if math.prod(x.shape) else m.call("Identity", x)


def _rows(op: str) -> Callable[..., str]:
    def call(m: Model, x: Value, dim: int, half_to_float: bool) -> str:
        if x.shape:
            return m.call(op, x, axis=dim)
        return m.reshape(m.call(op, m.reshape(x, [1]), axis=0), [])

    return call


def _safe_softmax(m: Model, x: Value, dim: int) -> str:
    """A row of nothing but -inf gives zeros."""
    if not x.shape:
        return m.reshape(_safe_softmax(m, Value(m.reshape(x, [1]), (1,), x.dtype), 0), [])
    nothing = m.call("Equal", m.call("ReduceMax", x, m.ints([dim])), m.number(-math.inf, x.dtype))
    return m.call("Where", nothing, m.number(0, x.dtype), m.call("Softmax", x, axis=dim))


def _layer_norm(
    m: Model, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, epsilon: float
) -> list[str]:
    """(result, mean, 1 / deviation). ONNX's op holds its statistics in float32, which float64 is not content with."""
    if x.dtype is torch.float32:
        scale: Any = weight if weight is not None else m.constant(np.ones(tuple(shape), dtype=np.float32))
        first = len(x.shape) - len(shape)
        return m.calls(3, "LayerNormalization", x, scale, bias, axis=first, epsilon=epsilon)
    dims = m.ints(range(len(x.shape) - len(shape), len(x.shape)))
    mean = m.call("ReduceMean", x, dims)
    centred = m.call("Sub", x, mean)
    variance = m.call("ReduceMean", m.call("Mul", centred, centred), dims)
    scaled = m.call("Reciprocal", m.call("Sqrt", m.call("Add", variance, m.number(epsilon, x.dtype))))
    result = m.call("Mul", centred, scaled)
    if weight is not None:
        result = m.call("Mul", result, weight)
    return [result if bias is None else m.call("Add", result, bias), mean, scaled]


def _matmul(m: Model, x: Value, y: Value) -> str:
    return m.call("MatMul", x, y)


def _addmm(m: Model, bias: Value, x: Value, y: Value) -> str:
    return m.call("Gemm", x, y, bias) if x.floating else m.call("Add", m.call("MatMul", x, y), bias)


def _topk(m: Model, x: Value, count: int, dim: int, largest: bool, in_order: bool) -> list[str]:
    return m.calls(2, "TopK", x, m.ints([count]), axis=dim, largest=int(largest), sorted=1)


def _sort(m: Model, x: Value, dim: int, descending: bool) -> list[str]:
    """Equal elements keep their order, as TopK's do."""
    return _topk(m, x, x.shape[dim], dim, descending, True)


def functions() -> dict[str, Callable[..., Any]]:
    """By the names of `hal.ops.OPS`."""
    table: dict[str, Callable[..., Any]] = {
        "sum.dim_IntList": _reduce("ReduceSum"),
        "mean.dim": _mean,
        "amax.default": _extreme("ReduceMax"),
        "amin.default": _extreme("ReduceMin"),
        "any.dim": _any,
        "argmax.default": _argument("ArgMax"),
        "argmin.default": _argument("ArgMin"),
        "prod.dim_int": _prod,
        "cumsum.default": _cumsum,
        "cumprod.default": _cumprod,
        "_softmax.default": _rows("Softmax"),
        "_log_softmax.default": _rows("LogSoftmax"),
        "_safe_softmax.default": _safe_softmax,
        "native_layer_norm.default": _layer_norm,
        "mm.default": _matmul,
        "bmm.default": _matmul,
        "addmm.default": _addmm,
        "topk.default": _topk,
        "sort.default": _sort,
    }
    return {f"aten.{name}": function for name, function in table.items()}
