"""Every op of `hal.ops` as array code, written once for numpy and for CuPy: what the ops mean.

Each function takes an `Arrays` (the array module and how numbers are held) and then the op's own arguments. It is
written to be read and to be right, as the oracle that other backends are checked against; speed comes from the array
library alone. Invariant: no function writes to its arguments, and results may be views of them.

Storage and arithmetic are two things. bf16 is stored as uint16 and fp16 as float16; inside a program every
floating-point value is held in `Arrays.real` (float32), and rounded after each op whose result is half precision. With
`real` float64 nothing is rounded before it is stored: the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from backends import array_windows

_STORED = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(np.uint16),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.int16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
    torch.bool: np.dtype(np.bool_),
}


@dataclass(frozen=True)
class Arrays:
    """The array module `xp`, the dtype `real` of floating-point arithmetic and `total` of sums, and what `xp` lacks.

    `erf` is element-wise; `draws` are `hal.random`'s keep_mask, uniform and normal, giving arrays of `xp`.
    """

    xp: Any
    erf: Callable[[Any], Any]
    draws: dict[str, Callable[..., Any]] = field(repr=False)
    real: np.dtype[Any]
    total: np.dtype[Any]

    def held(self, dtype: torch.dtype) -> np.dtype[Any]:
        """How values of that dtype are held inside a program."""
        return self.real if dtype.is_floating_point else _STORED[dtype]

    def load(self, stored: Any, dtype: torch.dtype) -> Any:
        """Values from memory. They may be the memory itself."""
        if dtype is torch.bfloat16:
            stored = (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(self.held(dtype), copy=False)

    def store(self, values: Any, dtype: torch.dtype, memory: Any) -> None:
        """Values into memory, rounded to nearest even."""
        memory[...] = _to_bf16(self.xp, values) if dtype is torch.bfloat16 else values

    def add_to(self, values: Any, dtype: torch.dtype, memory: Any) -> None:
        """Add values to what memory holds, rounded once."""
        self.store(self.load(memory, dtype) + values, dtype, memory)

    def rounded(self, values: Any, dtype: torch.dtype) -> Any:
        """Values as the dtype can hold them; unchanged in the oracle."""
        if self.real == np.float64 or dtype not in (torch.float16, torch.bfloat16):
            return values
        if dtype is torch.float16:
            return values.astype(np.float16).astype(self.real)
        return (_to_bf16(self.xp, values).astype(np.uint32) << 16).view(np.float32)


def stored_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """How a dtype lies in memory."""
    return _STORED[dtype]


def _to_bf16(xp: Any, values: Any) -> Any:
    """The upper halves of float32, rounded to nearest even. A NaN keeps its upper half, made quiet."""
    bits = xp.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(xp.shape(values))
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF)).astype(np.uint32)) >> 16
    quiet = (bits >> 16) | np.uint32(0x40)
    return xp.where((bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000), quiet, rounded).astype(np.uint16)


# -- views --------------------------------------------------------------------------------------------------------


def _view(a: Arrays, x: Any, shape: Sequence[int]) -> Any:
    return x.reshape(tuple(shape))


def _permute(a: Arrays, x: Any, dims: Sequence[int]) -> Any:
    return x.transpose(tuple(dims))


def _expand(a: Arrays, x: Any, shape: Sequence[int]) -> Any:
    return a.xp.broadcast_to(x, tuple(shape))


def _squeeze(a: Arrays, x: Any, dims: Sequence[int]) -> Any:
    return a.xp.squeeze(x, tuple(dims))


def _unsqueeze(a: Arrays, x: Any, dim: int) -> Any:
    return a.xp.expand_dims(x, dim)


def _at(dim: int, index: Any) -> tuple[Any, ...]:
    return (*[slice(None)] * dim, index)


def _select(a: Arrays, x: Any, dim: int, index: int) -> Any:
    return x[_at(dim, index)]


def _slice(a: Arrays, x: Any, dim: int, start: int, end: int, step: int) -> Any:
    return x[_at(dim, slice(start, end, step))]


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
    return x.astype(a.held(dtype), copy=False)


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
    place = x.argmax(axis=dim).astype(np.int64)
    return a.xp.expand_dims(place, dim) if keep else place


def _argmin(a: Arrays, x: Any, dim: int, keep: bool) -> Any:
    place = x.argmin(axis=dim).astype(np.int64)
    return a.xp.expand_dims(place, dim) if keep else place


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
    weights = a.xp.exp(x - x.max(axis=dim, keepdims=True))
    return weights / _sum(a, weights, (dim,), True)


def _safe_softmax(a: Arrays, x: Any, dim: int) -> Any:
    """A row of nothing but -inf gives zeros."""
    if not x.shape:
        return a.xp.where(x == -math.inf, x.dtype.type(0), x.dtype.type(1))
    most = x.max(axis=dim, keepdims=True)
    nothing = most == -math.inf
    weights = a.xp.exp(x - a.xp.where(nothing, x.dtype.type(0), most))
    return weights / (_sum(a, weights, (dim,), True) + nothing.astype(x.dtype))


def _log_softmax(a: Arrays, x: Any, dim: int, half_to_float: bool) -> Any:
    if not x.shape:
        return a.xp.zeros_like(x)
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


# -- gather and scatter -------------------------------------------------------------------------------------------


def _embedding(a: Arrays, weight: Any, index: Any) -> Any:
    return weight[index]


def _places(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


def _index(a: Arrays, x: Any, indices: Sequence[Any]) -> Any:
    return x[_places(indices)]


def _index_put(a: Arrays, x: Any, indices: Sequence[Any], values: Any, accumulate: bool) -> Any:
    result = x.copy()
    if accumulate:
        a.xp.add.at(result, _places(indices), values)
    else:
        result[_places(indices)] = values
    return result


def _grid(a: Arrays, dim: int, index: Any) -> tuple[Any, ...]:
    """What numpy indexes with so that element i, j, ... goes to `index[i, j, ...]` along `dim`."""
    rank = index.ndim
    along = [a.xp.arange(extent).reshape((-1,) + (1,) * (rank - place - 1)) for place, extent in enumerate(index.shape)]
    along[dim] = index
    return tuple(along)


def _gather(a: Arrays, x: Any, dim: int, index: Any) -> Any:
    return x[_grid(a, dim, index)] if index.ndim else x


def _part(source: Any, index: Any) -> Any:
    return source[tuple(slice(0, extent) for extent in index.shape)]


def _scatter(a: Arrays, x: Any, dim: int, index: Any, source: Any) -> Any:
    result = x.copy()
    result[_grid(a, dim, index)] = _part(source, index)
    return result


def _scatter_add(a: Arrays, x: Any, dim: int, index: Any, source: Any) -> Any:
    result = x.copy()
    a.xp.add.at(result, _grid(a, dim, index), _part(source, index))
    return result


def _scatter_value(a: Arrays, x: Any, dim: int, index: Any, value: Any) -> Any:
    result = x.copy()
    result[_grid(a, dim, index)] = value
    return result


def _slice_scatter(a: Arrays, x: Any, source: Any, dim: int, start: int, end: int, step: int) -> Any:
    result = x.copy()
    result[_at(dim, slice(start, end, step))] = source
    return result


def _select_scatter(a: Arrays, x: Any, source: Any, dim: int, index: int) -> Any:
    result = x.copy()
    result[_at(dim, index)] = source
    return result


# -- moves, creation, order, randomness ---------------------------------------------------------------------------


def _cat(a: Arrays, tensors: Sequence[Any], dim: int) -> Any:
    return a.xp.concatenate(list(tensors), axis=dim)


def _pad(a: Arrays, x: Any, pads: Sequence[int], value: Any) -> Any:
    """`pads` are (before, after) from the last dimension on; below zero they cut."""
    pairs = [(0, 0)] * x.ndim
    for place in range(len(pads) // 2):
        pairs[x.ndim - 1 - place] = (pads[2 * place], pads[2 * place + 1])
    cut = tuple(slice(max(0, -low), extent + min(0, high)) for (low, high), extent in zip(pairs, x.shape, strict=True))
    return a.xp.pad(x[cut], [(max(0, low), max(0, high)) for low, high in pairs], constant_values=value)


def _flip(a: Arrays, x: Any, dims: Sequence[int]) -> Any:
    return a.xp.flip(x, tuple(dims)) if dims else x


def _full(a: Arrays, shape: Sequence[int], value: Any, *, dtype: torch.dtype) -> Any:
    return a.xp.full(tuple(shape), value, dtype=a.held(dtype))


def _arange(a: Arrays, start: Any, end: Any, step: Any, *, dtype: torch.dtype) -> Any:
    count = max(0, math.ceil((end - start) / step))
    return (start + a.xp.arange(count) * step).astype(a.held(dtype))


def _order(a: Arrays, x: Any, dim: int, descending: bool) -> Any:
    """Places of the elements in order; equal ones keep theirs."""
    if not descending:
        return a.xp.argsort(x, axis=dim, kind="stable")
    backwards = a.xp.argsort(a.xp.flip(x, dim), axis=dim, kind="stable")
    return a.xp.flip(x.shape[dim] - 1 - backwards, dim)


def _topk(a: Arrays, x: Any, count: int, dim: int, largest: bool, in_order: bool) -> Any:
    places = _slice(a, _order(a, x, dim, largest), dim, 0, count, 1).astype(np.int64)
    return _gather(a, x, dim, places), places


def _sort(a: Arrays, x: Any, dim: int, descending: bool) -> Any:
    places = _order(a, x, dim, descending).astype(np.int64)
    return _gather(a, x, dim, places), places


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
        "view.default": _view,
        "permute.default": _permute,
        "expand.default": _expand,
        "squeeze.dims": _squeeze,
        "unsqueeze.default": _unsqueeze,
        "select.int": _select,
        "slice.Tensor": _slice,
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
        "embedding.default": _embedding,
        "index.Tensor": _index,
        "index_put.default": _index_put,
        "gather.default": _gather,
        "scatter.src": _scatter,
        "scatter.value": _scatter_value,
        "scatter_add.default": _scatter_add,
        "slice_scatter.default": _slice_scatter,
        "select_scatter.default": _select_scatter,
        "cat.default": _cat,
        "constant_pad_nd.default": _pad,
        "flip.default": _flip,
        "full.default": _full,
        "arange.start_step": _arange,
        "topk.default": _topk,
        "sort.default": _sort,
        "convolution.default": array_windows.convolution,
        "convolution_backward.default": array_windows.convolution_backward,
        "max_pool2d_with_indices.default": array_windows.max_pool,
        "max_pool2d_with_indices_backward.default": array_windows.max_pool_backward,
    }
    table = {f"aten.{name}": function for name, function in table.items()}
    table |= {f"hal.random.{name}": _drawn(name) for name in ("keep_mask", "uniform", "normal")}
    return table


FUNCTIONS: dict[str, Callable[..., Any]] = _functions()
"""By the names of `hal.ops.OPS`: functions of an `Arrays` and the op's arguments."""
