"""Element-wise core ops in ONNX.

Each function takes the `Model`, then the op's own arguments with tensors as `Value`, and returns the name of its
result. Operands have the same dtype inside the model; scalars are Python numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from backends.onnx.model import Model, Value, compute_dtype


def _unary(op: str) -> Callable[..., str]:
    return lambda m, x: m.call(op, x)


def _binary(op: str, of_booleans: str | None = None) -> Callable[..., str]:
    def call(m: Model, x: Value, y: Value) -> str:
        return m.call(of_booleans if of_booleans and x.dtype is torch.bool else op, x, y)

    return call


def _with_number(op: str) -> Callable[..., str]:
    return lambda m, x, number: m.call(op, x, m.number(number, x.dtype))


def _compare(op: str, negated: bool = False) -> Callable[..., str]:
    def call(m: Model, x: Value, y: Any) -> str:
        other = y if isinstance(y, Value) else m.number(y, x.dtype)
        if x.dtype is torch.bool and op != "Equal":
            result = m.call(op, m.cast(x, torch.int32), m.cast(other, torch.int32))
        else:
            result = m.call(op, x, other)
        return m.call("Not", result) if negated else result

    return call


def _expm1(m: Model, x: Value) -> str:
    """exp(x) - 1 = 2 t / (1 - t) with t = tanh(x / 2): exact to rounding near zero, where exp(x) - 1 is not."""
    one = m.number(1, x.dtype)
    half = m.call("Tanh", m.call("Mul", x, m.number(0.5, x.dtype)))
    near = m.call("Div", m.call("Add", half, half), m.call("Sub", one, half))
    far = m.call("Sub", m.call("Exp", x), one)
    return m.call("Where", m.call("Less", m.call("Abs", x), one), near, far)


def _log1p(m: Model, x: Value) -> str:
    """log(u) x / (u - 1) with u = 1 + x. Source: Kahan's formula, Higham, "Accuracy and Stability", section 1.14.1."""
    one = m.number(1, x.dtype)
    up = m.call("Add", x, one)
    logarithm = m.call("Log", up)
    corrected = m.call("Div", m.call("Mul", logarithm, x), m.call("Sub", up, one))
    small = m.call("Where", m.call("Equal", up, one), x, corrected)
    return m.call("Where", m.call("Equal", x, m.number(math.inf, x.dtype)), x, small)


def _sigmoid(m: Model, x: Value) -> str:
    """1 / (1 + exp(-x)). ONNX Runtime's own Sigmoid approximates, and is off by 1.3e-7 where it should be 1e-8."""
    one = m.number(1, x.dtype)
    return m.call("Reciprocal", m.call("Add", m.call("Exp", m.call("Neg", x)), one))


def _rsqrt(m: Model, x: Value) -> str:
    return m.call("Reciprocal", m.call("Sqrt", x))


def _tan(m: Model, x: Value) -> str:
    return m.call("Div", m.call("Sin", x), m.call("Cos", x))


def _trunc(m: Model, x: Value) -> str:
    return m.call("Where", m.call("Less", x, m.number(0, x.dtype)), m.call("Ceil", x), m.call("Floor", x))


def _gelu(m: Model, x: Value, *, approximate: str) -> str:
    """ONNX Runtime's, in float32. Its constants are float32 for float64 too, for which the formula is written out."""
    if x.dtype is torch.float32:
        return m.call("Gelu", x, approximate=approximate)
    one, half = m.number(1, x.dtype), m.number(0.5, x.dtype)
    if approximate == "tanh":
        cube = m.call("Mul", m.call("Mul", x, x), m.call("Mul", x, m.number(0.044715, x.dtype)))
        inner = m.call("Tanh", m.call("Mul", m.call("Add", x, cube), m.number(math.sqrt(2 / math.pi), x.dtype)))
    else:
        inner = m.call("Erf", m.call("Mul", x, m.number(math.sqrt(0.5), x.dtype)))
    return m.call("Mul", m.call("Mul", x, half), m.call("Add", one, inner))


def _relu(m: Model, x: Value) -> str:
    return m.call("Relu", x) if x.floating else m.call("Max", x, m.number(0, x.dtype))


def _bitwise(op: str, of_booleans: str) -> Callable[..., str]:
    return lambda m, *operands: m.call(of_booleans if operands[0].dtype is torch.bool else op, *operands)


def _power(m: Model, x: Value, number: Any) -> str:
    if number == 2:
        return m.call("Mul", x, x)
    if number == 3:
        return m.call("Mul", m.call("Mul", x, x), x)
    if number == -1 and x.floating:
        return m.call("Reciprocal", x)
    return m.call("Pow", x, m.number(number, x.dtype))


def _power_of_number(m: Model, number: Any, x: Value) -> str:
    return m.call("Pow", m.number(number, x.dtype), x)


def _atan2(m: Model, y: Value, x: Value) -> str:
    """The angle of (x, y). Of zeros, only the sign of the value counts: atan2(-0.0, -1) is +pi here. NaN stays."""
    dtype = x.dtype
    zero, pi, quarter = m.number(0, dtype), m.number(math.pi, dtype), m.number(math.pi / 2, dtype)
    endless = m.call("And", m.call("IsInf", x), m.call("IsInf", y))
    across, up = (m.call("Where", endless, m.call("Sign", operand), operand) for operand in (x, y))
    below = m.call("Less", up, zero)
    half = m.call("Where", below, m.call("Neg", pi), pi)
    above = m.call("Where", m.call("Greater", up, zero), quarter, up)
    level = m.call("Where", below, m.call("Neg", quarter), above)
    angle = m.call("Atan", m.call("Div", up, across))
    left = m.call("Where", m.call("Less", across, zero), m.call("Add", angle, half), angle)
    return m.call("Where", m.call("Equal", across, zero), level, left)


def _fmod(m: Model, x: Value, y: Any) -> str:
    return m.call("Mod", x, y if isinstance(y, Value) else m.number(y, x.dtype), fmod=1)


def _remainder(m: Model, x: Value, number: Any) -> str:
    """With the sign of the divisor."""
    divisor = m.number(number, x.dtype)
    if not x.floating:
        return m.call("Mod", x, divisor)
    zero = m.number(0, x.dtype)
    rest = m.call("Mod", x, divisor, fmod=1)
    other_sign = m.call("Less" if number > 0 else "Greater", rest, zero)
    return m.call("Where", other_sign, m.call("Add", rest, divisor), rest)


def _floor_divide(m: Model, x: Value, y: Value) -> str:
    """Rounded towards minus infinity, from the remainder as PyTorch does; an integer by zero gives no error."""
    zero, one = m.number(0, x.dtype), m.number(1, x.dtype)
    if x.floating:
        rest = m.call("Mod", x, y, fmod=1)
        quotient = m.call("Div", m.call("Sub", x, rest), y)
    else:
        divisor = m.call("Where", m.call("Equal", y, zero), one, y)
        quotient = m.call("Div", x, divisor)
        rest = m.call("Sub", x, m.call("Mul", quotient, divisor))
    other_sign = m.call("Xor", m.call("Less", rest, zero), m.call("Less", y, zero))
    beyond = m.call("And", m.call("Not", m.call("Equal", rest, zero)), other_sign)
    lower = m.call("Where", beyond, m.call("Sub", quotient, one), quotient)
    if not x.floating:
        return lower
    # The difference above is rounded: half-even brings the quotient back to the whole number that it is.
    return m.call("Where", m.call("Equal", y, zero), m.call("Div", x, y), m.call("Round", lower))


def _sign(m: Model, x: Value) -> str:
    """NaN has none, which is 0."""
    sign = m.call("Sign", x)
    return m.call("Where", m.call("IsNaN", x), m.number(0, x.dtype), sign) if x.floating else sign


def _where(m: Model, condition: Value, x: Value, y: Value) -> str:
    if x.dtype is torch.bool:
        return m.call("Or", m.call("And", condition, x), m.call("And", m.call("Not", condition), y))
    return m.call("Where", condition, x, y)


def _clamp(m: Model, x: Value, least: Any, most: Any) -> str:
    result = x.name
    if least is not None:
        result = m.call("Max", result, m.number(least, x.dtype))
    if most is not None:
        result = m.call("Min", result, m.number(most, x.dtype))
    return result


def _cast(m: Model, x: Value, *, dtype: torch.dtype) -> str:
    return x.name if compute_dtype(dtype) is x.dtype else m.cast(x, compute_dtype(dtype))


def functions() -> dict[str, Callable[..., Any]]:
    """By the names of `hal.ops.OPS`."""
    table: dict[str, Callable[..., Any]] = {}
    for op in ("Exp", "Log", "Sqrt", "Reciprocal", "Sin", "Cos", "Tanh", "Erf", "Floor", "Ceil", "Round"):
        table[f"{op.lower()}.default"] = _unary(op)
    table |= {"neg.default": _unary("Neg"), "abs.default": _unary("Abs")}
    table |= {f"{op.lower()}.Scalar": _with_number(op) for op in ("Add", "Mul", "Div")}
    for suffix in ("Tensor", "Scalar"):
        table |= {
            f"eq.{suffix}": _compare("Equal"),
            f"ne.{suffix}": _compare("Equal", negated=True),
            f"lt.{suffix}": _compare("Less"),
            f"le.{suffix}": _compare("LessOrEqual"),
            f"gt.{suffix}": _compare("Greater"),
            f"ge.{suffix}": _compare("GreaterOrEqual"),
        }
    table |= {
        "expm1.default": _expm1,
        "log1p.default": _log1p,
        "sigmoid.default": _sigmoid,
        "rsqrt.default": _rsqrt,
        "tan.default": _tan,
        "trunc.default": _trunc,
        "sign.default": _sign,
        "gelu.default": _gelu,
        "relu.default": _relu,
        "logical_not.default": _unary("Not"),
        "logical_and.default": _binary("And"),
        "logical_or.default": _binary("Or"),
        "bitwise_not.default": _bitwise("BitwiseNot", "Not"),
        "bitwise_and.Tensor": _bitwise("BitwiseAnd", "And"),
        "bitwise_or.Tensor": _bitwise("BitwiseOr", "Or"),
        "bitwise_xor.Tensor": _bitwise("BitwiseXor", "Xor"),
        "add.Tensor": _binary("Add", "Or"),
        "sub.Tensor": _binary("Sub"),
        "mul.Tensor": _binary("Mul", "And"),
        "div.Tensor": _binary("Div"),
        "maximum.default": _binary("Max", "Or"),
        "minimum.default": _binary("Min", "And"),
        "pow.Tensor_Tensor": _binary("Pow"),
        "pow.Tensor_Scalar": _power,
        "pow.Scalar": _power_of_number,
        "atan2.default": _atan2,
        "floor_divide.default": _floor_divide,
        "fmod.Tensor": _fmod,
        "fmod.Scalar": _fmod,
        "remainder.Scalar": _remainder,
        "where.self": _where,
        "clamp.default": _clamp,
        "_to_copy.default": _cast,
    }
    return {f"aten.{name}": function for name, function in table.items()}
