"""Every op of `hal.ops` as array code, written once for numpy and for CuPy: what the ops mean.

Each function takes an `Arrays` (the array module and the dtypes of its arithmetic) and then the op's own arguments. It
is written to be read and to be right, as the oracle that other backends are checked against; speed comes from the array
library alone. Invariant: no function writes to its arguments, and results may be views of them.

The dtypes in memory and inside a program are those of `hal.kit.arrays.dtypes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hal.kit.arrays import indexing, windows
from hal.kit.arrays.dtypes import Arrays

# -- element-wise -------------------------------------------------------------------------------------------------


def _unary(name: str) -> Callable[..., Any]:
    return lambda a, x: getattr(a.xp, name)(x)


def _binary(name: str) -> Callable[..., Any]:
    return lambda a, x, y: getattr(a.xp, name)(x, y)


def _rsqrt(a: Arrays, x: Any) -> Any:
    return 1 / a.xp.sqrt(x)


def _reciprocal(a: Arrays, x: Any) -> Any:
    return 1 / x


def _sigmoid(a: Arrays, x: Any) -> Any:
    return 1 / (1 + a.xp.exp(-x))


def _erf(a: Arrays, x: Any) -> Any:
    return a.erf(x)


def _relu(a: Arrays, x: Any) -> Any:
    return a.xp.maximum(x, x.dtype.type(0))


def _gelu(a: Arrays, x: Any, *, approximate: str) -> Any:
    """Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv 1606.08415."""
    if approximate == "tanh":
        return 0.5 * x * (1 + a.xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + a.erf(x * math.sqrt(0.5)))


def _sign(a: Arrays, x: Any) -> Any:
    """NaN has none, which is 0."""
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def _scalar_power(a: Arrays, number: Any, x: Any) -> Any:
    return a.xp.power(x.dtype.type(number), x)


def _where(a: Arrays, condition: Any, x: Any, y: Any) -> Any:
    return a.xp.where(condition, x, y)


def _clamp(a: Arrays, x: Any, least: Any, most: Any) -> Any:
    if least is not None:
        x = a.xp.maximum(x, x.dtype.type(least))
    return x if most is None else a.xp.minimum(x, x.dtype.type(most))


def _cast(a: Arrays, x: Any, *, dtype: torch.dtype) -> Any:
    return x.astype(a.compute_dtype(dtype), copy=False)


# -- reductions, scans, rows --------------------------------------------------------------------------------------


def _total(a: Arrays, x: Any, dims: Sequence[int], keep: bool) -> Any:
    """The sum over `dims`, in `Arrays.total` where it is of floating-point numbers."""
    total = a.total if x.dtype.kind == "f" else x.dtype
    return x.sum(axis=tuple(dims), keepdims=keep, dtype=total)


def _sum(a: Arrays, x: Any, dims: Sequence[int], keep: bool) -> Any:
    return _total(a, x, dims, keep).astype(x.dtype, copy=False)


def _mean(a: Arrays, x: Any, dims: Sequence[int], keep: bool) -> Any:
    count = math.prod(x.shape[dim] for dim in dims)
    return (_total(a, x, dims, keep) / (count or math.nan)).astype(x.dtype, copy=False)


def _amax(a: Arrays, x: Any, dims: Sequence[int], keep: bool) -> Any:
    return x.max(axis=tuple(dims), keepdims=keep)


def _amin(a: Arrays, x: Any, dims: Sequence[int], keep: bool) -> Any:
    return x.min(axis=tuple(dims), keepdims=keep)


def _any(a: Arrays, x: Any, dim: int, keep: bool) -> Any:
    return x.any(axis=dim, keepdims=keep)


def _argmax(a: Arrays, x: Any, dim: int, keep: bool) -> Any:
    index = x.argmax(axis=dim).astype(np.int64)
    return a.xp.expand_dims(index, dim) if keep else index


def _argmin(a: Arrays, x: Any, dim: int, keep: bool) -> Any:
    index = x.argmin(axis=dim).astype(np.int64)
    return a.xp.expand_dims(index, dim) if keep else index


def _prod(a: Arrays, x: Any, dim: int, keep: bool) -> Any:
    return x.prod(axis=dim, keepdims=keep, dtype=x.dtype)


def _cumsum(a: Arrays, x: Any, dim: int) -> Any:
    total = a.total if x.dtype.kind == "f" else x.dtype
    return x.cumsum(axis=dim, dtype=total).astype(x.dtype, copy=False)


def _cumprod(a: Arrays, x: Any, dim: int) -> Any:
    return x.cumprod(axis=dim, dtype=x.dtype)


def _softmax(a: Arrays, x: Any, dim: int, half_to_float: bool) -> Any:
    if not x.shape:
        return a.xp.ones_like(x)
    if not x.size:
        return x
    weights = a.xp.exp(x - x.max(axis=dim, keepdims=True))
    return weights / _sum(a, weights, (dim,), True)


def _safe_softmax(a: Arrays, x: Any, dim: int) -> Any:
    """A row of nothing but -inf gives zeros."""
    if not x.shape:
        return a.xp.where(x == -math.inf, x.dtype.type(0), x.dtype.type(1))
    if not x.size:
        return x
    most = x.max(axis=dim, keepdims=True)
    nothing = most == -math.inf
    weights = a.xp.exp(x - a.xp.where(nothing, x.dtype.type(0), most))
    return weights / (_sum(a, weights, (dim,), True) + nothing.astype(x.dtype))


def _log_softmax(a: Arrays, x: Any, dim: int, half_to_float: bool) -> Any:
    if not x.shape:
        return a.xp.zeros_like(x)
    if not x.size:
        return x
    shifted = x - x.max(axis=dim, keepdims=True)
    return shifted - a.xp.log(_sum(a, a.xp.exp(shifted), (dim,), True))


def _layer_norm(a: Arrays, x: Any, shape: Sequence[int], weight: Any, bias: Any, epsilon: float) -> Any:
    """(result, mean, 1 / deviation). Source: Ba, Kiros and Hinton, "Layer Normalization", arXiv 1607.06450."""
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    mean = _mean(a, x, dims, True)
    centred = x - mean
    scale = 1 / a.xp.sqrt(_mean(a, centred * centred, dims, True) + epsilon)
    result = centred * scale
    if weight is not None:
        result = result * weight
    return (result if bias is None else result + bias), mean, scale


# -- matrix products ----------------------------------------------------------------------------------------------


def _mm(a: Arrays, x: Any, y: Any) -> Any:
    return a.xp.matmul(x, y)


def _addmm(a: Arrays, bias: Any, x: Any, y: Any) -> Any:
    return a.xp.matmul(x, y) + bias


# -- randomness, and the table -------------------------------------------------------------------------------------


def _drawn(name: str) -> Callable[..., Any]:
    def draw(a: Arrays, key: Any, number: int, shape: Sequence[int], *probability: float) -> Any:
        result = a.draws[name](key, number, shape, *probability)
        return result if name == "keep_mask" else result.astype(a.real, copy=False)

    return draw


def _functions() -> dict[str, Callable[..., Any]]:
    alike = "exp expm1 log log1p sqrt sin cos tan tanh floor ceil trunc abs logical_not logical_and logical_or"
    binary = {"logical_and", "logical_or"}
    table: dict[str, Callable[..., Any]] = {
        f"{name}.default": _binary(name) if name in binary else _unary(name) for name in alike.split()
    }
    for tensor, name in {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide"}.items():
        table[f"{tensor}.Tensor"] = table[f"{tensor}.Scalar"] = _binary(name)
    del table["sub.Scalar"]
    for short, name in {
        "eq": "equal",
        "ne": "not_equal",
        "lt": "less",
        "le": "less_equal",
        "gt": "greater",
        "ge": "greater_equal",
    }.items():
        table[f"{short}.Tensor"] = table[f"{short}.Scalar"] = _binary(name)
    table |= {
        "round.default": _unary("rint"),
        "neg.default": _unary("negative"),
        "rsqrt.default": _rsqrt,
        "reciprocal.default": _reciprocal,
        "sigmoid.default": _sigmoid,
        "erf.default": _erf,
        "sign.default": _sign,
        "relu.default": _relu,
        "gelu.default": _gelu,
        "bitwise_not.default": _unary("invert"),
        "bitwise_and.Tensor": _binary("bitwise_and"),
        "bitwise_or.Tensor": _binary("bitwise_or"),
        "bitwise_xor.Tensor": _binary("bitwise_xor"),
        "maximum.default": _binary("maximum"),
        "minimum.default": _binary("minimum"),
        "pow.Tensor_Tensor": _binary("power"),
        "pow.Tensor_Scalar": _binary("power"),
        "pow.Scalar": _scalar_power,
        "floor_divide.default": _binary("floor_divide"),
        "atan2.default": _binary("arctan2"),
        "fmod.Tensor": _binary("fmod"),
        "fmod.Scalar": _binary("fmod"),
        "remainder.Scalar": _binary("remainder"),
        "where.self": _where,
        "clamp.default": _clamp,
        "_to_copy.default": _cast,
        "sum.dim_IntList": _sum,
        "mean.dim": _mean,
        "amax.default": _amax,
        "amin.default": _amin,
        "any.dim": _any,
        "argmax.default": _argmax,
        "argmin.default": _argmin,
        "prod.dim_int": _prod,
        "cumsum.default": _cumsum,
        "cumprod.default": _cumprod,
        "_softmax.default": _softmax,
        "_safe_softmax.default": _safe_softmax,
        "_log_softmax.default": _log_softmax,
        "native_layer_norm.default": _layer_norm,
        "mm.default": _mm,
        "bmm.default": _mm,
        "addmm.default": _addmm,
        "convolution.default": windows.convolution,
        "convolution_backward.default": windows.convolution_backward,
        "max_pool2d_with_indices.default": windows.max_pool,
        "max_pool2d_with_indices_backward.default": windows.max_pool_backward,
    }
    table |= indexing.INDEXING
    table = {f"aten.{name}": function for name, function in table.items()}
    table |= {f"hal.random.{name}": _drawn(name) for name in ("keep_mask", "uniform", "normal")}
    return table


FUNCTIONS: dict[str, Callable[..., Any]] = _functions()
"""By the names of `hal.ops.OPS`: functions of an `Arrays` and the op's arguments."""
