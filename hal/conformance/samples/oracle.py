"""What the ops mean, by PyTorch in float64 on the host, and how near a device must come.

Random ops are `hal.random`'s own. Invariant: the oracle computes with the very numbers that the device was given, so
that only the device's own rounding is judged.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from hal.program import Program

WITHIN = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of the largest result: a few roundings of the dtype, since sums may be taken in any order."""


def raised(value: Any) -> Any:
    """Floating-point tensors as float64; others as they are."""
    if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
        return value.double()
    return value


def evaluate(program: Program, inputs: Sequence[torch.Tensor], exact: bool = True) -> list[torch.Tensor]:
    """The outputs of a program that draws nothing: `exact` in float64 throughout, else in the dtypes that it names."""
    environment: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            value: Any = next(given)
            environment[node] = raised(value) if exact else value
        elif node.op == "get_attr":
            constant = program.constants[str(node.target)]
            environment[node] = raised(constant) if exact else constant
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), environment.__getitem__)
            result = call(node.target, args, kwargs)
            environment[node] = _raise_all(result) if exact else result
        else:
            return [environment[value] for value in node.args[0]]
    raise AssertionError("a graph without an output")


def call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """One op by PyTorch."""
    if target is operator.getitem:
        return args[0][args[1]]
    if target is torch.ops.aten.view.default:
        target = torch.ops.aten.reshape.default
    return target(*args, **kwargs)


def _raise_all(result: Any) -> Any:
    return tuple(raised(part) for part in result) if isinstance(result, tuple) else raised(result)


def assert_near(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    """Equal for integers and booleans; else near, with infinities and NaN in the same places."""
    assert found.shape == wanted.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(wanted.shape)}"
    if not found.dtype.is_floating_point:
        wrong = (found != wanted).sum().item()
        assert torch.equal(found, wanted.to(found.dtype)), f"{what}: {wrong} of {found.numel()} elements differ"
        return
    ours, theirs = found.double(), wanted.to(found.dtype).double()
    assert torch.equal(ours.isnan(), theirs.isnan()), f"{what}: NaN in other places"
    infinite = theirs.isinf()
    assert torch.equal(ours[infinite], theirs[infinite]), f"{what}: other infinities"
    finite = theirs.isfinite()
    if not finite.any():
        return
    error = (ours[finite] - theirs[finite]).abs().max().item()
    scale = max(theirs[finite].abs().max().item(), 1e-30)
    assert error <= WITHIN[dtype] * scale, (
        f"{what}: off by {error:.3g} at a largest value of {scale:.3g}; allowed are {WITHIN[dtype] * scale:.3g}"
    )
