"""Kernels with a loop of their own: scatters, scans, orders, indices of extremes, random draws.

Scatters add without races and in one order: what is indexed is walked through by one work-item after another's
fashion, in sequence, and only dimensions that no index touches are done side by side. Sorting counts, for each
element, those that come before it; that is quadratic in the length and takes no scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from backends.opencl.codegen.emit import Buffer, Check, Launch, Scope, Writer, c_type, loaded, number, rounded, stored
from backends.opencl.codegen.indices import Index, linear, variable
from backends.opencl.codegen.loops import Traits
from backends.opencl.codegen.values import Coordinates, Stored, Value, expand
from hal.ops.rules import broadcast

COLUMNS = 64


def _grid(writer: Writer, extents: Sequence[int]) -> tuple[list[str], list[str], int]:
    """Loop variables of a flat work-item number `item`, the C that sets them, and how many items there are."""
    names = [writer.counter(extent, "g") for extent in extents]
    lines, rest = [], "item"
    for name, extent in reversed(list(zip(names, extents, strict=True))):
        lines.append(f"const INDEX {name} = {rest} % {extent};")
        rest = f"({rest} / {extent})"
    return names, ["const INDEX item = get_global_id(0);", *lines], math.prod(extents)


def _loops(writer: Writer, extents: Sequence[int]) -> tuple[list[str], list[str]]:
    names = [writer.counter(extent, "s") for extent in extents]
    return names, [f"for (INDEX {n} = 0; {n} < {e}; {n}++) {{" for n, e in zip(names, extents, strict=True)]


def _launch(writer: Writer, lines: Sequence[str], items: int, label: str) -> Launch:
    return writer.launch("\n".join(lines) + "\n", (items,), (), label)


def index_put(
    target: Stored,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool,
    traits: Traits,
    checks: Sequence[Check | None],
) -> Launch:
    """Write values at indices of memory that holds the first operand already. `checks` are those of `indices`."""
    used = [axis for axis, index in enumerate(indices) if index is not None]
    picked = broadcast(*[index.shape for index in indices if index is not None])
    free = [dim for dim in range(len(target.shape)) if dim not in used]
    front = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    remaining = [target.shape[dim] for dim in free]
    values = expand(values, (*remaining[:front], *picked, *remaining[front:]))
    writer = Writer()
    block = min(COLUMNS, remaining[-1]) if remaining and traits.lanes == 1 and front < len(remaining) else 1
    while remaining and remaining[-1] % block:
        block -= 1
    extents = [*remaining[:-1], remaining[-1] // block] if remaining else []
    names, lines, items = _grid(writer, extents)
    walk, loops = _loops(writer, picked)
    column = writer.counter(block, "c")
    own = [variable(name) for name in names]
    if own:
        own[-1] = linear([(names[-1], block), (column, 1)])
    seen: Coordinates = tuple(variable(name) for name in walk)
    coordinates: list[Index] = [Index()] * len(target.shape)
    outside = Scope(writer)
    for dim, index in enumerate(indices):
        if index is None:
            continue
        wide = expand(index, picked)
        extent = target.shape[dim]
        name = wide.at(outside, seen)
        coordinates[dim] = outside.pick(name, extent, checks[dim])
    for dim, coordinate in zip(free, own, strict=True):
        coordinates[dim] = coordinate
    inner = Scope(writer, outside)
    name = values.at(inner, (*own[:front], *seen, *own[front:]))
    _put(inner, target, coordinates, name, accumulate)
    lines += [*loops, *outside.lines, f"for (int {column} = 0; {column} < {block}; {column}++) {{", *inner.lines, "}"]
    lines.append("}" * len(loops))
    return _launch(writer, lines, items, "put")


def _put(scope: Scope, target: Stored, coordinates: Sequence[Index], name: str, accumulate: bool) -> None:
    pointer = scope.writer.pointer(target.buffer, writes=True)
    address = target.address(tuple(coordinates)).text
    dtype = target.dtype
    if accumulate:
        before = loaded(pointer, address, dtype)
        name = f"({before} | {name})" if dtype is torch.bool else f"({before} + {name})"
    scope.lines.append(stored(pointer, address, name, dtype))


def scatter(
    target: Stored, dim: int, index: Value, source: Value | Any, accumulate: bool, check: Check | None
) -> Launch:
    """Write elements at the indices `index` along a dimension of memory that holds the first operand already."""
    writer = Writer()
    scope = Scope(writer)
    shape = index.shape
    if not shape:
        name = source.at(scope, ()) if isinstance(source, Value) else number(source, target.dtype)
        _put(scope, target, (), name, accumulate)
        return _launch(writer, scope.lines, 1, "scatter")
    side = [extent for axis, extent in enumerate(shape) if axis != dim]
    names, lines, items = _grid(writer, side)
    walk, loops = _loops(writer, [shape[dim]])
    around = [variable(name) for name in names]
    seen: Coordinates = (*around[:dim], variable(walk[0]), *around[dim:])
    extent = target.shape[dim]
    taken = index.at(scope, seen)
    coordinates = list(seen)
    coordinates[dim] = scope.pick(taken, extent, check)
    name = source.at(scope, seen) if isinstance(source, Value) else number(source, target.dtype)
    _put(scope, target, coordinates, name, accumulate)
    return _launch(writer, [*lines, *loops, *scope.lines, "}"], items, "scatter")


def scan(kind: str, value: Value, dim: int, target: Stored) -> Launch:
    """cumsum or cumprod."""
    writer = Writer()
    scope = Scope(writer)
    shape = value.shape
    if not shape:
        scope.store(target.buffer, Index(), value.at(scope, ()))
        return _launch(writer, scope.lines, 1, "scan")
    names, lines, items = _grid(writer, [extent for axis, extent in enumerate(shape) if axis != dim])
    walk, loops = _loops(writer, [shape[dim]])
    around = [variable(name) for name in names]
    coordinates: Coordinates = (*around[:dim], variable(walk[0]), *around[dim:])
    name = value.at(scope, coordinates)
    register_type = c_type(value.dtype)
    sign = "+" if kind == "cumsum" else "*"
    if register_type == "float" and kind == "cumsum":
        # Kahan's compensated sum: what each addition loses is put into the next.
        scope.lines += [
            f"const float more = {name} - lost;",
            "const float next = total + more;",
            "lost = (next - total) - more;",
            "lost = lost == lost ? lost : 0;",
            "total = next;",
        ]
    else:
        scope.lines.append(f"total = total {sign} {name};")
    scope.store(target.buffer, target.address(coordinates), rounded("total", value.dtype))
    start = f"{register_type} total = {0 if kind == 'cumsum' else 1}; float lost = 0;"
    return _launch(writer, [*lines, start, *loops, *scope.lines, "}"], items, "scan")


def extreme_index(value: Value, dim: int, largest: bool, target: Stored) -> Launch:
    """argmax or argmin: the first of the extreme elements; a NaN counts as extreme. `target` keeps the dimension."""
    writer = Writer()
    scope = Scope(writer)
    shape = value.shape
    if not shape:
        scope.lines.append(f"{writer.pointer(target.buffer, writes=True)}[0] = 0;")
        return _launch(writer, scope.lines, 1, "place")
    names, lines, items = _grid(writer, [extent for axis, extent in enumerate(shape) if axis != dim])
    walk, loops = _loops(writer, [shape[dim]])
    around = [variable(name) for name in names]
    name = value.at(scope, (*around[:dim], variable(walk[0]), *around[dim:]))
    better = f"{name} {'>' if largest else '<'} best || ({name} != {name} && best == best) || {walk[0]} == 0"
    scope.lines.append(f"if ({better}) {{ best = {name}; where = {walk[0]}; }}")
    end = Scope(writer)
    end.store(target.buffer, target.address((*around[:dim], Index(), *around[dim:])), "where")
    start = f"{c_type(value.dtype)} best = 0; long where = 0;"
    return _launch(writer, [*lines, start, *loops, *scope.lines, "}", *end.lines], items, "place")


def order(value: Stored, dim: int, count: int, largest: bool, values: Stored, positions: Stored) -> Launch:
    """The first `count` elements in order along a dimension, and their positions; equal elements stay in order.

    NaN is the largest of all. `value` must lie in memory, for every element is read as often as the row is long.
    """
    writer = Writer()
    scope = Scope(writer)
    shape = value.shape
    names, lines, items = _grid(writer, shape)
    coordinates = [variable(name) for name in names]
    mine = scope.value(c_type(value.dtype), value.at(scope, tuple(coordinates)))
    walk, loops = _loops(writer, [shape[dim]] if shape else [])
    inner = Scope(writer, scope)
    lines += [*scope.lines, "INDEX rank = 0;", *loops]
    if shape:
        other = value.at(inner, (*coordinates[:dim], variable(walk[0]), *coordinates[dim + 1 :]))
        if value.dtype.is_floating_point:
            if largest:
                before = f"({other} > {mine} || ({other} != {other} && {mine} == {mine}))"
            else:
                before = f"({other} < {mine} || ({mine} != {mine} && {other} == {other}))"
            same = f"({other} == {mine} || ({other} != {other} && {mine} != {mine}))"
        else:
            before = f"({other} {'>' if largest else '<'} {mine})"
            same = f"({other} == {mine})"
        inner.lines.append(f"rank += {before} || ({same} && {walk[0]} < {names[dim]});")
        lines += [*inner.lines, "}"]
    writer.ranges.extents["rank"] = max(count, 1)
    end = Scope(writer)
    spot: Coordinates = (*coordinates[:dim], variable("rank"), *coordinates[dim + 1 :]) if shape else ()
    end.store(values.buffer, values.address(spot), mine)
    end.store(positions.buffer, positions.address(spot), names[dim] if shape else "0")
    lines += [f"if (rank < {max(count, 1 if not shape else count)}) {{", *end.lines, "}"]
    return _launch(writer, lines, items, "order")


def draw(kind: str, op: int, target: Buffer, threshold: int, traits: Traits) -> Launch:
    """Random numbers by `hal.random`'s definition: element i is word i % 4 of block i / 4."""
    writer = Writer()
    words = writer.words(op)
    pointer = writer.pointer(target, writes=True)
    blocks = -(-target.count // 4)
    chunk = 1 if traits.lanes > 1 else max(1, -(-blocks // (8 * traits.units)))
    lines = [
        f"const ulong first = get_global_id(0) * (ulong){chunk};",
        f"for (ulong block = first; block < {blocks} && block < first + {chunk}; block++) {{",
        f"const uint4 drawn = philox((uint)block, {words}_0, {words}_1, {words}_2, {words}_3, {words}_4);",
    ]
    if kind == "keep_mask":
        values = [f"((ulong)drawn.s{lane} >= {threshold}UL)" for lane in range(4)]
    elif kind == "uniform":
        values = [f"((float)(drawn.s{lane} >> 8) * 0x1p-24f)" for lane in range(4)]
    else:
        for pair in range(2):
            lines += [
                f"const float radius{pair} = sqrt(-2.0f * log((float)((drawn.s{2 * pair} >> 8) + 1) * 0x1p-24f));",
                f"const float turn{pair} = (float)(drawn.s{2 * pair + 1} >> 8) * 0x1p-23f;",
            ]
        values = [f"(radius{lane // 2} * {'sinpi' if lane % 2 else 'cospi'}(turn{lane // 2}))" for lane in range(4)]
    for lane, value in enumerate(values):
        guard = f"if (block * 4 + {lane} < {target.count}) " if target.count % 4 else ""
        lines.append(guard + stored(pointer, f"(block * 4 + {lane})", value, target.dtype))
    lines.append("}")
    group = (1,) if traits.lanes == 1 else ()
    return writer.launch("\n".join(lines) + "\n", (-(-blocks // chunk),), group, "draw")
