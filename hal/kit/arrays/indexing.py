"""The ops of `hal.kit.arrays.ops` that move elements and compute nothing: views, gathers, scatters, moves, orders.

Functions of an `Arrays` and of the op's own arguments, for numpy and CuPy alike. They do not check indices, which
`hal.kit.arrays.program` does before. Invariant: none writes to its arguments, and results may be views of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hal.kit.arrays.dtypes import Arrays

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


# -- gather and scatter -------------------------------------------------------------------------------------------


def _embedding(a: Arrays, weight: Any, index: Any) -> Any:
    return weight[index]


def _index_tuple(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


def _index(a: Arrays, x: Any, indices: Sequence[Any]) -> Any:
    return x[_index_tuple(indices)]


def _index_put(a: Arrays, x: Any, indices: Sequence[Any], values: Any, accumulate: bool) -> Any:
    result = x.copy()
    if accumulate:
        a.xp.add.at(result, _index_tuple(indices), values)
    else:
        result[_index_tuple(indices)] = values
    return result


def _grid(a: Arrays, dim: int, index: Any) -> tuple[Any, ...]:
    """What numpy indexes with so that element i, j, ... goes to `index[i, j, ...]` along `dim`."""
    rank = index.ndim
    along = [a.xp.arange(extent).reshape((-1,) + (1,) * (rank - axis - 1)) for axis, extent in enumerate(index.shape)]
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
    for axis in range(len(pads) // 2):
        pairs[x.ndim - 1 - axis] = (pads[2 * axis], pads[2 * axis + 1])
    cut = tuple(slice(max(0, -low), extent + min(0, high)) for (low, high), extent in zip(pairs, x.shape, strict=True))
    return a.xp.pad(x[cut], [(max(0, low), max(0, high)) for low, high in pairs], constant_values=value)


def _flip(a: Arrays, x: Any, dims: Sequence[int]) -> Any:
    return a.xp.flip(x, tuple(dims)) if dims else x


def _full(a: Arrays, shape: Sequence[int], value: Any, *, dtype: torch.dtype) -> Any:
    return a.xp.full(tuple(shape), value, dtype=a.compute_dtype(dtype))


def _arange(a: Arrays, start: Any, end: Any, step: Any, *, dtype: torch.dtype) -> Any:
    count = max(0, math.ceil((end - start) / step))
    return (start + a.xp.arange(count) * step).astype(a.compute_dtype(dtype))


def _order(a: Arrays, x: Any, dim: int, descending: bool) -> Any:
    """Places of the elements in order; equal ones keep theirs."""
    if not descending:
        return a.xp.argsort(x, axis=dim, kind="stable")
    backwards = a.xp.argsort(a.xp.flip(x, dim), axis=dim, kind="stable")
    return a.xp.flip(x.shape[dim] - 1 - backwards, dim)


def _topk(a: Arrays, x: Any, count: int, dim: int, largest: bool, in_order: bool) -> Any:
    positions = _slice(a, _order(a, x, dim, largest), dim, 0, count, 1).astype(np.int64)
    return _gather(a, x, dim, positions), positions


def _sort(a: Arrays, x: Any, dim: int, descending: bool) -> Any:
    positions = _order(a, x, dim, descending).astype(np.int64)
    return _gather(a, x, dim, positions), positions


INDEXING: dict[str, Callable[..., Any]] = {
    "view.default": _view,
    "permute.default": _permute,
    "expand.default": _expand,
    "squeeze.dims": _squeeze,
    "unsqueeze.default": _unsqueeze,
    "select.int": _select,
    "slice.Tensor": _slice,
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
}
"""By the names of `hal.ops.OPS` without `aten.`."""
