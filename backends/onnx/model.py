"""An ONNX model under construction: nodes, constants, inputs and outputs by name, and what memory each is bound to.

It knows ONNX and nothing of PyTorch's ops. Invariant: names are unique, and a node's name starts with the name of
the program's node that asked for it, so that an error of ONNX Runtime's names that op.

Values inside a model have a dtype that the CPU provider computes in: half precision in float32 and small
integers in int32, rounded or wrapped after each op that can leave the range (`backends.onnx.emit`). Source of the
opset: ONNX operators, version 21; from 22 on the CPU provider lacks kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

OPSET = 21
IR_VERSION = 10  # the first that knows opset 21

INDEX_BOUNDS = "index_bounds"
"""The output that holds the least and the largest value of each index that is checked."""

ELEMENT_TYPES = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}
"""onnx.TensorProto's numbers of dtypes."""

_HELD = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.uint8: torch.int32,
}

_ARRAYS = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.bool: np.bool_,
}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of values inside a model that are stored as `dtype`."""
    return _HELD.get(dtype, dtype)


class Value(NamedTuple):
    """A tensor inside a model; `dtype` is that inside the model."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def floating(self) -> bool:
        return self.dtype.is_floating_point


Operand = Value | str


@dataclass(frozen=True)
class Bound:
    """A model's input or output and the memory it is bound to: port `port` of the program, in this shape."""

    name: str
    port: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Draw:
    """A model's input that is drawn anew for each run: a function of `hal.random` with its arguments after the key."""

    name: str
    function: Any
    arguments: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


class Model:
    """Grows node by node. `inputs` are bound to the program's inputs, `previous_outputs` to what its outputs hold."""

    def __init__(self, title: str) -> None:
        import onnx

        self._onnx = onnx
        self.title = title
        self.inputs: list[Bound] = []
        self.previous_outputs: list[Bound] = []
        self.draws: list[Draw] = []
        self.outputs: list[Bound] = []
        self.asking = ""
        """The node of the program whose ONNX nodes are being written."""
        self._nodes: list[Any] = []
        self._constants: dict[tuple[Any, ...], str] = {}
        self._tensors: dict[str, Any] = {}
        self._given: dict[str, Any] = {}
        self._returned: list[Any] = []
        self._results: set[str] = set()
        self._renamed: dict[str, str] = {}
        self._count = 0

    # -- what it is made of

    def call(self, op: str, *operands: Operand | None, **attributes: Any) -> str:
        """The one result of an ONNX op. None stands for an operand left out."""
        return self.calls(1, op, *operands, **attributes)[0]

    def calls(self, results: int, op: str, *operands: Operand | None, **attributes: Any) -> list[str]:
        """The results of an ONNX op."""
        self._count += 1
        name = f"{self.asking}.{self._count}"
        names = [name if number == 0 else f"{name}.{number}" for number in range(results)]
        given = ["" if operand is None else self._name(operand) for operand in operands]
        while given and not given[-1]:
            given.pop()
        self._nodes.append(self._onnx.helper.make_node(op, given, names, name=name, **attributes))
        self._results.update(names)
        return names

    def constant(self, array: Any) -> str:
        """A constant with the data of a numpy array; equal ones are one."""
        array = np.ascontiguousarray(array).reshape(np.shape(array))
        key = (array.dtype.str, array.shape, array.tobytes())
        name = self._constants.get(key)
        if name is None:
            name = self._constants[key] = f"constant.{len(self._constants)}"
            self._tensors[name] = self._onnx.numpy_helper.from_array(array, name)
        return name

    def ints(self, numbers: Sequence[int]) -> str:
        """A shape, axes, bounds: a vector of int64."""
        return self.constant(np.array(list(numbers), dtype=np.int64))

    def number(self, number: Any, dtype: torch.dtype) -> str:
        """A number as a tensor without dimensions."""
        return self.constant(np.array(number, dtype=_ARRAYS[dtype]))

    def cast(self, value: Operand, dtype: torch.dtype) -> str:
        return self.call("Cast", value, to=ELEMENT_TYPES[dtype])

    def reshape(self, value: Operand, shape: Sequence[int]) -> str:
        return self.call("Reshape", value, self.ints(shape), allowzero=1)

    def expand(self, value: Operand, shape: Sequence[int]) -> str:
        return self.call("Expand", value, self.ints(shape))

    def slice(self, value: Operand, dim: int, start: int, end: int, step: int = 1) -> str:
        return self.call("Slice", value, *(self.ints([bound]) for bound in (start, end, dim, step)))

    def scan(self, op: str, value: Value, dim: int, start: int) -> str:
        """The running results of a binary op along a dimension, from the number `start` on."""
        helper = self._onnx.helper
        kind, shape = ELEMENT_TYPES[value.dtype], [size for axis, size in enumerate(value.shape) if axis != dim]
        infos = {name: helper.make_tensor_value_info(name, kind, shape) for name in ("before", "one", "after", "shown")}
        nodes = [
            helper.make_node(op, ["before", "one"], ["after"]),
            helper.make_node("Identity", ["after"], ["shown"]),
        ]
        body = helper.make_graph(
            nodes, f"{self.asking}.step", [infos["before"], infos["one"]], [infos["after"], infos["shown"]]
        )
        begin = self.expand(self.number(start, value.dtype), shape)
        return self.calls(
            2, "Scan", begin, value, body=body, num_scan_inputs=1, scan_input_axes=[dim], scan_output_axes=[dim]
        )[1]

    # -- what it is given and gives

    def bind_input(self, port: int, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """An input bound to the program's input, in a shape with as many elements; each port and shape once."""
        for bound in self.inputs:
            if bound.port == port and bound.shape == shape:
                return bound.name
        bound = Bound(self._give(f"input.{port}.{len(self.inputs)}", shape, dtype), port, shape, dtype)
        self.inputs.append(bound)
        return bound.name

    def bind_previous(self, port: int, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """An input bound to what the program's output holds before the run."""
        bound = Bound(self._give(f"previous.{port}", shape, dtype), port, shape, dtype)
        self.previous_outputs.append(bound)
        return bound.name

    def draw(self, function: Any, arguments: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """An input drawn for each run."""
        drawn = Draw(self._give(f"drawn.{len(self.draws)}", shape, dtype), function, arguments, shape, dtype)
        self.draws.append(drawn)
        return drawn.name

    def bind_output(self, port: int, value: Operand, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Bind a value to the program's output, in a shape with as many elements."""
        name = f"output.{port}"
        helper = self._onnx.helper
        self._returned.append(helper.make_tensor_value_info(name, ELEMENT_TYPES[dtype], shape))
        self.outputs.append(Bound(name, port, shape, dtype))
        if not self._rename(self._name(value), name):
            self._nodes.append(helper.make_node("Identity", [self._name(value)], [name], name=f"{name}.copy"))

    def return_index_bounds(self, bounds: Sequence[Operand]) -> None:
        """Return numbers of int64 as the output `INDEX_BOUNDS`."""
        helper = self._onnx.helper
        self._returned.append(helper.make_tensor_value_info(INDEX_BOUNDS, ELEMENT_TYPES[torch.int64], [len(bounds)]))
        self.asking = INDEX_BOUNDS
        self._rename(self.call("Concat", *(self.reshape(bound, [1]) for bound in bounds), axis=0), INDEX_BOUNDS)

    def finish(self) -> Any:
        """The onnx.ModelProto, without what no output needs."""
        for node in self._nodes:
            for operands in (node.input, node.output):
                operands[:] = [self._renamed.get(operand, operand) for operand in operands]
        nodes, needed = self._needed()
        lists: tuple[list[Any], ...] = (self.inputs, self.previous_outputs, self.draws)
        for bindings in lists:
            bindings[:] = [binding for binding in bindings if binding.name in needed]
        helper = self._onnx.helper
        graph = helper.make_graph(
            nodes,
            self.title,
            [info for name, info in self._given.items() if name in needed],
            self._returned,
            [tensor for name, tensor in self._tensors.items() if name in needed],
        )
        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="layer-relay")

    def _give(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        self._given[name] = self._onnx.helper.make_tensor_value_info(name, ELEMENT_TYPES[dtype], shape)
        return name

    def _rename(self, old: str, new: str) -> bool:
        """Let a node write its result under the output's name, so that no copy is needed; False where none does."""
        if old not in self._results:
            return False
        self._renamed[old] = new
        return True

    def _needed(self) -> tuple[list[Any], set[str]]:
        needed = {info.name for info in self._returned}
        nodes = []
        for node in reversed(self._nodes):
            if needed.intersection(node.output):
                needed.update(node.input)
                nodes.append(node)
        return nodes[::-1], needed

    def _name(self, operand: Operand) -> str:
        name = operand.name if isinstance(operand, Value) else operand
        return self._renamed.get(name, name)
