"""The dtypes that models may have, and the check at compile time that a device has those of a program.

Storage and compute dtypes of a device are two sets (contract 6). A number may be computed in a wider dtype of its kind
(half precision in float32, int8 in int32) and rounded when it is stored; never in a narrower dtype, which would give
other results without an error. Nothing is converted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from hal.device import DeviceInfo
from hal.errors import Unsupported
from hal.program import Program

INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
"""Integers and booleans."""

HALVES = frozenset({torch.float16, torch.bfloat16})
"""Half precision: stored as it is, and computed in float32 where the device has no arithmetic in it."""

ALL = INTEGERS | HALVES | {torch.float32, torch.float64}
"""All dtypes that a model may have."""

NO_ADVICE: Mapping[torch.dtype, str] = MappingProxyType({})


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are computed without arithmetic in half precision: float32 for a half."""
    return torch.float32 if dtype in HALVES else dtype


def computes(info: DeviceInfo, dtype: torch.dtype) -> bool:
    """Whether a device computes in that dtype or in a wider dtype of its kind."""
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
    """Check that a device has a dtype.

    Args:
        info: the description of the device.
        dtype: the dtype.
        program: the name of the program, for the error.
        op: the op whose result has the dtype; empty for an input, output or constant, which must be stored as well.
        advice: what the user can do, by dtype, for the error.

    Raises:
        Unsupported: the device does not compute in the dtype, or does not store it.
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
    """Check the inputs, outputs and constants of a program with `require`. Raises Unsupported."""
    ports = [port.dtype for port in (*program.inputs, *program.outputs)]
    for dtype in dict.fromkeys([*ports, *(constant.dtype for constant in program.constants.values())]):
        require(info, dtype, program.name, advice=advice)
