"""Arguments for the ops that place elements: views, gathers, scatters, moves, orders, windows, and random draws.

Invariant: the arguments obey the rule of the op's row, and no result depends on what the op leaves open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hal import random as counter_random
from hal.conformance.samples.sampler import Draw, Sampler, table_of
from hal.ops import OPS, Spec


def _view(s: Sampler) -> list[Any]:
    x = s.any_dtype(s.shape())
    extents = [extent for extent in x.shape if extent != 1 or s.flag()]
    if len(extents) > 1 and s.flag():
        axis = s.random.randrange(len(extents) - 1)
        extents[axis : axis + 2] = [extents[axis] * extents[axis + 1]]
    if s.flag():
        extents.insert(s.random.randint(0, len(extents)), 1)
    return [x, extents]


def _permute(s: Sampler) -> list[Any]:
    x = s.any_dtype(s.shape())
    return [x, s.random.sample(range(x.dim()), x.dim())]


def _expand(s: Sampler) -> list[Any]:
    shape = s.shape()
    return [s.any_dtype(s.broadcasting(shape)), shape]


def _squeeze(s: Sampler) -> list[Any]:
    shape = [1 if s.flag() else extent for extent in s.shape(1)]
    shape[s.dim(shape)] = 1
    units = [dim for dim, extent in enumerate(shape) if extent == 1]
    return [s.any_dtype(shape), sorted(s.random.sample(units, s.random.randint(1, len(units))))]


def _unsqueeze(s: Sampler) -> list[Any]:
    x = s.any_dtype(s.shape())
    return [x, s.random.randint(0, x.dim())]


def _select(s: Sampler) -> list[Any]:
    shape = s.shape(1, empty=False)
    dim = s.dim(shape)
    return [s.any_dtype(shape), dim, s.random.randrange(shape[dim])]


def _bounds(s: Sampler, shape: Sequence[int]) -> list[int]:
    dim = s.dim(shape)
    start, end = sorted((s.random.randint(0, shape[dim]), s.random.randint(0, shape[dim])))
    return [dim, start, end, s.random.choice((1, 1, 2, 3))]


def _slice(s: Sampler) -> list[Any]:
    shape = s.shape(1)
    return [s.any_dtype(shape), *_bounds(s, shape)]


def _embedding(s: Sampler) -> list[Any]:
    rows = s.extent()
    return [s.real([rows, s.extent()]), s.index(s.shape(0, 3), rows)]


def _indexed(s: Sampler) -> tuple[list[int], list[Any]]:
    shape = s.shape(1, 4, empty=False)
    used = s.dims(shape)
    picked = s.shape(0, 2, empty=False)
    indices: list[Any] = [None] * (used[-1] + 1)
    for axis in used:
        indices[axis] = s.index(s.broadcasting(picked), shape[axis], negative=s.flag())
    return shape, indices


def _index(s: Sampler) -> list[Any]:
    shape, indices = _indexed(s)
    return [s.any_dtype(shape), indices]


def _index_put(s: Sampler) -> list[Any]:
    shape, indices = _indexed(s)
    x = s.real(shape)
    if s.flag():
        return [x, indices, s.real(s.broadcasting(x[_slices(indices)].shape)), True]
    # Which of two values put to one place stays is not defined: the places differ.
    dim = s.dim(shape)
    count = s.random.randint(1, shape[dim])
    positions = torch.randperm(shape[dim], generator=s.generator)[:count]
    indices = [*[None] * dim, positions]
    return [x, indices, s.real(x[_slices(indices)].shape), False]


def _slices(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


def _gathered(s: Sampler, distinct: bool) -> tuple[list[int], int, torch.Tensor]:
    shape = s.shape(1, 3, empty=False)
    dim = s.dim(shape)
    extents = [s.random.randint(1, extent) for extent in shape]
    if not distinct:
        extents[dim] = s.random.randint(1, 6)
        return shape, dim, s.index(extents, shape[dim])
    order = torch.rand(shape, generator=s.generator).argsort(dim)
    return shape, dim, order[tuple(slice(0, extent) for extent in extents)].contiguous()


def _gather(s: Sampler) -> list[Any]:
    shape, dim, index = _gathered(s, False)
    return [s.any_dtype(shape), dim, index]


def _scatter(s: Sampler) -> list[Any]:
    shape, dim, index = _gathered(s, True)
    return [s.real(shape), dim, index, s.real([extent + s.random.randint(0, 2) for extent in index.shape])]


def _scatter_add(s: Sampler) -> list[Any]:
    shape, dim, index = _gathered(s, False)
    return [s.real(shape), dim, index, s.real(index.shape)]


def _scatter_value(s: Sampler) -> list[Any]:
    shape, dim, index = _gathered(s, False)
    return [s.real(shape), dim, index, s.random.uniform(-2, 2)]


def _slice_scatter(s: Sampler) -> list[Any]:
    shape = s.shape(1)
    x, bounds = s.real(shape), _bounds(s, shape)
    dim, start, end, step = bounds
    return [x, s.real([*shape[:dim], -(-(end - start) // step), *shape[dim + 1 :]]), *bounds]


def _select_scatter(s: Sampler) -> list[Any]:
    shape = s.shape(1, empty=False)
    dim = s.dim(shape)
    return [s.real(shape), s.real([*shape[:dim], *shape[dim + 1 :]]), dim, s.random.randrange(shape[dim])]


def _cat(s: Sampler) -> list[Any]:
    first = s.any_dtype(s.shape(1))
    dim = s.dim(first.shape)
    parts = [first]
    for _ in range(s.random.randint(0, 3)):
        shape = list(first.shape)
        shape[dim] = s.random.randint(0, 4)
        if first.dtype.is_floating_point:
            parts.append(s.special(shape))
        else:
            parts.append(s.booleans(shape) if first.dtype is torch.bool else s.integers(shape, dtype=first.dtype))
    return [parts, dim]


def _pad(s: Sampler) -> list[Any]:
    shape = [extent + 2 for extent in s.shape(1, empty=False)]
    pads = [s.random.randint(-1, 3) for _ in range(2 * s.random.randint(1, len(shape)))]
    return [s.real(shape), pads, s.random.choice((0.0, 1.5, -math.inf))]


def _flip(s: Sampler) -> list[Any]:
    shape = s.shape(1)
    return [s.any_dtype(shape), s.dims(shape)]


def _full(s: Sampler) -> list[Any]:
    shape = s.shape()
    dtype, value = s.random.choice(
        ((s.floating, 1.5), (s.floating, -math.inf), (torch.int64, 7), (torch.bool, True), (torch.int32, -2))
    )
    return [shape, value, {"dtype": dtype}]


def _arange(s: Sampler) -> list[Any]:
    if s.flag():
        step = s.random.choice((1, 2, 3, -1))
        start = s.random.randint(-3, 3)
        return [start, start + step * s.random.randint(0, 41), step, {"dtype": torch.int64}]
    return [0, s.random.randint(0, 40), 1, {"dtype": s.floating}]


def _topk(s: Sampler) -> list[Any]:
    shape = s.shape(1, 3, empty=False)
    dim = s.dim(shape)
    return [s.distinct(shape), s.random.randint(1, shape[dim]), dim, s.flag(), True]


def _sort(s: Sampler) -> list[Any]:
    shape = s.shape(1, 3, empty=False)
    return [s.distinct(shape), s.dim(shape), s.flag()]


def _convolved(s: Sampler) -> list[Any]:
    """(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)."""
    space = s.random.choice((1, 2, 2, 3))
    groups, inner, outer = s.random.choice((1, 1, 2)), s.random.randint(1, 3), s.random.randint(1, 3)
    stride, padding, dilation, kernel = ([s.random.randint(least, 2) for _ in range(space)] for least in (1, 0, 1, 1))
    transposed = s.random.random() < 0.3
    further = [s.random.randint(0, step - 1) if transposed else 0 for step in stride]
    extents = [spread * (size - 1) + 5 + s.random.randint(0, 2) for size, spread in zip(kernel, dilation, strict=True)]
    shape = [groups * inner, outer] if transposed else [groups * outer, inner]
    x = s.real([s.random.randint(1, 3), groups * inner, *extents])
    bias = s.real([groups * outer]) if s.flag() else None
    return [x, s.real([*shape, *kernel]), bias, stride, padding, dilation, transposed, further, groups]


def _convolution_backward(s: Sampler) -> list[Any]:
    x, weight, _, *rest = _convolved(s)
    result: Any = OPS["aten.convolution.default"].results(_spec(x), _spec(weight), None, *rest)
    mask = s.random.choice(([True, True, True], [False, True, True], [False, True, False], [True, True, False]))
    return [s.real(result.shape), x, weight, [result.shape[1]] if mask[2] else None, *rest, mask]


def _pooled(s: Sampler) -> list[Any]:
    kernel = [s.random.randint(1, 3) for _ in range(2)]
    padding = [s.random.randint(0, size // 2) for size in kernel]
    stride, dilation = ([s.random.randint(1, most) for _ in range(2)] for most in (3, 2))
    reach = [spread * (size - 1) + 1 for size, spread in zip(kernel, dilation, strict=True)]
    shape = [s.random.randint(1, 3), s.random.randint(1, 3), *(size + s.random.randint(2, 6) for size in reach)]
    return [s.distinct(shape), kernel, stride, padding, dilation, False]


def _pool_backward(s: Sampler) -> list[Any]:
    x, *rest = _pooled(s)
    values, indices = torch.ops.aten.max_pool2d_with_indices.default(x, *rest)
    return [s.real(values.shape), x, *rest, indices]


def _spec(tensor: torch.Tensor) -> Spec:
    return Spec(tuple(tensor.shape), tensor.dtype)


def _drawn(probability: bool) -> Draw:
    def draw(s: Sampler) -> list[Any]:
        key = counter_random.RandomKey(*(s.random.randrange(limit) for limit in (2**64, 2**32, 2**20, 2**32)))
        further = [s.random.choice((0.0, 0.1, 0.5, 0.9, 1.0))] if probability else []
        return [key, s.random.randrange(counter_random.OP_LIMIT), s.shape(), *further]

    return draw


INDEXING: dict[str, Draw] = table_of(
    [
        (_view, "view.default"),
        (_permute, "permute.default"),
        (_expand, "expand.default"),
        (_squeeze, "squeeze.dims"),
        (_unsqueeze, "unsqueeze.default"),
        (_select, "select.int"),
        (_slice, "slice.Tensor"),
        (_embedding, "embedding.default"),
        (_index, "index.Tensor"),
        (_index_put, "index_put.default"),
        (_gather, "gather.default"),
        (_scatter, "scatter.src"),
        (_scatter_add, "scatter_add.default"),
        (_scatter_value, "scatter.value"),
        (_slice_scatter, "slice_scatter.default"),
        (_select_scatter, "select_scatter.default"),
        (_cat, "cat.default"),
        (_pad, "constant_pad_nd.default"),
        (_flip, "flip.default"),
        (_full, "full.default"),
        (_arange, "arange.start_step"),
        (_topk, "topk.default"),
        (_sort, "sort.default"),
        (_convolved, "convolution.default"),
        (_convolution_backward, "convolution_backward.default"),
        (_pooled, "max_pool2d_with_indices.default"),
        (_pool_backward, "max_pool2d_with_indices_backward.default"),
    ]
) | {
    "hal.random.keep_mask": _drawn(True),
    "hal.random.uniform": _drawn(False),
    "hal.random.normal": _drawn(False),
}
"""By the names of `hal.ops.OPS`."""
