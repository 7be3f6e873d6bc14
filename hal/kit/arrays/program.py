"""From a core program to a Python function over arrays: what numpy's and CuPy's devices execute.

The graph is run op by op by the functions of `hal.kit.arrays.ops`; torch.fx writes the Python, which drops each
value after its last use. An output is stored the moment it exists, except new values of buffers, which are written
when every read of the old ones is over. It fuses nothing. Indices are checked before the op that takes them, but not
CuPy's, whose values are on the device.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx

from hal.kit.arrays.dtypes import Arrays
from hal.kit.arrays.ops import FUNCTIONS
from hal.ops import Spec, name_of, spec_of
from hal.ops.index_domains import IndexDomain, unproven_domains
from hal.program import Program, Role


def lower(
    program: Program, arrays: Arrays, constants: dict[str, Any], accumulate: tuple[bool, ...]
) -> Callable[..., None]:
    """A function of (inputs..., [key], outputs...), each memory as it is stored.

    `constants` are the program's, as `Arrays.load` takes them. The program must have passed `hal.ops.check`.
    """
    graph = fx.Graph()
    environment: dict[fx.Node, Any] = {}
    nodes = list(program.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    given = [graph.placeholder(f"given_{position}") for position in range(len(placeholders))]
    targets = [graph.placeholder(f"target_{position}") for position in range(len(program.outputs))]
    for node, memory, port in zip(placeholders, given, program.inputs, strict=False):
        environment[node] = graph.call_function(arrays.load, (memory, port.dtype))
    if program.draws:
        environment[placeholders[-1]] = given[-1]

    output = nodes[-1]
    early: dict[fx.Node, list[int]] = {}
    late: list[int] = []
    for position, (value, port) in enumerate(zip(output.args[0], program.outputs, strict=True)):
        if port.role is Role.BUFFER_UPDATE or value.op != "call_function":
            late.append(position)
        else:
            early.setdefault(value, []).append(position)

    def store(position: int) -> None:
        adds = bool(accumulate) and accumulate[position]
        value = environment[output.args[0][position]]
        dtype = program.outputs[position].dtype
        graph.call_function(arrays.add_to if adds else arrays.store, (value, dtype, targets[position]))

    domains = unproven_domains(program) if arrays.xp is np else {}
    root = torch.nn.Module()
    for node in nodes:
        if node.op == "get_attr":
            setattr(root, node.target, _Constant(constants[node.target]))
            constant = graph.get_attr(node.target)
            environment[node] = graph.call_function(_Constant.value, (constant,))
        elif node.op == "call_function":
            for domain in domains.get(node, ()):
                graph.call_function(_check(domain, program.name), (environment[domain.index],))
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), environment.__getitem__)
            environment[node] = graph.call_function(_function(node, arrays), args, kwargs)
            for position in early.get(node, ()):
                store(position)
    # A new value may be a view of an old one that is overwritten first: all are taken before any is written.
    for position in late:
        value = output.args[0][position]
        environment[value] = graph.call_function(_own, (environment[value],))
    for position in late:
        store(position)
    graph.output(())
    return fx.GraphModule(root, graph).forward


class _Constant:
    """An array in an object that torch.fx accepts as an attribute of a module."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def value(self) -> Any:
        """The array."""
        return self.array


def _own(value: Any) -> Any:
    return value.copy()


def _function(node: fx.Node, arrays: Arrays) -> Callable[..., Any]:
    if node.target is operator.getitem:
        return operator.getitem
    function = functools.partial(FUNCTIONS[name_of(node.target)], arrays)
    spec = spec_of(node.meta["val"])
    dtypes = [spec.dtype] if isinstance(spec, Spec) else [part and part.dtype for part in spec]
    if not any(dtype in (torch.float16, torch.bfloat16) for dtype in dtypes):
        return _named(function, node)

    def rounded(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if isinstance(spec, Spec):
            return arrays.rounded(result, spec.dtype)
        return tuple(
            None if part is None else arrays.rounded(part, dtype) for part, dtype in zip(result, dtypes, strict=True)
        )

    return _named(rounded, node)


def _check(domain: IndexDomain, name: str) -> Callable[..., Any]:
    """A function that raises IndexOutOfDomain for an index outside of its domain."""

    def check(index: Any) -> None:
        low, high = int(index.min()), int(index.max())
        if not domain.holds(low, high):
            raise domain.error(name, low if low < domain.low else high)

    return _named(check, domain.index)


def _named(function: Callable[..., Any], node: fx.Node) -> Callable[..., Any]:
    """torch.fx writes a function by its name, and tells apart those that share one."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = node.name
    call.__module__ = "hal.kit.arrays.program"
    return call
