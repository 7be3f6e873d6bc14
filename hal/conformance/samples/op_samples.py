"""Arguments to try every op of `hal.ops` with, drawn from a seed, and programs of one op to try them in.

It judges nothing: what PyTorch makes of the arguments is beside them, to be compared with.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hal import random as counter_random
from hal.conformance.samples.arithmetic import ARITHMETIC
from hal.conformance.samples.indexing import INDEXING
from hal.conformance.samples.sampler import Draw, Sampler
from hal.ops import OPS, Spec, arguments_of, count_flops, count_moved
from hal.program import Port, Program, Role

Arguments = tuple[list[Any], dict[str, Any]]

SAMPLES: dict[str, Draw] = {**ARITHMETIC, **INDEXING}
"""By the names of `hal.ops.OPS`."""


def sample(name: str, seed: int, floating: torch.dtype = torch.float32) -> Arguments:
    """Arguments for the op of that name: positional and by keyword. CPU tensors."""
    sampler = Sampler(seed, floating)
    args, kwargs = SAMPLES[name](sampler), {}
    if args and isinstance(args[-1], dict):
        kwargs = args.pop()
    return args, kwargs


@dataclass(frozen=True)
class Case:
    """A program of one op, what to run it with, and what PyTorch makes of it. `key` is None unless it draws."""

    program: Program
    inputs: tuple[torch.Tensor, ...]
    key: counter_random.RandomKey | None
    expected: tuple[torch.Tensor, ...]


def target_of(name: str) -> Any:
    """What a node calls, by the table's name."""
    if name.startswith("hal.random."):
        return getattr(counter_random, name.removeprefix("hal.random."))
    _, packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def expected_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """What PyTorch gives for these arguments, with `view` as a reshape. Results that are not wanted are left out."""
    target = torch.reshape if name == "aten.view.default" else target_of(name)
    result = target(*args, **kwargs)
    return (result,) if isinstance(result, torch.Tensor) else tuple(part for part in result if part is not None)


def case(name: str, seed: int, floating: torch.dtype = torch.float32) -> Case:
    """The op with arguments drawn by the seed, as a program whose inputs are its tensors."""
    args, kwargs = sample(name, seed, floating)
    graph = fx.Graph()
    tensors: list[torch.Tensor] = []
    key: counter_random.RandomKey | None = None
    key_node: fx.Node | None = None

    def graph_argument(argument: Any) -> Any:
        nonlocal key, key_node
        if isinstance(argument, torch.Tensor):
            node = graph.placeholder(f"value_{len(tensors)}")
            node.meta = {"val": argument}
            tensors.append(argument.contiguous())
            return node
        if isinstance(argument, counter_random.RandomKey):
            key, key_node = argument, graph.placeholder("key")
            return key_node
        if isinstance(argument, (list, tuple)):
            return [graph_argument(item) for item in argument]
        return argument

    row = OPS[name]
    node = graph.call_function(target_of(name), tuple(graph_argument(argument) for argument in args), kwargs)
    specs, named = arguments_of(node)
    results = row.results(*specs, **named)
    blanks = [
        None if spec is None else torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        for spec in _as_tuple(results)
    ]
    node.meta = {"val": blanks[0] if isinstance(results, Spec) else tuple(blanks)}
    outputs: list[fx.Node] = [node]
    if not isinstance(results, Spec):
        outputs = []
        for index, blank in enumerate(blanks):
            if blank is not None:
                outputs.append(graph.call_function(operator.getitem, (node, index)))
                outputs[-1].meta = {"val": blank}
    graph.output(tuple(outputs))
    stored = [result for result in _as_tuple(results) if result is not None]
    program = Program(
        name=f"{name} {seed}",
        graph=graph,
        inputs=tuple(Port(Role.VALUE, i, tuple(t.shape), t.dtype) for i, t in enumerate(tensors)),
        outputs=tuple(Port(Role.VALUE, i, spec.shape, spec.dtype, True) for i, spec in enumerate(stored)),
        constants={},
        draws=key is not None,
        flops=count_flops(graph),
        moved=count_moved(graph),
        workspace=sum(spec.size for spec in stored),
        fingerprint=f"{name} {args} {kwargs} {floating}",
    )
    return Case(program, tuple(tensors), key, expected_of(name, args, kwargs))


def _as_tuple(results: Any) -> tuple[Spec | None, ...]:
    return (results,) if isinstance(results, Spec) else tuple(results)
