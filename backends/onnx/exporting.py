"""A core program as an .onnx file that others can open: each input and output once, in its own shape and name.

A model made to be run binds the same memory in the shape that saves a copy, and numbers its inputs; for people it is
put in order here. Weights may be put into the file, which is then a model of its own. It runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backends.onnx.emit import emit
from backends.onnx.model import ELEMENT_TYPES
from hal.device import DeviceInfo
from hal.errors import Unsupported
from hal.ops import OPS, check
from hal.program import Program

FORMAT = DeviceInfo("ONNX", "a file", frozenset(), frozenset(ELEMENT_TYPES), frozenset(ELEMENT_TYPES))
"""A file as a device that holds and computes what ONNX has numbers for."""

LARGEST = 1_500_000_000
"""Bytes that a file holds itself; weights beyond lie beside it. Protobuf, the format's own, ends at 2 GiB."""


def export(
    program: Program,
    path: str | Path,
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    weights: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write the model of a core program as an .onnx file. Returns the path.

    `inputs` and `outputs` are names, one for each of the program's ports; without them, inputs go by role and index
    (`parameter.0`) and outputs are numbered (`result.0`). Those inputs that `weights` has are constants of the file;
    the others are given to each run, and so are random draws (`drawn.0`, ...). Raises Unsupported for a program that
    is not in core form, and ValueError for names that do not fit.
    """
    import onnx

    try:
        check(program, FORMAT)
    except Unsupported as missing:
        if missing.op in OPS:
            raise
        raise Unsupported(
            f"{program.name!r} holds {missing.op}, which is no core op, and only core programs become ONNX. Capture it "
            "with `lowering=Lowering.CORE` of relay.capture.",
            op=missing.op,
            dtype=missing.dtype,
            device="ONNX",
        ) from missing
    roles = [f"{port.role.value.replace(' ', '_')}.{port.index}" for port in program.inputs]
    given = _names(roles, inputs, "input")
    wanted = _names([f"result.{position}" for position in range(len(program.outputs))], outputs, "output")
    if len({*given, *wanted}) < len(given) + len(wanted):
        raise ValueError(f"every input and output needs a name of its own, got {given} and {wanted}")
    emitted = emit(program, checks_indices=False)
    graph = emitted.proto.graph
    helper = onnx.helper
    before, after, renamed = [], [], {}
    infos = [info for info in graph.input if info.name not in {bound.name for bound in emitted.inputs}]
    constants: list[Any] = []
    done: set[int] = set()
    for bound in emitted.inputs:
        port = program.inputs[bound.port]
        name = given[bound.port]
        if bound.port not in done:
            done.add(bound.port)
            if weights is not None and name in weights:
                constants.append(_constant(onnx, name, weights[name], port))
            else:
                infos.append(helper.make_tensor_value_info(name, ELEMENT_TYPES[port.dtype], port.shape))
        if bound.shape == port.shape:
            renamed[bound.name] = name
        else:
            before.append(_reshape(helper, constants, name, bound.name, bound.shape))
    results = []
    for bound in emitted.outputs:
        port, name = program.outputs[bound.port], wanted[bound.port]
        results.append(helper.make_tensor_value_info(name, ELEMENT_TYPES[port.dtype], port.shape))
        if bound.shape == port.shape:
            renamed[bound.name] = name
        else:
            after.append(_reshape(helper, constants, bound.name, name, port.shape))
    for node in graph.node:
        for operands in (node.input, node.output):
            operands[:] = [renamed.get(operand, operand) for operand in operands]
    nodes = [*before, *graph.node, *after]
    proto = helper.make_model(
        helper.make_graph(nodes, program.name, infos, results, [*graph.initializer, *constants]),
        opset_imports=list(emitted.proto.opset_import),
        ir_version=emitted.proto.ir_version,
        producer_name=emitted.proto.producer_name,
    )
    target = Path(path)
    beside = sum(len(tensor.raw_data) for tensor in proto.graph.initializer) > LARGEST
    onnx.save_model(proto, target, save_as_external_data=beside, location=f"{target.name}.data")
    return target


def _names(default: list[str], names: Sequence[str], side: str) -> list[str]:
    if names and len(names) != len(default):
        raise ValueError(f"{len(names)} {side} names for {len(default)} {side}s: {list(names)}")
    return list(names) or default


def _constant(onnx: Any, name: str, tensor: torch.Tensor, port: Any) -> Any:
    if tuple(tensor.shape) != port.shape or tensor.dtype is not port.dtype:
        raise ValueError(
            f"the weight {name!r} is {tuple(tensor.shape)} of {tensor.dtype}; expected {port.shape} of {port.dtype}"
        )
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return onnx.helper.make_tensor(name, ELEMENT_TYPES[port.dtype], port.shape, raw, raw=True)


def _reshape(helper: Any, constants: list[Any], source: str, target: str, shape: Sequence[int]) -> Any:
    sizes = np.array(shape, dtype=np.int64)
    name = f"{target}.shape"
    constants.append(helper.make_tensor(name, ELEMENT_TYPES[torch.int64], [len(shape)], sizes.tobytes(), raw=True))
    return helper.make_node("Reshape", [source, name], [target], name=f"{target}.reshaped", allowzero=1)
