"""Gathers, scatters and moves of elements: reads at computed indices, or writes into a copy.

Functions as in `rewrites`. A gather is computed wherever its result is used; a scatter is a kernel of its own that
writes into a copy of its first operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from backends.opencl.codegen import scatters, values
from backends.opencl.codegen.emit import Check, Scope, number
from backends.opencl.codegen.indices import Index
from backends.opencl.codegen.tasks import Tasks
from backends.opencl.codegen.values import Computed, Coordinates, Stored, Value, again, whole
from hal.ops.rules import broadcast


def _picked(scope: Scope, index: Value, coordinates: Coordinates, extent: int, check: Check | None) -> Index:
    return scope.pick(index.at(scope, coordinates), extent, check)


def _embedding(tasks: Tasks, node: fx.Node, weight: Value, index: Value) -> Value:
    source = tasks.realize(weight)
    check = tasks.check(node, 0)

    def function(scope: Scope, coordinates: Coordinates) -> str:
        return source.at(scope, (_picked(scope, index, coordinates[:-1], source.shape[0], check), coordinates[-1]))

    return Computed((*index.shape, weight.shape[1]), weight.dtype, function, 2)


def _index(tasks: Tasks, node: fx.Node, x: Value, indices: Sequence[Value | None]) -> Value:
    source = tasks.realize(x)
    used = [axis for axis, index in enumerate(indices) if index is not None]
    picked = broadcast(*[index.shape for index in indices if index is not None])
    wide = [None if index is None else values.expand(index, picked) for index in indices]
    front = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    checks = {dim: tasks.check(node, dim) for dim in used}

    def function(scope: Scope, coordinates: Coordinates) -> str:
        seen = coordinates[front : front + len(picked)]
        rest = list(coordinates[:front] + coordinates[front + len(picked) :])
        spot = []
        for dim, extent in enumerate(source.shape):
            index = wide[dim] if dim < len(wide) else None
            spot.append(rest.pop(0) if index is None else _picked(scope, index, seen, extent, checks[dim]))
        return source.at(scope, tuple(spot))

    return Computed(tuple(node.meta["val"].shape), x.dtype, function, 2 * len(used))


def _gather(tasks: Tasks, node: fx.Node, x: Value, dim: int, index: Value) -> Value:
    if not index.shape:
        return x
    source = tasks.realize(x)
    check = tasks.check(node, dim)

    def function(scope: Scope, coordinates: Coordinates) -> str:
        spot = _picked(scope, index, coordinates, source.shape[dim], check)
        return source.at(scope, (*coordinates[:dim], spot, *coordinates[dim + 1 :]))

    return Computed(index.shape, x.dtype, function, 2)


def _copied(tasks: Tasks, x: Value) -> Stored:
    """A copy in new memory."""
    return tasks.realize(again(x))


def _index_put(
    tasks: Tasks, node: fx.Node, x: Value, indices: Sequence[Value | None], source: Value, accumulate: bool
) -> Value:
    target = _copied(tasks, x)
    if source.count and target.count:
        checks = [tasks.check(node, dim) for dim in range(len(indices))]
        tasks.steps.append(scatters.index_put(target, indices, source, accumulate, tasks.traits, checks))
    return target


def _scatter(accumulate: bool) -> Callable[..., Value]:
    def function(tasks: Tasks, node: fx.Node, x: Value, dim: int, index: Value, source: Any) -> Value:
        target = _copied(tasks, x)
        if index.count and target.count:
            tasks.steps.append(scatters.scatter(target, dim, index, source, accumulate, tasks.check(node, dim)))
        return target

    return function


def _slice_scatter(
    tasks: Tasks, node: fx.Node, x: Value, source: Value, dim: int, start: int, end: int, step: int
) -> Value:
    target = _copied(tasks, x)
    part = values.sliced(target, dim, start, end, step)
    assert isinstance(part, Stored)
    tasks.realize(again(source), part)
    return target


def _select_scatter(tasks: Tasks, node: fx.Node, x: Value, source: Value, dim: int, index: int) -> Value:
    target = _copied(tasks, x)
    part = values.select(target, dim, index)
    assert isinstance(part, Stored)
    tasks.realize(again(source), part)
    return target


def _cat(tasks: Tasks, node: fx.Node, tensors: Sequence[Value], dim: int) -> Value:
    shape = tuple(node.meta["val"].shape)
    target = whole(tasks.buffer(math.prod(shape), tensors[0].dtype), shape)
    start = 0
    for tensor in tensors:
        end = start + tensor.shape[dim]
        part = values.sliced(target, dim, start, end, 1)
        assert isinstance(part, Stored)
        tasks.realize(again(tensor), part)
        start = end
    return target


def _pad(tasks: Tasks, node: fx.Node, x: Value, pads: Sequence[int], fill: Any) -> Value:
    """`pads` are (before, after) from the last dimension on; below zero they cut."""
    shape = tuple(node.meta["val"].shape)
    constant = Computed(shape, x.dtype, lambda scope, coordinates: number(fill, x.dtype))
    target = tasks.realize(constant)
    part: Value = target
    for pair in range(len(pads) // 2):
        dim = len(shape) - 1 - pair
        before, after = pads[2 * pair], pads[2 * pair + 1]
        x = values.sliced(x, dim, max(0, -before), x.shape[dim] + min(0, after), 1)
        part = values.sliced(part, dim, max(0, before), shape[dim] - max(0, after), 1)
    assert isinstance(part, Stored)
    tasks.realize(again(x), part)
    return target


INDEXING: dict[str, Callable[..., Any]] = {
    "embedding.default": _embedding,
    "index.Tensor": _index,
    "gather.default": _gather,
    "index_put.default": _index_put,
    "scatter.src": _scatter(False),
    "scatter.value": _scatter(False),
    "scatter_add.default": _scatter(True),
    "slice_scatter.default": _slice_scatter,
    "select_scatter.default": _select_scatter,
    "cat.default": _cat,
    "constant_pad_nd.default": _pad,
}
"""By the names of `hal.ops.OPS` without `aten.`."""
