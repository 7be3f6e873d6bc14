"""Elementary functions of fp32 are accurate over their whole range, near their worst points too.

The reference is PyTorch in float64. A loss near zero, a gate far below zero and a gradient at a flat place are small
numbers that still count, so the bound is relative. Not here: half precision, whose rounding is larger than any error.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from hal.device import Device
from hal.kit.program_builder import GraphBuilder, run

RELATIVE = 4e-7
"""Between three and four units in the last place, which vendors' libraries of elementary functions stay below."""

SMALLEST = 1e-37
"""Below it fp32 has fewer bits, and a device may flush numbers to zero."""

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "erf": torch.erf, "exp": torch.exp, "expm1": torch.expm1,
    "log": torch.log, "log1p": torch.log1p, "sin": torch.sin, "cos": torch.cos, "tan": torch.tan,
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal,
}  # fmt: skip


def points() -> torch.Tensor:
    """Even steps over what a model may hold, many around 0 and 1, and powers of ten on both sides of zero."""
    powers = torch.logspace(-30, 2, 2001)
    around_one = 1 + torch.linspace(-0.01, 0.01, 801)
    return torch.cat([torch.linspace(-100, 100, 8001), torch.linspace(-2, 2, 4001), around_one, powers, -powers])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_elementary_function_is_accurate_near_its_worst_points_too(device: Device, function: str) -> None:
    x = points()
    builder = GraphBuilder(function)
    program = builder.program([builder.call(f"aten.{function}.default", builder.input(tuple(x.shape)))])
    (found,) = run(device, program, [x])
    exact = FUNCTIONS[function](x.double())
    inside = exact.isfinite() & (exact.abs() <= torch.finfo(torch.float32).max)
    error = (found.double() - exact)[inside].abs() / (exact[inside].abs() + SMALLEST / RELATIVE)
    worst = int(torch.where(error.isnan(), math.inf, error).argmax())
    at, gives, wanted = (float(tensor[inside][worst]) for tensor in (x, found, exact))
    assert error[worst] <= RELATIVE, f"{function}({at}) gives {gives}, not {wanted}"
