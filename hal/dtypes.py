"""The dtypes there are, and whether a device has those of a program: asked when compiling, of what the device says.

A device's storage and compute dtypes are two sets (contract 6). A number may be computed with in a wider dtype of its
kind (half precision in float32, int8 in int32) and rounded when it is stored; never in a narrower one, which would be
other results without a word. It converts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from hal.device import DeviceInfo
from hal.errors import Unsupported
from hal.program import Program

INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
"""Whole numbers, truths among them."""

HALVES = frozenset({torch.float16, torch.bfloat16})
"""What is at least stored, and computed with in float32 where there is no native arithmetic."""

ALL = INTEGERS | HALVES | {torch.float32, torch.float64}
"""What a model may be made of."""

NO_ADVICE: Mapping[torch.dtype, str] = MappingProxyType({})


def widened(dtype: torch.dtype) -> torch.dtype:
    """What is computed in where there is no arithmetic in a half; any other dtype itself."""
    return torch.float32 if dtype in HALVES else dtype


def computes(info: DeviceInfo, dtype: torch.dtype) -> bool:
    """Whether a device can do arithmetic on numbers of that dtype without losing any of their precision."""
    return dtype in info.compute or any(_is_wider(other, dtype) for other in info.compute)


def _is_wider(other: torch.dtype, dtype: torch.dtype) -> bool:
    if dtype.is_complex or other.is_complex or dtype.is_floating_point != other.is_floating_point:
        return False
    if dtype.is_floating_point:
        return torch.finfo(other).bits > torch.finfo(dtype).bits
    if dtype is torch.bool or other is torch.bool:
        return dtype is torch.bool
    return torch.iinfo(other).bits > torch.iinfo(dtype).bits


def require(
    info: DeviceInfo, dtype: torch.dtype, program: str, op: str = "", advice: Mapping[torch.dtype, str] = NO_ADVICE
) -> None:
    """Raise Unsupported, naming program, op and dtype, for a dtype that the device lacks.

    With an `op`, what it gives is meant, else a value that goes in or out, which has to be stored as well. `advice` is
    what to do, by dtype.
    """
    stored = dtype in info.storage
    computed = computes(info, dtype)
    if computed and (stored or (op and dtype in info.compute)):
        return
    name = str(dtype).removeprefix("torch.")
    what = f"the op {op} in {name}" if op else f"values of {name}"
    lack = "does not compute in that dtype" if stored else "does not have that dtype"
    raise Unsupported(
        f"{program!r} needs {what}, and device {info.name!r} {lack}. "
        + advice.get(dtype, "Use another dtype (float32 is everywhere), or another device."),
        op=op,
        dtype=str(dtype),
        device=info.name,
    )


def check_ports(program: Program, info: DeviceInfo, advice: Mapping[torch.dtype, str] = NO_ADVICE) -> None:
    """Raise Unsupported for an input, output or constant of a dtype that the device lacks."""
    ports = [port.dtype for port in (*program.inputs, *program.outputs)]
    for dtype in dict.fromkeys([*ports, *(constant.dtype for constant in program.constants.values())]):
        require(info, dtype, program.name, advice=advice)
