"""Views, gathering, scattering and moving in ONNX.

As in `elementwise`: the `Model`, then the op's arguments; the name of its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from backends.onnx.model import Model, Value, compute_dtype
from hal.ops.rules import broadcast

_LARGE = 1024
"""Elements from which on a constant is computed in each run rather than stored in the model."""


def _view(m: Model, x: Value, shape: Sequence[int]) -> str:
    return m.reshape(x, shape)


def _permute(m: Model, x: Value, dims: Sequence[int]) -> str:
    return m.call("Transpose", x, perm=list(dims)) if dims else x.name


def _expand(m: Model, x: Value, shape: Sequence[int]) -> str:
    return m.expand(x, shape)


def _squeeze(m: Model, x: Value, dims: Sequence[int]) -> str:
    return m.reshape(x, [extent for dim, extent in enumerate(x.shape) if dim not in dims])


def _unsqueeze(m: Model, x: Value, dim: int) -> str:
    return m.reshape(x, (*x.shape[:dim], 1, *x.shape[dim:]))


def _select(m: Model, x: Value, dim: int, index: int) -> str:
    return m.call("Gather", x, m.number(index, torch.int64), axis=dim)


def _slice(m: Model, x: Value, dim: int, start: int, end: int, step: int) -> str:
    return m.slice(x, dim, start, end, step)


def _embedding(m: Model, weight: Value, index: Value) -> str:
    return m.call("Gather", weight, index, axis=0)


class _IndexedElements:
    """The elements of `x[indices]`: the dimensions to move to the front, and a row of indices for each element."""

    def __init__(self, m: Model, x: Value, indices: Sequence[Value | None]) -> None:
        self.used = [dim for dim, index in enumerate(indices) if index is not None]
        rest = [dim for dim in range(len(x.shape)) if dim not in self.used]
        self.order = [*self.used, *rest]
        self.rest = tuple(x.shape[dim] for dim in rest)
        given = [index for index in indices if index is not None]
        self.picked = broadcast(*(index.shape for index in given))
        last = (*self.picked, 1)
        columns = [m.expand(m.reshape(index, (*index.shape, 1)), last) for index in given]
        self.rows = columns[0] if len(columns) == 1 else m.call("Concat", *columns, axis=-1)
        together = self.used == list(range(self.used[0], self.used[-1] + 1))
        front, middle = (self.used[0] if together else 0), len(self.picked)
        self.shape = (*self.rest[:front], *self.picked, *self.rest[front:])
        """Of `x[indices]`."""
        axes = list(range(middle + len(self.rest)))
        self.outward = [*axes[middle : middle + front], *axes[:middle], *axes[middle + front :]]
        """The order of dimensions that makes `x[indices]` of what is gathered, with the picked ones first."""


def _transposed(m: Model, x: Any, order: Sequence[int]) -> Any:
    return x if list(order) == sorted(order) else m.call("Transpose", x, perm=list(order))


def _inverse(order: Sequence[int]) -> list[int]:
    return [list(order).index(axis) for axis in range(len(order))]


def _index(m: Model, x: Value, indices: Sequence[Value | None]) -> str:
    used = [dim for dim, index in enumerate(indices) if index is not None]
    if len(used) == 1:
        return m.call("Gather", x, indices[used[0]], axis=used[0])
    elements = _IndexedElements(m, x, indices)
    gathered = m.call("GatherND", _transposed(m, x, elements.order), elements.rows)
    return str(_transposed(m, gathered, elements.outward))


def _index_put(m: Model, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool) -> str:
    elements = _IndexedElements(m, x, indices)
    full: Any = values if values.shape == elements.shape else m.expand(values, elements.shape)
    updates = _transposed(m, full, _inverse(elements.outward))
    reduction = "add" if accumulate else "none"
    result = m.call("ScatterND", _transposed(m, x, elements.order), elements.rows, updates, reduction=reduction)
    return str(_transposed(m, result, _inverse(elements.order)))


def _gather(m: Model, x: Value, dim: int, index: Value) -> str:
    return m.call("GatherElements", x, index, axis=dim) if index.shape else x.name


def _part(m: Model, source: Value, index: Value) -> str:
    part = source.name
    for dim, (whole, wanted) in enumerate(zip(source.shape, index.shape, strict=True)):
        if whole != wanted:
            part = m.slice(part, dim, 0, wanted)
    return part


def _scatter_by(m: Model, x: Value, dim: int, index: Value, updates: str, reduction: str) -> str:
    if x.shape:
        return m.call("ScatterElements", x, index, updates, axis=dim, reduction=reduction)
    flat, position, update = (m.reshape(value, [1]) for value in (x, index, updates))
    return m.reshape(m.call("ScatterElements", flat, position, update, axis=0, reduction=reduction), [])


def _scatter(m: Model, x: Value, dim: int, index: Value, source: Value) -> str:
    return _scatter_by(m, x, dim, index, _part(m, source, index), "none")


def _scatter_add(m: Model, x: Value, dim: int, index: Value, source: Value) -> str:
    return _scatter_by(m, x, dim, index, _part(m, source, index), "add")


def _scatter_value(m: Model, x: Value, dim: int, index: Value, value: Any) -> str:
    return _scatter_by(m, x, dim, index, m.expand(m.number(value, x.dtype), index.shape), "none")


def _slice_scatter(m: Model, x: Value, source: Value, dim: int, start: int, end: int, step: int) -> str:
    if step == 1:
        parts = [source.name]
        if start:
            parts.insert(0, m.slice(x, dim, 0, start))
        if end < x.shape[dim]:
            parts.append(m.slice(x, dim, end, x.shape[dim]))
        return m.call("Concat", *parts, axis=dim)
    rows = np.arange(start, end, step).reshape([-1 if axis == dim else 1 for axis in range(len(x.shape))])
    index = m.expand(m.constant(rows.astype(np.int64)), source.shape)
    return m.call("ScatterElements", x, index, source, axis=dim)


def _select_scatter(m: Model, x: Value, source: Value, dim: int, index: int) -> str:
    shape = (*source.shape[:dim], 1, *source.shape[dim:])
    return _slice_scatter(m, x, Value(m.reshape(source, shape), shape, x.dtype), dim, index, index + 1, 1)


def _cat(m: Model, tensors: Sequence[Value], dim: int) -> str:
    return m.call("Concat", *tensors, axis=dim)


def _pad(m: Model, x: Value, pads: Sequence[int], value: Any) -> str:
    """`pads` are (before, after) from the last dimension on; below zero they cut."""
    pairs = [(0, 0)] * len(x.shape)
    for axis in range(len(pads) // 2):
        pairs[len(x.shape) - 1 - axis] = (pads[2 * axis], pads[2 * axis + 1])
    result = x.name
    for dim, ((low, high), extent) in enumerate(zip(pairs, x.shape, strict=True)):
        if low < 0 or high < 0:
            result = m.slice(result, dim, max(0, -low), extent + min(0, high))
    widths = [max(0, low) for low, _ in pairs] + [max(0, high) for _, high in pairs]
    return m.call("Pad", result, m.ints(widths), m.number(value, x.dtype)) if any(widths) else result


def _flip(m: Model, x: Value, dims: Sequence[int]) -> str:
    if not dims:
        return x.name
    back, far = [-1] * len(dims), [-(2**62)] * len(dims)
    return m.call("Slice", x, m.ints(back), m.ints(far), m.ints(dims), m.ints(back))


def _full(m: Model, shape: Sequence[int], value: Any, *, dtype: torch.dtype) -> str:
    number = m.number(value, compute_dtype(dtype))
    return m.expand(number, shape) if shape else number


def _arange(m: Model, start: Any, end: Any, step: Any, *, dtype: torch.dtype) -> str:
    count = max(0, math.ceil((end - start) / step))
    if count < _LARGE or compute_dtype(dtype) is not torch.int64:
        numbers = (start + np.arange(count) * step).astype(torch.empty(0, dtype=compute_dtype(dtype)).numpy().dtype)
        return m.constant(numbers)
    return m.call("Range", *(m.number(bound, torch.int64) for bound in (start, start + count * step, step)))


def functions() -> dict[str, Callable[..., Any]]:
    """By the names of `hal.ops.OPS`."""
    table: dict[str, Callable[..., Any]] = {
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
    }
    return {f"aten.{name}": function for name, function in table.items()}
