"""Rewrites of ops that move, slice, repeat and join elements without arithmetic.

Part of the core lowering (`relay.capture.core.lowering`). Each function takes the builder and the call, and returns the
node (or tuple of nodes) that replaces it, or None to leave the op as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from relay.capture.core.builder import Builder, constant_of, part_spec
from relay.capture.core.call import Call
from relay.capture.core.elementwise import as_number

aten = torch.ops.aten


def _as_it_is(_: Builder, call: Call) -> Any:
    return call.x


def _to_copy(builder: Builder, call: Call) -> Any:
    return builder.cast(call.x, call.wanted.dtype)


def _view(builder: Builder, call: Call) -> Any:
    return builder.view(call.x, call.wanted.shape)


def _permute(builder: Builder, call: Call) -> Any:
    return builder.permute(call.x, call.get("dims"))


def _transpose(builder: Builder, call: Call) -> Any:
    rank = len(call.spec.shape)
    order = list(range(rank))
    if call.target is aten.t.default:
        order.reverse()
    else:
        first, second = call.get("dim0") % rank, call.get("dim1") % rank
        order[first], order[second] = order[second], order[first]
    return builder.permute(call.x, order)


def _expand(builder: Builder, call: Call) -> Any:
    return builder.expand(call.x, call.wanted.shape)


def _squeeze(builder: Builder, call: Call) -> Any:
    rank = len(call.spec.shape)
    given = range(rank) if call.target is aten.squeeze.default else call.get("dim")
    dims = [dim % rank for dim in ([given] if isinstance(given, int) else given)]
    dims = sorted(dim for dim in dims if call.spec.shape[dim] == 1)
    if constant_of(call.x) is not None:
        return builder.view(call.x, call.wanted.shape)
    return builder.call(aten.squeeze.dims, call.x, dims) if dims else call.x


def _unsqueeze(builder: Builder, call: Call) -> Any:
    if constant_of(call.x) is not None:
        return builder.view(call.x, call.wanted.shape)
    return builder.call(aten.unsqueeze.default, call.x, call.get("dim") % (len(call.spec.shape) + 1))


def _select(builder: Builder, call: Call) -> Any:
    dim = call.dim()
    return builder.call(aten.select.int, call.x, dim, call.get("index") % call.spec.shape[dim])


def _bounds(call: Call) -> tuple[int, int, int, int]:
    dim = call.dim()
    start, end, step = slice(call.get("start"), call.get("end"), call.get("step")).indices(call.spec.shape[dim])
    return dim, start, max(start, end), step


def _slice(builder: Builder, call: Call) -> Any:
    return builder.slice(call.x, *_bounds(call))


def _slice_scatter(builder: Builder, call: Call) -> Any:
    return builder.call(aten.slice_scatter.default, call.x, call.args[1], *_bounds(call))


def _select_scatter(builder: Builder, call: Call) -> Any:
    dim = call.dim()
    index = call.get("index") % call.spec.shape[dim]
    return builder.call(aten.select_scatter.default, call.x, call.args[1], dim, index)


def _split(builder: Builder, call: Call) -> Any:
    dim, start, parts = call.dim(), 0, []
    for part in call.wanted:
        parts.append(builder.slice(call.x, dim, start, start + part.shape[dim]))
        start += part.shape[dim]
    return tuple(parts)


def _unbind(builder: Builder, call: Call) -> Any:
    return tuple(builder.call(aten.select.int, call.x, call.dim(), index) for index in range(len(call.wanted)))


def _repeat(builder: Builder, call: Call) -> Any:
    repeats = call.get("repeats")
    inner = [1] * (len(repeats) - len(call.spec.shape)) + list(call.spec.shape)
    pairs = list(zip(repeats, inner, strict=True))
    wide = builder.view(call.x, [extent for _, inside in pairs for extent in (1, inside)])
    return builder.view(builder.expand(wide, [extent for pair in pairs for extent in pair]), call.wanted.shape)


def _cat(builder: Builder, call: Call) -> Any:
    parts = [part for part in call.args[0] if part_spec(part).shape != (0,) or call.wanted.shape == (0,)]
    dim = int(call.get("dim")) % len(call.wanted.shape)
    return builder.call(aten.cat.default, [builder.cast(part, call.wanted.dtype) for part in parts], dim)


def _copy(builder: Builder, call: Call) -> Any:
    return builder.expand(builder.cast(call.args[1], call.wanted.dtype), call.wanted.shape)


def _pad(builder: Builder, call: Call) -> Any:
    value = as_number(call.get("value"), call.spec.dtype)
    return builder.call(call.target, call.x, list(call.get("pad")), value)


def _counted(builder: Builder, count: int, step: int = 1) -> fx.Node:
    return builder.call(aten.arange.start_step, 0, count * step, step, dtype=torch.int64)


def _unfold(builder: Builder, call: Call) -> Any:
    """Windows along a dimension, gathered by index. The window becomes the last dimension."""
    dim, size, step = call.get("dimension") % len(call.spec.shape), call.get("size"), call.get("step")
    count = (call.spec.shape[dim] - size) // step + 1
    starts = builder.view(_counted(builder, count, step), [count, 1])
    indices = builder.call(aten.add.Tensor, starts, _counted(builder, size))
    windows = builder.call(aten.index.Tensor, call.x, [*[None] * dim, indices])
    order = [other for other in range(len(call.wanted.shape)) if other != dim + 1]
    return builder.permute(windows, [*order, dim + 1])


def _diagonal_indices(builder: Builder, rank: int, offset: int, length: int) -> list[Any]:
    along = _counted(builder, length)
    moved = builder.call(aten.add.Scalar, along, abs(offset)) if offset else along
    return [*[None] * (rank - 2), *([along, moved] if offset >= 0 else [moved, along])]


def _diagonal(builder: Builder, call: Call) -> Any:
    rank = len(call.spec.shape)
    first, second = call.get("dim1") % rank, call.get("dim2") % rank
    last = builder.permute(call.x, [*(dim for dim in range(rank) if dim not in (first, second)), first, second])
    indices = _diagonal_indices(builder, rank, call.get("offset"), call.wanted.shape[-1])
    return builder.call(aten.index.Tensor, last, indices)


def _diagonal_scatter(builder: Builder, call: Call) -> Any:
    rank = len(call.spec.shape)
    first, second = call.get("dim1") % rank, call.get("dim2") % rank
    order = [*(dim for dim in range(rank) if dim not in (first, second)), first, second]
    source = call.args[1]
    indices = _diagonal_indices(builder, rank, call.get("offset"), part_spec(source).shape[-1])
    put = builder.call(aten.index_put.default, builder.permute(call.x, order), indices, source, False)
    return builder.permute(put, [order.index(dim) for dim in range(rank)])


VIEWS: dict[Any, Callable[[Builder, Call], Any]] = {
    aten.alias.default: _as_it_is,
    aten.clone.default: _as_it_is,
    aten.detach.default: _as_it_is,
    aten.lift_fresh_copy.default: _as_it_is,
    aten._to_copy.default: _to_copy,
    aten.copy.default: _copy,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.permute.default: _permute,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.expand.default: _expand,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.split_with_sizes.default: _split,
    aten.split.Tensor: _split,
    aten.unbind.int: _unbind,
    aten.repeat.default: _repeat,
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _pad,
    aten.unfold.default: _unfold,
    aten.diagonal.default: _diagonal,
    aten.diagonal_scatter.default: _diagonal_scatter,
}
