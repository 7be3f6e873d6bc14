"""Core programs made by hand, and running them: for tests of a device and for trying a kernel alone.

`GraphBuilder` makes graphs in the form that `hal.ops` describes, with shapes and dtypes by its table. It does not lower
modules, which `relay.capture` does. For a NATIVE device, which runs graphs with PyTorch, `for_device` replaces `view`
by `reshape`, because strides matter there. Invariant: a program's fingerprint covers its graph, its ports and the bytes
of its constants.
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
    """The target of a node that calls an op, such as `aten.add.Tensor` or `hal.random.uniform`."""
    if name.startswith("hal.random."):
        return getattr(counter_random, name.rpartition(".")[2])
    _, packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)


def blank(result: Any) -> Any:
    """The value of `meta["val"]` of a node: a meta tensor for each Spec, None for results that are not asked for."""
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
        """Add an input of that shape and dtype, and return its node."""
        node = self.graph.placeholder(f"input_{len(self.inputs)}")
        node.meta = {"val": blank(Spec(tuple(shape), dtype))}
        self.inputs.append(Port(role, len(self.inputs), tuple(shape), dtype))
        return node

    def random_key(self) -> fx.Node:
        """Add the key of random numbers, after all inputs, and return its node."""
        self.key = self.graph.placeholder("key")
        return self.key

    def constant(self, tensor: torch.Tensor) -> fx.Node:
        """Add a constant tensor, and return its node."""
        name = f"constant_{len(self.constants)}"
        self.constants[name] = tensor
        node = self.graph.create_node("get_attr", name)
        node.meta = {"val": blank(spec_of(tensor))}
        return node

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Add a call of an op. Returns its node, or a tuple of nodes (or None) for an op with several results."""
        node = self.graph.call_function(target_of(name), args, kwargs)
        specs, named = arguments_of(node)
        node.meta = {"val": blank(OPS[name].results(*specs, **named))}
        if not isinstance(node.meta["val"], tuple):
            return node
        parts: list[fx.Node | None] = []
        for position, value in enumerate(node.meta["val"]):
            if value is None:
                parts.append(None)
                continue
            part = self.graph.call_function(operator.getitem, (node, position))
            part.meta = {"val": value}
            parts.append(part)
        return tuple(parts)

    def program(
        self, outputs: Sequence[fx.Node], roles: Sequence[Role] | None = None, accumulates: bool = True
    ) -> Program:
        """The program with these outputs.

        Args:
            outputs: nodes, in the order of the outputs.
            roles: the role of each output; VALUE unless given. An output with the role BUFFER_UPDATE replaces the input
                of its index.
            accumulates: whether floating-point outputs may be added to their memory.
        """
        self.graph.output(tuple(outputs))
        given = roles or [Role.VALUE] * len(outputs)
        ports = []
        for position, (node, role) in enumerate(zip(outputs, given, strict=True)):
            spec = spec_of(node.meta["val"])
            adds = accumulates and spec.dtype.is_floating_point and role is not Role.BUFFER_UPDATE
            ports.append(Port(role, position, spec.shape, spec.dtype, adds))
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
    """Bytes of all values that the graph computes: an upper bound of what a run needs."""
    total = 0
    for node in calls(graph):
        row = OPS.get(name_of(node.target))
        if row is None or row.kind is not Kind.VIEW:
            value = spec_of(node.meta["val"])
            total += sum(part.size for part in (value if isinstance(value, tuple) else (value,)) if part is not None)
    return total


def for_device(program: Program, device: Device) -> Program:
    """The program in the form that the device takes. The graph of `program` itself is changed."""
    if NATIVE in device.info.tags:
        for node in program.graph.nodes:
            if node.target is aten.view.default:
                node.target = aten.reshape.default
    return program


def upload(device: Device, tensors: Sequence[torch.Tensor]) -> tuple[Buffer, list[View]]:
    """Write host tensors into one new buffer. Returns the buffer and a view for each tensor."""
    offsets, size = [], 0
    for tensor in tensors:
        offsets.append(size)
        size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    buffer = device.alloc(max(size, ALIGNMENT), "uploaded tensors")
    views = [
        buffer.view(offset, tuple(tensor.shape), tensor.dtype) for offset, tensor in zip(offsets, tensors, strict=True)
    ]
    for view, tensor in zip(views, tensors, strict=True):
        device.queue(QUEUE).write(view, tensor.contiguous()).wait()
    return buffer, views


def fetch(device: Device, views: Sequence[View]) -> list[torch.Tensor]:
    """Read views into new host tensors."""
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
    before: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Compile a program, run it once, and return its outputs as host tensors.

    Args:
        device: the device that runs it.
        program: for a NATIVE device `view` is replaced by `reshape` in it.
        inputs: a host tensor for each input of the program.
        key: the key of its random numbers, if it draws any.
        before: a host tensor for each output, to which the output is added where the program allows it. Without it the
            outputs replace what their memory holds.
    """
    kernel = device.compile(for_device(program, device))
    initial = before if before is not None else [torch.full(port.shape, 1).to(port.dtype) for port in program.outputs]
    buffer, views = upload(device, [*inputs, *initial])
    try:
        sources, targets = views[: len(inputs)], views[len(inputs) :]
        accumulate = tuple(port.accumulates for port in program.outputs) if before is not None else ()
        device.queue(QUEUE).run(KernelCall(kernel, sources, targets, accumulate, key)).wait()
        return fetch(device, targets)
    finally:
        buffer.free()
