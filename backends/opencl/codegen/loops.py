"""Loops over rows and over columns: how element-wise chains and reductions become one kernel.

A row kernel runs over `rows` x `inner` elements. All its tasks have that many elements, or one a row. A row is done
by one work-item (of a CPU) or one work-group (of a GPU) in as many passes as its reductions need: softmax and
layer norm are such kernels, and so are their gradients. A column kernel sums over leading dimensions, a block of
columns at a time. Neither decides what is fused: `plan` tries, and `NotFusable` is raised where it cannot be done.

Invariant: a work-item reads of what its kernel wrote only elements of its own row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from backends.opencl.codegen.accumulators import START, accumulator, combined, given_out, taken_in
from backends.opencl.codegen.emit import Buffer, Launch, Scope, Writer, c_type
from backends.opencl.codegen.indices import Index, Split, flatten, linear, strides_of, variable
from backends.opencl.codegen.values import Coordinates, Stored, Value, permute, unflatten


class NotFusable(Exception):
    """These tasks cannot share a kernel."""


class _NextPass(Exception):
    """What is read exists only when the open pass is over."""


@dataclass(frozen=True)
class Traits:
    """What the generator wants to know of a device."""

    units: int
    """Compute units."""
    lanes: int
    """Work-items that share a row: 1 on CPUs, whose compilers vectorise the loop over the row."""
    wide: int = 16
    """Floats in a vector register, for the matrix product of CPUs."""
    double: bool = True


@dataclass(frozen=True, eq=False)
class Map:
    """Every element of a value into memory. `output`: the program's output that it is, which may accumulate."""

    value: Value
    target: Stored
    output: int | None = None


@dataclass(frozen=True, eq=False)
class Reduce:
    """A reduction over the last `inner` dimensions of a value (the first `remaining` dimensions stay)."""

    kind: str
    """sum, prod, max, min or any."""
    value: Value
    remaining: int
    target: Stored
    output: int | None = None


@dataclass(frozen=True, eq=False)
class Columns:
    """A reduction over some dimensions of a value, its last dimension not among them."""

    kind: str
    value: Value
    dims: tuple[int, ...]
    target: Stored
    output: int | None = None


Task = Map | Reduce | Columns
Space = tuple[tuple[int, ...], tuple[int, ...]]
"""Extents of the loops over rows, and of those inside a row."""

ROW_GOAL = 64
LONG_ROW = 4096
BLOCK = 64


def space_of(task: Map | Reduce, traits: Traits) -> Space:
    """The loops that suit a task by itself."""
    shape = task.value.shape
    if isinstance(task, Reduce):
        return shape[: task.remaining], shape[task.remaining :]
    inner: list[int] = []
    outer = list(shape)
    while outer and math.prod(inner) < ROW_GOAL:
        inner.insert(0, outer.pop())
    if math.prod(outer) < 4 * traits.units and inner and inner[0] > 1:
        first = inner[0]
        rest = math.prod(inner[1:])
        for parts in range(2, first + 1):
            if first % parts == 0 and (first // parts) * rest <= LONG_ROW and parts >= 4 * traits.units:
                outer.append(parts)
                inner[0] = first // parts
                break
    return tuple(outer), tuple(inner)


class _Rows:
    """One attempt at a row kernel over given loops."""

    def __init__(self, outer: Sequence[int], inner: Sequence[int], traits: Traits, skipped: frozenset[Buffer]) -> None:
        self.traits = traits
        self.skipped = skipped
        self.writer = Writer()
        self.outer = [self.writer.loop(extent, "r") for extent in outer]
        self.inner = [self.writer.loop(extent, "i") for extent in inner]
        self.outer_extents, self.inner_extents = tuple(outer), tuple(inner)
        self.rows, self.width = math.prod(outer), math.prod(inner)
        names = [*self.outer, *self.inner]
        self.flat = linear(zip(names, strides_of([*outer, *inner]), strict=True))
        self.row = linear(zip(self.outer, strides_of(outer), strict=True))
        self.body: list[str] = []
        self.row_scope = self._scope(None)
        self.open: Scope | None = None
        self.before: list[str] = []  # accumulators of the open pass
        self.after: list[Callable[[], None]] = []
        self.pending: set[Buffer] = set()  # reductions that the open pass makes
        self.scalars: dict[Buffer, str] = {}
        self.elements: dict[Buffer, tuple[Index | None, str, Scope]] = {}
        self.reloaded: set[Buffer] = set()

    def _scope(self, outer: Scope | None) -> Scope:
        scope = Scope(self.writer, outer)
        scope.notes["load"] = self._load
        return scope

    def _load(self, scope: Scope, buffer: Buffer, address: Index) -> str:
        if buffer in self.pending:
            raise _NextPass
        if buffer in self.scalars:
            if address != self.row:
                raise NotFusable
            return self.scalars[buffer]
        if buffer in self.elements:
            written, name, where = self.elements[buffer]
            if scope is self.row_scope or written is None:
                raise NotFusable
            if where is self.open:
                if address == written:
                    return name
                raise _NextPass
            self._require_own_row(address)
            self.reloaded.add(buffer)
        return scope.load(buffer, address)

    def _require_own_row(self, address: Index) -> None:
        inside = linear([(name, value) for name, value in address.terms if name not in self.outer], address.constant)
        known = all(name in self.inner for name, _ in inside.terms)
        if not known or address.only(self.outer) != self.flat.only(self.outer):
            raise NotFusable
        low, high = self.writer.ranges.bounds(inside)
        if low < 0 or high >= self.width:
            raise NotFusable

    def add(self, task: Map | Reduce) -> None:
        """Generate a task into the open pass, or into a new one."""
        if task.target.buffer in self.elements or task.target.buffer in self.scalars:
            raise NotFusable
        if isinstance(task, Map) and task.value.count == self.rows and self.width > 1:
            self.close()
            self._row_map(task)
            return
        for _ in range(2):
            if self.open is None:
                self.open = self._scope(self.row_scope)
            try:
                if isinstance(task, Map):
                    self._map(task, self.open)
                else:
                    self._reduce(task, self.open)
                return
            except _NextPass:
                self.close()  # what was written for nothing, the compiler drops
        raise NotFusable

    def _row_map(self, task: Map) -> None:
        name = task.value.at(self.row_scope, unflatten(self.row_scope, self.row, task.value.shape))
        self.scalars[task.target.buffer] = name
        self._store_scalar(task, name, unflatten(self.row_scope, self.row, task.target.shape))

    def _store_scalar(self, task: Task, name: str, coordinates: Coordinates) -> None:
        if task.target.buffer in self.skipped:
            return
        scope = self._scope(None)
        scope.store(task.target.buffer, task.target.address(coordinates), name, task.output)
        lines = " ".join(scope.lines)
        self.row_scope.lines.append(f"if (lane == 0) {{ {lines} }}" if self.traits.lanes > 1 else lines)

    def _map(self, task: Map, scope: Scope) -> None:
        coordinates = unflatten(scope, self.flat, task.value.shape)
        name = task.value.at(scope, coordinates)
        address = task.target.address(coordinates)
        if task.target.buffer not in self.skipped:
            scope.store(task.target.buffer, address, name, task.output)
        # Only what lies as the loops run can be read again.
        self.elements[task.target.buffer] = (address if address == self.flat else None, name, scope)

    def _reduce(self, task: Reduce, scope: Scope) -> None:
        dtype = task.value.dtype
        name = task.value.at(scope, unflatten(scope, self.flat, task.value.shape))
        total = self.writer.name("a")
        kind = accumulator(task.kind, dtype)
        taken = scope.value(kind, taken_in(task.kind, dtype, name)) if kind != c_type(dtype) else name
        scope.lines.append(combined(task.kind, dtype, total, taken))
        self.before.append(f"{kind} {total} = {START[task.kind](dtype)};")
        self.pending.add(task.target.buffer)

        def finish() -> None:
            if self.traits.lanes > 1:
                self.row_scope.lines.append(self._shared(task.kind, dtype, kind, total))
            result = self.row_scope.value(c_type(dtype), given_out(task.kind, dtype, total))
            self.scalars[task.target.buffer] = result
            self._store_scalar(task, result, unflatten(self.row_scope, self.row, task.target.shape))

        self.after.append(finish)

    def _shared(self, kind: str, dtype: torch.dtype, c_type: str, total: str) -> str:
        """Bring the accumulators of a work-group together, the same for all of it and in the same order each time."""
        lanes = self.traits.lanes
        shared = f"shared_{c_type}"
        combine = combined(kind, dtype, f"{shared}[lane]", f"{shared}[lane + half_]")
        return (
            f"{shared}[lane] = {total}; barrier(CLK_LOCAL_MEM_FENCE);"
            f" for (int half_ = {lanes // 2}; half_ > 0; half_ >>= 1) {{"
            f" if (lane < half_) {{ {combine} }} barrier(CLK_LOCAL_MEM_FENCE); }}"
            f" {total} = {shared}[0]; barrier(CLK_LOCAL_MEM_FENCE);"
        )

    def close(self) -> None:
        """End the open pass."""
        if self.open is None:
            return
        self.body += self.row_scope.lines
        self.row_scope.lines.clear()
        self.body += self.before
        last = len(self.inner) - 1
        for position, (name, extent) in enumerate(zip(self.inner, self.inner_extents, strict=True)):
            lanes = self.traits.lanes
            start, step = ("lane", f"{name} += {lanes}") if position == last and lanes > 1 else ("0", f"{name}++")
            self.body.append(f"for (INDEX {name} = {start}; {name} < {extent}; {step}) {{")
        if not self.inner and self.traits.lanes > 1:
            self.body.append("if (lane == 0) {")
        self.body += self.open.lines
        self.body.append("}" * (len(self.inner) or int(self.traits.lanes > 1)))
        if self.traits.lanes > 1:
            self.body.append("barrier(CLK_GLOBAL_MEM_FENCE);")
        self.open = None
        self.pending.clear()
        self.before.clear()
        finishers, self.after = self.after, []
        for finish in finishers:
            finish()

    def launch(self) -> Launch:
        """The kernel."""
        self.close()
        self.body += self.row_scope.lines
        lines = []
        rest = "row"
        for name, extent in reversed(list(zip(self.outer, self.outer_extents, strict=True))):
            lines.append(f"const INDEX {name} = {rest} % {extent};")
            rest = f"({rest} / {extent})"
        lanes = self.traits.lanes
        text = "\n".join([*lines, *self.body])
        if lanes > 1:
            shared = "".join(
                f"__local {kind} shared_{kind}[{lanes}];\n"
                for kind in ("float", "double", "int", "long", "short", "char", "uchar")
                if f"shared_{kind}[" in text
            )
            start = f"{shared}const INDEX lane = get_local_id(0);\nconst INDEX row = get_group_id(0);\n"
            return self.writer.launch(f"{start}{text}\n", (self.rows * lanes,), (lanes,), "rows")
        chunk = max(1, -(-self.rows // (self.traits.units * 8)))
        head = (
            f"for (INDEX row = get_global_id(0) * {chunk}; row < {self.rows} && row < (get_global_id(0) + 1) * {chunk}"
        )
        count = -(-self.rows // chunk)
        return self.writer.launch(f"{head}; row++) {{\n{text}\n}}\n", (count,), (1,), "rows")


def row_kernel(
    tasks: Sequence[Map | Reduce], space: Space, traits: Traits, skipped: frozenset[Buffer] = frozenset()
) -> tuple[Launch, set[Buffer]]:
    """One kernel for the tasks, and which of the buffers it writes it must read again.

    `skipped` are targets that are not read outside. Raises NotFusable.
    """
    outer, inner = list(space[0]), list(space[1])
    for _ in range(12):
        attempt = _Rows(outer, inner, traits, skipped)
        try:
            for task in tasks:
                attempt.add(task)
            return attempt.launch(), attempt.reloaded
        except Split as split:
            for names, extents in ((attempt.outer, outer), (attempt.inner, inner)):
                if split.name in names:
                    position = names.index(split.name)
                    extents[position : position + 1] = [extents[position] // split.inner, split.inner]
    attempt = _Rows(outer, inner, traits, skipped)
    attempt.writer.ranges.loops.clear()
    for task in tasks:
        attempt.add(task)
    return attempt.launch(), attempt.reloaded


def column_kernel(tasks: Sequence[Columns], traits: Traits) -> Launch:
    """One kernel for reductions of values of one shape over the same leading dimensions."""
    first = tasks[0]
    shape, dims = first.value.shape, first.dims
    remaining = [dim for dim in range(len(shape)) if dim not in dims]
    columns = shape[-1]
    block = 1 if traits.lanes > 1 else min(BLOCK, columns)
    blocks = -(-columns // block)
    writer = Writer()
    scope = Scope(writer)
    names = {dim: writer.counter(extent, "k") for dim, extent in enumerate(shape[:-1])}
    which, inside = writer.counter(blocks, "b"), writer.counter(block, "c")
    coordinates = [variable(names[dim]) for dim in range(len(shape) - 1)]
    coordinates.append(linear([(which, block), (inside, 1)]))
    lines, rest = [], "item"
    for name, extent in [(which, blocks), *[(names[dim], shape[dim]) for dim in reversed(remaining[:-1])]]:
        lines.append(f"const INDEX {name} = {rest} % {extent};")
        rest = f"({rest} / {extent})"
    count = str(block) if columns % block == 0 else f"min({block}, {columns} - {which} * {block})"
    lines.append(f"const INDEX count = {count};")
    ends: list[str] = []
    for task in tasks:
        dtype = task.value.dtype
        total = writer.name("a")
        kind = accumulator(task.kind, dtype)
        lines.append(f"{kind} {total}[{block}];")
        lines.append(f"for (int c = 0; c < {block}; c++) {total}[c] = {START[task.kind](dtype)};")
        taken = taken_in(task.kind, dtype, task.value.at(scope, tuple(coordinates)))
        if kind != c_type(dtype):
            taken = scope.value(kind, taken)
        scope.lines.append(combined(task.kind, dtype, f"{total}[{inside}]", taken))
        store = Scope(writer)
        flat = flatten([coordinates[dim] for dim in remaining], [shape[dim] for dim in remaining])
        where = task.target.address(unflatten(store, flat, task.target.shape))
        store.store(task.target.buffer, where, given_out(task.kind, dtype, f"{total}[{inside}]"), task.output)
        ends += store.lines
    loop = f"for (int {inside} = 0; {inside} < count; {inside}++) {{"
    for dim in dims:
        lines.append(f"for (INDEX {names[dim]} = 0; {names[dim]} < {shape[dim]}; {names[dim]}++) {{")
    lines += [loop, *scope.lines, "}", "}" * len(dims), loop, *ends, "}"]
    items = blocks * math.prod(shape[dim] for dim in remaining[:-1])
    start = "const INDEX item = get_global_id(0);\n"
    return writer.launch(start + "\n".join(lines) + "\n", (items,), (1,) if traits.lanes == 1 else (), "columns")


def rows_first(value: Value, dims: Sequence[int]) -> Value:
    """The value with the dimensions to be reduced last."""
    order = [dim for dim in range(len(value.shape)) if dim not in dims] + sorted(dims)
    return value if order == list(range(len(order))) else permute(value, order)
