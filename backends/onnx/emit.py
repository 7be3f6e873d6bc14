"""From a core program to an ONNX model, op by op, by hand.

`emit` walks the graph once. It rounds where a result is half precision and wraps where it is a small integer, leaves
out expansions that broadcasting does, gives transposed operands to Gemm as such, binds reshaped inputs and outputs to
the same memory rather than copying, and adds what an accumulating output holds. Everything else about speed is ONNX
Runtime's. Random ops become inputs, which the host draws.

Invariant: an output with the role BUFFER_UPDATE is never bound to the memory that it replaces, since ONNX Runtime
may write it before that memory's last read; the session copies it after the run (`Emitted.late`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from backends.onnx import elementwise, indexing, reductions, windows
from backends.onnx.model import Bound, Draw, Model, Value, compute_dtype
from hal.ops import OPS, Kind, Spec, name_of, spec_of
from hal.ops.index_domains import IndexDomain, unproven_domains
from hal.program import Program, Role


@functools.cache
def functions() -> dict[str, Callable[..., Any]]:
    """Every op that has an emission, by the names of `hal.ops.OPS`."""
    return {**elementwise.functions(), **reductions.functions(), **indexing.functions(), **windows.functions()}


@dataclass(frozen=True)
class Emitted:
    """A model (onnx.ModelProto) and what to bind it to. `late` are the positions of outputs to be copied after a run.

    `ops` is the op of the table that a node of the program calls, by the node's name. `domains` belong to the indices
    whose least and largest values are in the model's last output, `INDEX_BOUNDS`, in pairs.
    """

    proto: Any
    inputs: tuple[Bound, ...]
    previous_outputs: tuple[Bound, ...]
    draws: tuple[Draw, ...]
    outputs: tuple[Bound, ...]
    late: frozenset[int]
    ops: dict[str, tuple[str, str]]
    domains: tuple[IndexDomain, ...] = ()


def emit(program: Program, accumulate: tuple[bool, ...] = (), checks_indices: bool = True) -> Emitted:
    """The model of a program whose outputs are accumulated in that pattern. The program must have passed `check`.

    With `checks_indices` the model moves indices into their domains, and returns their bounds (`Emitted.domains`).
    """
    return _Emitter(program, accumulate, checks_indices).emitted()


def emitted_of(
    model: Model,
    late: frozenset[int] = frozenset(),
    ops: dict[str, tuple[str, str]] | None = None,
    domains: tuple[IndexDomain, ...] = (),
) -> Emitted:
    """A finished model and what to bind it to."""
    proto = model.finish()  # it drops inputs that nothing needs, so it comes first
    bound = (tuple(model.inputs), tuple(model.previous_outputs), tuple(model.draws), tuple(model.outputs))
    return Emitted(proto, *bound, late, ops or {}, domains)


_ROUNDED = {
    Kind.ELEMENTWISE,
    Kind.REDUCTION,
    Kind.SCAN,
    Kind.NORMALISATION,
    Kind.MATMUL,
    Kind.SCATTER,
    Kind.WINDOW,
    Kind.RANDOM,
    Kind.CREATE,
}
"""Kinds of op whose results may lie beyond what their dtype can hold."""

_RESHAPES = ("aten.view.default", "aten.squeeze.dims", "aten.unsqueeze.default")


class _Emitter:
    def __init__(self, program: Program, accumulate: tuple[bool, ...], checks_indices: bool) -> None:
        self.program = program
        self.accumulate = accumulate or (False,) * len(program.outputs)
        self.model = Model(program.name)
        self.values: dict[fx.Node, Any] = {}
        self.ports: dict[fx.Node, int] = {}
        self.ops: dict[str, tuple[str, str]] = {}
        self.domains = unproven_domains(program) if checks_indices else {}
        self.bounds: list[str] = []

    def emitted(self) -> Emitted:
        nodes = list(self.program.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self.ports = {node: port for port, node in enumerate(placeholders[: len(self.program.inputs)])}
        for node in nodes:
            self.model.asking = node.name
            if node.op == "get_attr":
                self.values[node] = self._constant(node)
            elif node.op == "placeholder" and node in self.ports:
                self.values[node] = self._loaded(node, spec_of(node.meta["val"]))
            elif node.op == "call_function":
                self.values[node] = self._called(node)
        results = nodes[-1].args[0]
        for position, node in enumerate(results):
            self._store(position, node)
        late = {position for position, port in enumerate(self.program.outputs) if port.role is Role.BUFFER_UPDATE}
        checked = tuple(domain for domains in self.domains.values() for domain in domains)
        if checked:
            self.model.return_index_bounds(self.bounds)
        return emitted_of(self.model, frozenset(late), self.ops, checked)

    # -- values

    def _constant(self, node: fx.Node) -> Value:
        tensor = self.program.constants[str(node.target)].detach()
        dtype = compute_dtype(tensor.dtype)
        return Value(self.model.constant(tensor.to(dtype).contiguous().numpy()), tuple(tensor.shape), dtype)

    def _loaded(self, node: fx.Node, spec: Spec) -> Value:
        """An input in the shape of `spec`, in its dtype inside the model. Unused inputs are removed at the end."""
        name = self.model.bind_input(self.ports[node], spec.shape, spec.dtype)
        dtype = compute_dtype(spec.dtype)
        return Value(name if dtype is spec.dtype else self.model.cast(name, dtype), spec.shape, dtype)

    def _called(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        name = name_of(node.target)
        spec = spec_of(node.meta["val"])
        specs = (spec,) if isinstance(spec, Spec) else spec
        self.ops[node.name] = (name, ", ".join(str(result.dtype).removeprefix("torch.") for result in specs if result))
        if OPS[name].kind is Kind.RANDOM:
            results = [self._drawn(node, spec)]
        elif name in _RESHAPES and node.args[0] in self.ports:
            return self._loaded(node.args[0], spec)  # type: ignore[arg-type]  # a port is a node
        elif name in ("aten.mm.default", "aten.addmm.default") and spec.dtype.is_floating_point:
            results = [self._product(node)]
        elif name in ("aten.expand.default", "aten.full.default") and self._broadcasts(node):
            source = self._argument(node.args[0]) if name == "aten.expand.default" else None
            alone = self.model.number(node.args[1], compute_dtype(spec.dtype)) if source is None else source.name
            return self._rounded(Value(alone, spec.shape, compute_dtype(spec.dtype)), spec, name)
        else:
            inside = {domain.index: self._inside(domain) for domain in self.domains.get(node, ())}
            args, kwargs = fx.node.map_aggregate(
                (node.args, node.kwargs),
                lambda item: inside[item] if isinstance(item, fx.Node) and item in inside else self._argument(item),
            )
            found = functions()[name](self.model, *args, **kwargs)
            results = [found] if isinstance(found, str) else found
        values = [
            None if result is None else self._rounded(Value(result, part.shape, compute_dtype(part.dtype)), part, name)
            for result, part in zip(results, specs, strict=True)
        ]
        return values[0] if isinstance(spec, Spec) else values

    def _argument(self, argument: Any) -> Any:
        return self.values[argument] if isinstance(argument, fx.Node) else argument

    def _inside(self, domain: IndexDomain) -> Value:
        """An index moved into its domain. Its bounds are returned, so that the session raises an error."""
        index: Value = self.values[domain.index]
        self.bounds += [self.model.call(op, index, keepdims=0) for op in ("ReduceMin", "ReduceMax")]
        ends = (self.model.number(end, torch.int64) for end in (domain.low, domain.high))
        return index._replace(name=self.model.call("Clip", index, *ends))

    def _rounded(self, value: Value, spec: Spec, op: str) -> Value:
        """The value rounded to the dtype of `spec`."""
        if value.dtype is spec.dtype or OPS[op].kind not in _ROUNDED:
            return value
        return value._replace(name=self.model.cast(self.model.cast(value, spec.dtype), value.dtype))

    def _drawn(self, node: fx.Node, spec: Spec) -> str:
        return self.model.draw(node.target, tuple(node.args[1:]), spec.shape, spec.dtype)

    def _broadcasts(self, node: fx.Node) -> bool:
        """Whether all who read a node's result broadcast, with another operand of the whole shape beside it."""
        for user in node.users:
            if user.op != "call_function" or user.target is operator.getitem:
                return False
            if OPS[name_of(user.target)].kind is not Kind.ELEMENTWISE:
                return False
            shape = spec_of(user.meta["val"]).shape
            others = [other for other in user.all_input_nodes if other is not node and not _stretched(other)]
            if not any(spec_of(other.meta["val"]).shape == shape for other in others):
                return False
        return True

    def _product(self, node: fx.Node, beside: str | None = None) -> str:
        """A product of matrices by Gemm, which takes operands transposed; `beside` is added, or addmm's bias is."""
        *bias, left, right = node.args
        operands, flags = [], {}
        for flag, operand in (("transA", left), ("transB", right)):
            assert isinstance(operand, fx.Node)
            turned = operand.op == "call_function" and name_of(operand.target) == "aten.permute.default"
            if turned and list(operand.args[1]) == [1, 0]:  # type: ignore[arg-type]
                flags[flag] = 1
                operand = operand.args[0]
            operands.append(self._argument(operand))
        added = beside if beside is not None else self._argument(bias[0]) if bias else None
        if added is None:
            if flags:
                return self.model.call("Gemm", *operands, **flags)
            return self.model.call("MatMul", *operands)
        return self.model.call("Gemm", *operands, added, **flags)

    # -- outputs

    def _store(self, position: int, node: fx.Node) -> None:
        """Bind an output, in the shape that its value has before it is only reshaped."""
        port = self.program.outputs[position]
        model = self.model
        model.asking = node.name
        source = node
        while (
            source.op == "call_function"
            and source.target is not operator.getitem
            and name_of(source.target) in _RESHAPES
            and isinstance(source.args[0], fx.Node)
            and source.args[0].op == "call_function"
        ):
            source = source.args[0]
        value = self.values[source]
        name, shape = value.name, value.shape
        if self.accumulate[position]:
            memory = model.bind_previous(position, shape, port.dtype)
            before = memory if value.dtype is port.dtype else model.cast(memory, value.dtype)
            exact = value.dtype is port.dtype and source.op == "call_function" and len(source.users) == 1
            if exact and name_of(source.target) == "aten.mm.default" and value.floating:
                name = self._product(source, before)
            else:
                name = model.call("Add", before, name)
        if value.dtype is not port.dtype:
            name = model.cast(name, port.dtype)
        model.bind_output(position, name, shape, port.dtype)


def _stretched(node: fx.Node) -> bool:
    return node.op == "call_function" and (
        node.target is not operator.getitem and name_of(node.target) in ("aten.expand.default", "aten.full.default")
    )
