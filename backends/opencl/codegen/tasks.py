"""Tasks as they are collected: what goes to memory, and the reductions, in the order in which they have to run.

Part of the lowering (`lowering`), and all that the rewrites of single ops see of it. It walks no graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from backends.opencl.codegen.emit import Buffer, Check, Launch, number
from backends.opencl.codegen.loops import Columns, Map, Reduce, Task, Traits, rows_first
from backends.opencl.codegen.values import Computed, Stored, Value, whole
from hal.ops.index_domains import IndexDomain, unproven_domains
from hal.program import Program

LIMIT = 48
"""An expression does not grow beyond this."""

CHEAP = 3
"""Up to this many cheap operations a value is computed again for every reader."""

Step = Task | Launch


class Tasks:
    """The tasks of one program so far: `steps`. `placed` are the nodes that are made where an output is, `done` the
    outputs that are made."""

    def __init__(self, program: Program, traits: Traits) -> None:
        self.program = program
        self.traits = traits
        self.steps: list[Step] = []
        self.output_of: dict[fx.Node, int] = {}
        self.done: set[int] = set()
        self.checked: list[IndexDomain] = []
        """What the checks in the kernels check, by their numbers."""
        self._unproven = unproven_domains(program)

    def check(self, node: fx.Node, dim: int) -> Check | None:
        """A new check of the index by which an op indexes a dimension, or None where the program proves it inside."""
        for domain in self._unproven.get(node, ()):
            if domain.dim == dim:
                self.checked.append(domain)
                return Check(len(self.checked) - 1, domain.low, domain.high)
        return None

    def buffer(self, count: int, dtype: torch.dtype) -> Buffer:
        """A new piece of the workspace."""
        return Buffer("workspace", 0, dtype, count)

    def realize(self, value: Value, target: Stored | None = None, output: int | None = None) -> Stored:
        """The value in memory."""
        if isinstance(value, Stored) and target is None:
            return value
        if target is None:
            target = whole(self.buffer(value.count, value.dtype), value.shape)
        if value.count:
            self.steps.append(Map(value, target, output))
        return target

    def reduce(self, kind: str, value: Value, dims: Sequence[int], node: fx.Node | None = None) -> Stored:
        """The value reduced over dimensions, which stay with extent 1."""
        shape = [1 if dim in dims else extent for dim, extent in enumerate(value.shape)]
        target, output = self.target_of(node, shape, value.dtype)
        if value.cost > LIMIT:
            value = self.realize(value)
        if not math.prod(shape):
            return target
        if not value.count:  # of nothing: what the reduction starts from
            start = Computed(tuple(shape), value.dtype, lambda scope, coordinates: number(kind == "prod", value.dtype))
            self.steps.append(Map(start, target, output))
            return target
        last = len(value.shape) - 1
        if last >= 0 and last not in dims and value.shape[last] >= 4 and dims:
            live = tuple(dim for dim in dims if value.shape[dim] > 1)
            if live:
                self.steps.append(Columns(kind, value, tuple(sorted(dims)), target, output))
                return target
        moved = rows_first(value, dims)
        self.steps.append(Reduce(kind, moved, len(value.shape) - len(dims), target, output))
        return target

    def target_of(self, node: fx.Node | None, shape: Sequence[int], dtype: torch.dtype) -> tuple[Stored, int | None]:
        """Where a node's own result goes: to the output that it alone is for, or to the workspace."""
        position = self.output_of.get(node) if node is not None else None
        if position is None:
            return whole(self.buffer(math.prod(shape), dtype), shape), None
        self.done.add(position)
        return whole(self.output(position), shape), position if self.program.outputs[position].accumulates else None

    def output(self, position: int) -> Buffer:
        """The memory of one of the program's outputs."""
        port = self.program.outputs[position]
        return Buffer("output", position, port.dtype, math.prod(port.shape))
