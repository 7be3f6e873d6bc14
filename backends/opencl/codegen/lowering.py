"""From a core program to tasks: what is computed where it is used, what goes to memory, and in which order.

Views and element-wise ops are never tasks of their own: they are computed in the tasks that read them. A value goes to
memory where it is read several times and is not cheap, where a reduction, a product or a scatter makes it, or where it
is an output. Which tasks share a kernel is decided in `plan`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from backends.opencl.codegen import scatters, values
from backends.opencl.codegen.elementwise import elementwise
from backends.opencl.codegen.emit import Buffer
from backends.opencl.codegen.loops import Traits
from backends.opencl.codegen.rewrites import FUNCTIONS
from backends.opencl.codegen.tasks import CHEAP, LIMIT, Tasks
from backends.opencl.codegen.values import Computed, Stored, Value, again, whole
from hal.ops import OPS, Kind, name_of
from hal.program import Program, Role
from hal.random import keep_threshold


class Lowering(Tasks):
    """The tasks of one program, in order."""

    def __init__(self, program: Program, traits: Traits) -> None:
        super().__init__(program, traits)
        self._values: dict[fx.Node, Any] = {}
        self._uses: dict[fx.Node, int] = {}
        self._late: list[tuple[int, Value]] = []
        self._run()

    def _run(self) -> None:
        nodes = list(self.program.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        results = nodes[-1].args[0]
        self._choose_outputs(results)
        for node in nodes:
            self._uses[node] = sum(_reads(user, node) for user in node.users)
        for position, (node, port) in enumerate(zip(placeholders, self.program.inputs, strict=False)):
            buffer = Buffer("input", position, port.dtype, math.prod(port.shape))
            self._values[node] = whole(buffer, port.shape)
        for node in nodes:
            if node.op == "get_attr":
                data = self.program.constants[node.target]
                buffer = Buffer("constant", 0, data.dtype, data.numel(), name=node.target)
                self._values[node] = whole(buffer, data.shape)
            elif node.op == "call_function":
                value = self._call(node)
                if isinstance(value, Computed) and self._worth_memory(node, value):
                    value = self.realize(value)
                self._values[node] = value
                for position, result in enumerate(results):
                    if result is node and position not in self.done:
                        self._give(position, value)
        for position, result in enumerate(results):
            if result.op != "call_function":
                self._give(position, self._values[result])
        # Of values that replace an input in place: all are computed before any is written.
        ready = [(position, self.realize(self._own(value))) for position, value in self._late]
        self.barrier = len(self.steps)
        for position, value in ready:
            self.realize(again(value), whole(self.output(position), value.shape), self._adds(position))

    def _adds(self, position: int) -> int | None:
        return position if self.program.outputs[position].accumulates else None

    def _own(self, value: Value) -> Value:
        if isinstance(value, Stored) and value.buffer.kind != "workspace":
            return again(value)
        return value

    def _give(self, position: int, value: Value) -> None:
        port = self.program.outputs[position]
        self.done.add(position)
        if port.role is Role.BUFFER_UPDATE:
            self._late.append((position, values.view(value, port.shape)))
            return
        self.realize(
            again(values.view(value, port.shape)), whole(self.output(position), port.shape), self._adds(position)
        )

    def _choose_outputs(self, results: Sequence[fx.Node]) -> None:
        """Find the nodes that are one output and nothing else: they are written to its memory."""
        for position, node in enumerate(results):
            port = self.program.outputs[position]
            if port.role is Role.BUFFER_UPDATE or results.count(node) > 1:
                continue
            while node.op == "call_function" and len(node.users) == 1:
                kind = _kind(node)
                if kind in (Kind.REDUCTION, Kind.MATMUL):
                    self.output_of[node] = position
                    break
                if not (kind is Kind.VIEW and name_of(node.target) in _RESHAPES):
                    break
                node = node.args[0]  # type: ignore[assignment]  # what is viewed is a node

    def _worth_memory(self, node: fx.Node, value: Computed) -> bool:
        uses = self._uses[node]
        return value.cost > LIMIT or (uses > 1 and value.cost > CHEAP)

    def _call(self, node: fx.Node) -> Any:
        args: Any = fx.node.map_aggregate(
            node.args, lambda item: self._values.get(item) if isinstance(item, fx.Node) else item
        )
        if node.target is operator.getitem:
            return args[0][args[1]]
        name = name_of(node.target)
        row = OPS[name]
        short = name.removeprefix("aten.").partition(".")[0]
        if row.kind is Kind.ELEMENTWISE:
            return elementwise(short, args, dict(node.kwargs), node.meta["val"].dtype)
        if row.kind is Kind.RANDOM:
            return self._draw(name.rpartition(".")[2], node.args)
        function: Callable[..., Any] = FUNCTIONS[name.removeprefix("aten.")]
        return function(self, node, *args)

    def _draw(self, kind: str, args: Sequence[Any]) -> Value:
        number_, shape = args[1], tuple(args[2])
        target = self.buffer(math.prod(shape), torch.bool if kind == "keep_mask" else torch.float32)
        if target.count:
            threshold = keep_threshold(args[3]) if kind == "keep_mask" else 0
            self.steps.append(scatters.draw(kind, number_, target, threshold, self.traits))
        return whole(target, shape)


_RESHAPES = {"aten.view.default", "aten.squeeze.dims", "aten.unsqueeze.default"}


def _kind(node: fx.Node) -> Kind | None:
    if node.op != "call_function" or node.target is operator.getitem:
        return None
    return OPS[name_of(node.target)].kind


def _reads(user: fx.Node, node: fx.Node) -> int:
    """How often a reader uses each element: softmax and layer norm pass over it three times."""
    if _kind(user) is Kind.NORMALISATION:
        return 3
    if user.op == "output":
        return 1
    return max(1, len([arg for arg in user.all_input_nodes if arg is node]))
