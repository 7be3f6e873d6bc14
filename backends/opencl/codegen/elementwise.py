"""Element-wise ops as C expressions, inlined wherever their result is used.

Each entry takes the C names of the operands and the dtype in which it computes. Results whose dtype is half precision
are rounded where they arise, as the ops define. Functions of float come from the prelude where those
vectorise, else from OpenCL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from backends.opencl.codegen.emit import Scope, c_type, number, rounded
from backends.opencl.codegen.values import Computed, Coordinates, Value, expand
from hal.ops.rules import broadcast

DEAR = 8
"""What a transcendental function costs, in cheap operations."""

Form = Callable[[torch.dtype, Sequence[str]], str]


def _infix(sign: str) -> Form:
    return lambda dtype, x: f"({x[0]} {sign} {x[1]})"


def _call(name: str, single: str = "") -> Form:
    """A function: OpenCL's, or for float one of the prelude's."""

    def form(dtype: torch.dtype, x: Sequence[str]) -> str:
        function = name if dtype is torch.float64 or not single else single
        return f"{function}({', '.join(x)})"

    return form


def _text(template: str) -> Form:
    return lambda dtype, x: template.format(*x, one=number(1, dtype), zero=number(0, dtype))


def _wrapped(sign: str) -> Form:
    """Integer arithmetic that wraps around: by unsigned numbers, since signed overflow is undefined in C."""

    def form(dtype: torch.dtype, x: Sequence[str]) -> str:
        if dtype.is_floating_point:
            return f"({x[0]} {sign} {x[1]})"
        kind = c_type(dtype)
        if dtype is torch.bool:
            return {"+": f"({x[0]} | {x[1]})", "*": f"({x[0]} & {x[1]})", "-": f"({x[0]} ^ {x[1]})"}[sign]
        return f"(({kind})((ulong){x[0]} {sign} (ulong){x[1]}))"

    return form


def _extreme(sign: str) -> Form:
    """Maximum or minimum; NaN wins."""

    def form(dtype: torch.dtype, x: Sequence[str]) -> str:
        plain = f"({x[0]} {sign} {x[1]} ? {x[0]} : {x[1]})"
        return f"({x[0]} != {x[0]} ? {x[0]} : {plain})" if dtype.is_floating_point else plain

    return form


def _negative(dtype: torch.dtype, x: Sequence[str]) -> str:
    return f"(-{x[0]})" if dtype.is_floating_point else f"(({c_type(dtype)})(0 - (ulong){x[0]}))"


def _absolute(dtype: torch.dtype, x: Sequence[str]) -> str:
    if dtype.is_floating_point:
        return f"fabs({x[0]})"
    return f"({x[0]} < 0 ? ({c_type(dtype)})(0 - (ulong){x[0]}) : {x[0]})"


def _sign(dtype: torch.dtype, x: Sequence[str]) -> str:
    kind = c_type(dtype)
    return f"(({kind})(({x[0]} > 0) - ({x[0]} < 0)))"


def _inverted(dtype: torch.dtype, x: Sequence[str]) -> str:
    return f"(!{x[0]})" if dtype is torch.bool else f"(({c_type(dtype)})~{x[0]})"


def _integer_power(dtype: torch.dtype, x: Sequence[str]) -> str:
    return f"(({c_type(dtype)})llpow({x[0]}, {x[1]}))"


def _power(dtype: torch.dtype, x: Sequence[str]) -> str:
    return f"pow({x[0]}, {x[1]})" if dtype.is_floating_point else _integer_power(dtype, x)


def _remainder(dtype: torch.dtype, x: Sequence[str]) -> str:
    """Of the divisor's sign, as Python's."""
    if dtype.is_floating_point:
        rest = f"fmod({x[0]}, {x[1]})"
        return f"({rest} != 0 && (({rest} < 0) != ({x[1]} < 0)) ? {rest} + {x[1]} : {rest})"
    rest = f"({x[0]} % {x[1]})"
    return f"(({c_type(dtype)})({rest} != 0 && (({rest} < 0) != ({x[1]} < 0)) ? {rest} + {x[1]} : {rest}))"


def _truncated_remainder(dtype: torch.dtype, x: Sequence[str]) -> str:
    return f"fmod({x[0]}, {x[1]})" if dtype.is_floating_point else f"(({c_type(dtype)})({x[0]} % {x[1]}))"


def _floor_divided(dtype: torch.dtype, x: Sequence[str]) -> str:
    """Integers by zero give zero here, and the least integer by -1 wraps: either would end the process on a CPU."""
    if dtype is torch.float64:
        return f"floor_divide_d({x[0]}, {x[1]})"
    if dtype.is_floating_point:
        return f"floor_divide_f({x[0]}, {x[1]})"
    return f"(({c_type(dtype)})floor_divide_l({x[0]}, {x[1]}))"


def _divided(dtype: torch.dtype, x: Sequence[str]) -> str:
    return f"({x[0]} / {x[1]})"


FORMS: dict[str, tuple[Form, int]] = {
    "exp": (_call("exp", "exp_f"), DEAR),
    "expm1": (_call("expm1", "expm1_f"), DEAR),
    "log": (_call("log"), DEAR),
    "log1p": (_call("log1p"), DEAR),
    "sqrt": (_call("sqrt"), 2),
    "rsqrt": (_text("({one} / sqrt({0}))"), 3),
    "reciprocal": (_text("({one} / {0})"), 2),
    "sin": (_call("sin"), DEAR),
    "cos": (_call("cos"), DEAR),
    "tan": (_call("tan"), DEAR),
    "tanh": (_call("tanh", "tanh_f"), DEAR),
    "sigmoid": (
        lambda dtype, x: f"sigmoid_f({x[0]})" if c_type(dtype) == "float" else f"(1.0 / (1.0 + exp(-{x[0]})))",
        DEAR,
    ),
    "erf": (_call("erf", "erf_f"), DEAR),
    "floor": (_call("floor"), 1),
    "ceil": (_call("ceil"), 1),
    "trunc": (_call("trunc"), 1),
    "round": (_call("rint"), 1),
    "neg": (_negative, 1),
    "abs": (_absolute, 1),
    "sign": (_sign, 1),
    "relu": (_text("({0} < {zero} ? {zero} : {0})"), 1),
    "logical_not": (_text("(!{0})"), 1),
    "logical_and": (_infix("&&"), 1),
    "logical_or": (_infix("||"), 1),
    "bitwise_not": (_inverted, 1),
    "bitwise_and": (_infix("&"), 1),
    "bitwise_or": (_infix("|"), 1),
    "bitwise_xor": (_infix("^"), 1),
    "add": (_wrapped("+"), 1),
    "sub": (_wrapped("-"), 1),
    "mul": (_wrapped("*"), 1),
    "div": (_divided, 2),
    "floor_divide": (_floor_divided, DEAR),
    "maximum": (_extreme(">"), 1),
    "minimum": (_extreme("<"), 1),
    "pow": (_power, DEAR),
    "atan2": (_call("atan2"), DEAR),
    "fmod": (_truncated_remainder, DEAR),
    "remainder": (_remainder, DEAR),
    "eq": (_infix("=="), 1),
    "ne": (_infix("!="), 1),
    "lt": (_infix("<"), 1),
    "le": (_infix("<="), 1),
    "gt": (_infix(">"), 1),
    "ge": (_infix(">="), 1),
    "where": (_text("({0} ? {1} : {2})"), 1),
}


def _small_power(dtype: torch.dtype, x: str, exponent: float) -> str | None:
    """Powers that are worth writing out, as PyTorch does."""
    one = number(1, dtype)
    table = {
        0.5: f"sqrt({x})",
        2.0: f"({x} * {x})",
        3.0: f"({x} * {x} * {x})",
        -0.5: f"({one} / sqrt({x}))",
        -1.0: f"({one} / {x})",
        -2.0: f"({one} / ({x} * {x}))",
        1.0: x,
    }
    return table.get(float(exponent)) if dtype.is_floating_point else None


def elementwise(op: str, args: Sequence[Any], keywords: dict[str, Any], dtype: torch.dtype) -> Value:
    """The value of an op by its short name (`add`, `where`), operands as Value or numbers."""
    tensors = [arg for arg in args if isinstance(arg, Value)]
    shape = broadcast(*[tensor.shape for tensor in tensors])
    operands = [expand(arg, shape) if isinstance(arg, Value) else arg for arg in args]
    inner = tensors[-1].dtype if op == "where" else tensors[0].dtype

    def names(scope: Scope, coordinates: Coordinates) -> list[str]:
        return [arg.at(scope, coordinates) if isinstance(arg, Value) else number(arg, inner) for arg in operands]

    if op == "_to_copy":
        return _cast(tensors[0], dtype)
    if op == "clamp":
        return _clamp(tensors[0], operands[1], operands[2])
    price = sum(tensor.cost for tensor in tensors)
    if op == "gelu":
        form, cost = _gelu(keywords["approximate"]), DEAR
    else:
        form, cost = FORMS[op]
    if op == "pow" and not isinstance(operands[1], Value):
        exponent = operands[1]
        if _small_power(inner, "x", exponent) is not None:
            cost = 2

            def form(kind: torch.dtype, x: Sequence[str]) -> str:
                return _small_power(kind, x[0], exponent) or x[0]

    if op == "div" and not isinstance(operands[1], Value):
        cost = 1

    def function(scope: Scope, coordinates: Coordinates) -> str:
        return scope.value(c_type(dtype), rounded(form(inner, names(scope, coordinates)), dtype))

    return Computed(shape, dtype, function, price + cost)


def _gelu(approximate: str) -> Form:
    """Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv 1606.08415."""

    def form(dtype: torch.dtype, x: Sequence[str]) -> str:
        wide = dtype is torch.float64
        half = number(0.5, dtype)
        one = number(1, dtype)
        if approximate == "tanh":
            cube = f"({x[0]} + {number(0.044715, dtype)} * {x[0]} * {x[0]} * {x[0]})"
            inside = f"{'tanh' if wide else 'tanh_f'}({number(math.sqrt(2 / math.pi), dtype)} * {cube})"
        else:
            inside = f"{'erf' if wide else 'erf_f'}({x[0]} * {number(math.sqrt(0.5), dtype)})"
        return f"({half} * {x[0]} * ({one} + {inside}))"

    return form


def _clamp(x: Value, least: Any, most: Any) -> Value:
    def function(scope: Scope, coordinates: Coordinates) -> str:
        name = x.at(scope, coordinates)
        for bound, sign in ((least, "<"), (most, ">")):
            if bound is not None:  # a NaN is neither and stays
                limit = number(bound, x.dtype)
                name = scope.value(c_type(x.dtype), f"({name} {sign} {limit} ? {limit} : {name})")
        return name

    return Computed(x.shape, x.dtype, function, x.cost + 2)


def _cast(x: Value, dtype: torch.dtype) -> Value:
    def function(scope: Scope, coordinates: Coordinates) -> str:
        name = x.at(scope, coordinates)
        if dtype is torch.bool:
            return scope.value("int", f"({name} != 0)")
        if c_type(x.dtype) == c_type(dtype) and rounded("", dtype) == "":
            return name
        if x.dtype.is_floating_point and dtype in (torch.uint8, torch.int8, torch.int16):
            name = f"(int)({name})"  # out of the small type's range, PyTorch converts by way of a wider type
        return scope.value(c_type(dtype), rounded(f"(({c_type(dtype)})({name}))", dtype))

    return Computed(x.shape, dtype, function, x.cost + (0 if c_type(x.dtype) == c_type(dtype) else 1))
