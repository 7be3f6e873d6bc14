"""Small core programs made by hand, and running them: what the suite asks a device to compile.

`GraphBuilder` makes graphs in the form that `hal.ops` promises, with shapes and dtypes by its table. It is not a
lowering of modules. For a NATIVE device, which hands graphs to PyTorch, `view` is written as `reshape`, as the promise
has it: there strides would matter.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from hal import random as counter_random
from hal.device import NATIVE, Buffer, Device, KernelCall, View
from hal.ops import OPS, Kind, arguments_of, calls, count_flops, count_moved, name_of, spec_of
from hal.ops.rules import Spec
from hal.program import Port, Program, Role
from hal.random import RandomKey

aten = torch.ops.aten
QUEUE = "compute"
ALIGNMENT = 64


def target_of(name: str) -> Any:
    """What a node of that op calls, by the table's name."""
    if name.startswith("hal.random."):
        return getattr(counter_random, name.rpartition(".")[2])
    _, packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)


def blank(result: Any) -> Any:
    """A node's `meta["val"]` for a Spec or several, of which those that are not wanted are None."""
    if result is None:
        return None
    if isinstance(result, Spec):
        return torch.empty(result.shape, dtype=result.dtype, device="meta")
    return tuple(blank(part) for part in result)


class GraphBuilder:
    """A core graph under construction: inputs first, then calls, then `program`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.graph = fx.Graph()
        self.inputs: list[Port] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.key: fx.Node | None = None

    def input(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, role: Role = Role.VALUE) -> fx.Node:
        """A tensor given at each run."""
        node = self.graph.placeholder(f"input_{len(self.inputs)}")
        node.meta = {"val": blank(Spec(tuple(shape), dtype))}
        self.inputs.append(Port(role, len(self.inputs), tuple(shape), dtype))
        return node

    def random_key(self) -> fx.Node:
        """The key, after all inputs."""
        self.key = self.graph.placeholder("key")
        return self.key

    def constant(self, tensor: torch.Tensor) -> fx.Node:
        """A tensor that belongs to the program."""
        name = f"constant_{len(self.constants)}"
        self.constants[name] = tensor
        node = self.graph.create_node("get_attr", name)
        node.meta = {"val": blank(spec_of(tensor))}
        return node

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A node of that op, or one for each of its results; None for those that are not wanted."""
        node = self.graph.call_function(target_of(name), args, kwargs)
        specs, named = arguments_of(node)
        node.meta = {"val": blank(OPS[name].results(*specs, **named))}
        if not isinstance(node.meta["val"], tuple):
            return node
        parts: list[fx.Node | None] = []
        for place, value in enumerate(node.meta["val"]):
            if value is None:
                parts.append(None)
                continue
            part = self.graph.call_function(operator.getitem, (node, place))
            part.meta = {"val": value}
            parts.append(part)
        return tuple(parts)

    def program(
        self, outputs: Sequence[fx.Node], roles: Sequence[Role] | None = None, accumulates: bool = True
    ) -> Program:
        """The program of these outputs. Outputs with the role BUFFER_UPDATE belong to the inputs of that place."""
        self.graph.output(tuple(outputs))
        given = roles or [Role.VALUE] * len(outputs)
        ports = []
        for place, (node, role) in enumerate(zip(outputs, given, strict=True)):
            spec = spec_of(node.meta["val"])
            adds = accumulates and spec.dtype.is_floating_point and role is not Role.BUFFER_UPDATE
            ports.append(Port(role, place, spec.shape, spec.dtype, adds))
        text = f"{self.name} {self.inputs} {ports} {self.graph}"
        constants = b"".join(
            tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in self.constants.values()
        )
        return Program(
            name=self.name,
            graph=self.graph,
            inputs=tuple(self.inputs),
            outputs=tuple(ports),
            constants=self.constants,
            draws=self.key is not None,
            flops=count_flops(self.graph),
            moved=count_moved(self.graph),
            workspace=_workspace(self.graph),
            fingerprint=hashlib.sha256(text.encode() + constants).hexdigest(),
        )


def _workspace(graph: fx.Graph) -> int:
    """Bytes of everything computed: no run needs more."""
    total = 0
    for node in calls(graph):
        row = OPS.get(name_of(node.target))
        if row is None or row.kind is not Kind.VIEW:
            value = spec_of(node.meta["val"])
            total += sum(part.size for part in (value if isinstance(value, tuple) else (value,)) if part is not None)
    return total


def for_device(program: Program, device: Device) -> Program:
    """The program as that device takes it."""
    if NATIVE in device.info.tags:
        for node in program.graph.nodes:
            if node.target is aten.view.default:
                node.target = aten.reshape.default
    return program


def place(device: Device, tensors: Sequence[torch.Tensor]) -> tuple[Buffer, list[View]]:
    """One buffer with a view for each tensor, and the tensors written into it."""
    offsets, size = [], 0
    for tensor in tensors:
        offsets.append(size)
        size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    buffer = device.alloc(max(size, ALIGNMENT), "conformance")
    views = [
        buffer.view(offset, tuple(tensor.shape), tensor.dtype) for offset, tensor in zip(offsets, tensors, strict=True)
    ]
    for view, tensor in zip(views, tensors, strict=True):
        device.queue(QUEUE).write(view, tensor.contiguous()).wait()
    return buffer, views


def fetch(device: Device, views: Sequence[View]) -> list[torch.Tensor]:
    """What the views hold, as host tensors."""
    results = []
    for view in views:
        results.append(torch.empty(view.shape, dtype=view.dtype))
        device.queue(QUEUE).read(results[-1], view).wait()
    return results


def run(
    device: Device,
    program: Program,
    inputs: Sequence[torch.Tensor],
    key: RandomKey | None = None,
    held: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """The outputs of one run. `held` are what the outputs are added to; without it they replace other numbers."""
    kernel = device.compile(for_device(program, device))
    before = held if held is not None else [torch.full(port.shape, 1).to(port.dtype) for port in program.outputs]
    buffer, views = place(device, [*inputs, *before])
    try:
        sources, targets = views[: len(inputs)], views[len(inputs) :]
        accumulate = tuple(port.accumulates for port in program.outputs) if held is not None else ()
        device.queue(QUEUE).run(KernelCall(kernel, sources, targets, accumulate, key)).wait()
        return fetch(device, targets)
    finally:
        buffer.free()
