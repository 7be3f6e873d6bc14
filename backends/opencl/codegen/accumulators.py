"""What a reduction keeps while it runs, as C: where it starts, how it takes a value in, what it gives in the end.

Maxima and minima of float run over integers in the floats' order, which lets NaN win and compilers vectorise.
"""

from __future__ import annotations

import torch

from backends.opencl.codegen.emit import c_type, rounded

START = {
    "sum": lambda dtype: "0",
    "prod": lambda dtype: "1",
    "any": lambda dtype: "0",
    "max": lambda dtype: _limits(dtype)[0],
    "min": lambda dtype: _limits(dtype)[1],
}


def _limits(dtype: torch.dtype) -> tuple[str, str]:
    if c_type(dtype) == "float":
        return "INT_MIN", "INT_MAX"  # ordered as integers
    if dtype.is_floating_point:
        return "-INFINITY", "INFINITY"
    name = {"long": "LONG", "int": "INT", "short": "SHRT", "char": "CHAR", "uchar": "UCHAR"}[c_type(dtype)]
    return ("0" if name == "UCHAR" else f"{name}_MIN"), f"{name}_MAX"


def accumulator(kind: str, dtype: torch.dtype) -> str:
    return "int" if kind in ("max", "min") and c_type(dtype) == "float" else c_type(dtype)


def combined(kind: str, dtype: torch.dtype, total: str, value: str) -> str:
    """A C statement that takes a value, as an accumulator holds it, into an accumulator."""
    if kind == "sum":
        if dtype.is_floating_point:
            return f"{{ REASSOCIATE {total} += {value}; }}"
        return f"{total} = ({c_type(dtype)})((ulong){total} + (ulong){value});"
    if kind == "prod":
        return f"{total} *= {value};"
    if kind == "any":
        return f"{total} |= {value};"
    sign = ">" if kind == "max" else "<"
    if dtype is torch.float64:
        return f"{total} = ({value} {sign} {total} || {value} != {value}) ? {value} : {total};"
    return f"{total} = {value} {sign} {total} ? {value} : {total};"


def taken_in(kind: str, dtype: torch.dtype, value: str) -> str:
    """A value as an accumulator holds it."""
    if kind in ("max", "min") and c_type(dtype) == "float":
        return f"{'ordered_high' if kind == 'max' else 'ordered_low'}({value})"
    return value


def given_out(kind: str, dtype: torch.dtype, total: str) -> str:
    if kind in ("max", "min") and c_type(dtype) == "float":
        return f"unordered({total})"
    return rounded(total, dtype)
