"""Rewrites of mathematical functions that are not in the table of ops to functions that are.

Part of the core lowering (`relay.capture.core.lowering`). The formulas keep their precision near zero and their values
at infinity. Source: identities of inverse and hyperbolic functions, Abramowitz and Stegun, chapter 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from relay.capture.core.builder import Builder, part_spec
from relay.capture.core.elementwise import elementwise

aten = torch.ops.aten

LARGE = 1e9
"""Above it x^2 + 1 and x^2 - 1 round to x^2 in float32 and float64, and x^2 does not overflow."""


class _Numbers:
    """Short forms of calls on nodes of one shape and dtype."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder

    def unary(self, name: str, x: fx.Node) -> fx.Node:
        return self.builder.call(getattr(aten, name).default, x)

    def binary(self, name: str, x: fx.Node, y: fx.Node) -> fx.Node:
        return self.builder.call(getattr(aten, name).Tensor, x, y)

    def with_number(self, name: str, x: fx.Node, number: float) -> fx.Node:
        return self.builder.call(getattr(aten, name).Scalar, x, float(number))

    def where(self, condition: fx.Node, x: fx.Node, y: fx.Node) -> fx.Node:
        return self.builder.call(aten.where.self, condition, x, y)

    def complement(self, x: fx.Node) -> fx.Node:
        """sqrt((1 - x) (1 + x))."""
        less = self.with_number("add", self.unary("neg", x), 1)
        return self.unary("sqrt", self.binary("mul", less, self.with_number("add", x, 1)))


def _log2(n: _Numbers, x: fx.Node) -> fx.Node:
    return n.with_number("div", n.unary("log", x), math.log(2))


def _log10(n: _Numbers, x: fx.Node) -> fx.Node:
    return n.with_number("div", n.unary("log", x), math.log(10))


def _exp2(n: _Numbers, x: fx.Node) -> fx.Node:
    return n.builder.call(aten.pow.Scalar, 2.0, x)


def _sinh(n: _Numbers, x: fx.Node) -> fx.Node:
    return n.with_number("mul", n.binary("sub", n.unary("expm1", x), n.unary("expm1", n.unary("neg", x))), 0.5)


def _cosh(n: _Numbers, x: fx.Node) -> fx.Node:
    return n.with_number("mul", n.binary("add", n.unary("exp", x), n.unary("exp", n.unary("neg", x))), 0.5)


def _asinh(n: _Numbers, x: fx.Node) -> fx.Node:
    size = n.unary("abs", x)
    square = n.binary("mul", size, size)
    root = n.unary("sqrt", n.with_number("add", square, 1))
    near = n.unary("log1p", n.binary("add", size, n.binary("div", square, n.with_number("add", root, 1))))
    far = n.with_number("add", n.unary("log", size), math.log(2))
    found = n.where(n.with_number("gt", size, LARGE), far, near)
    return n.where(n.with_number("lt", x, 0), n.unary("neg", found), found)


def _acosh(n: _Numbers, x: fx.Node) -> fx.Node:
    above = n.with_number("add", x, -1)
    root = n.unary("sqrt", n.binary("mul", above, n.with_number("add", x, 1)))
    far = n.with_number("add", n.unary("log", x), math.log(2))
    return n.where(n.with_number("gt", x, LARGE), far, n.unary("log1p", n.binary("add", above, root)))


def _atanh(n: _Numbers, x: fx.Node) -> fx.Node:
    return n.with_number("mul", n.binary("sub", n.unary("log1p", x), n.unary("log1p", n.unary("neg", x))), 0.5)


def _atan(n: _Numbers, x: fx.Node) -> fx.Node:
    spec = part_spec(x)
    return n.builder.call(aten.atan2.default, x, n.builder.full(spec.shape, 1.0, spec.dtype))


def _asin(n: _Numbers, x: fx.Node) -> fx.Node:
    return n.builder.call(aten.atan2.default, x, n.complement(x))


def _acos(n: _Numbers, x: fx.Node) -> fx.Node:
    return n.builder.call(aten.atan2.default, n.complement(x), x)


_OF_ONE: dict[Any, Callable[[_Numbers, fx.Node], fx.Node]] = {
    aten.log2.default: _log2,
    aten.log10.default: _log10,
    aten.exp2.default: _exp2,
    aten.sinh.default: _sinh,
    aten.cosh.default: _cosh,
    aten.asinh.default: _asinh,
    aten.acosh.default: _acosh,
    aten.atanh.default: _atanh,
    aten.atan.default: _atan,
    aten.asin.default: _asin,
    aten.acos.default: _acos,
}


def _of_one(builder: Builder, call: Any) -> fx.Node:
    return _OF_ONE[call.target](_Numbers(builder), builder.cast(call.x, call.wanted.dtype))


def _both(builder: Builder, call: Any) -> tuple[fx.Node, fx.Node]:
    """The two operands, expanded and cast to the shape and dtype of the result."""
    shape, dtype = call.wanted.shape, call.wanted.dtype
    x, y = (
        builder.expand(builder.cast(x, dtype), shape) if isinstance(x, fx.Node) else builder.full(shape, x, dtype)
        for x in call.args[:2]
    )
    return x, y


def _hypot(builder: Builder, call: Any) -> fx.Node:
    """larger * sqrt(1 + (smaller / larger)^2), in which no square overflows."""
    n = _Numbers(builder)
    x, y = (n.unary("abs", operand) for operand in _both(builder, call))
    large, small = builder.call(aten.maximum.default, x, y), builder.call(aten.minimum.default, x, y)
    ratio = n.binary("div", small, large)
    root = n.unary("sqrt", n.with_number("add", n.binary("mul", ratio, ratio), 1))
    plain = builder.call(aten.logical_or.default, n.with_number("eq", large, 0), n.with_number("eq", large, math.inf))
    return n.where(plain, large, n.binary("mul", large, root))


def _negative(n: _Numbers, x: fx.Node) -> fx.Node:
    """Whether x has its sign bit set. A negative zero has a negative reciprocal."""
    turned = n.with_number("lt", n.unary("reciprocal", x), 0)
    return n.builder.call(aten.logical_or.default, n.with_number("lt", x, 0), turned)


def _copysign(builder: Builder, call: Any) -> fx.Node:
    n = _Numbers(builder)
    x, y = _both(builder, call)
    size = n.unary("abs", x)
    return n.where(_negative(n, y), n.unary("neg", size), size)


def _signbit(builder: Builder, call: Any) -> fx.Node:
    if not call.spec.dtype.is_floating_point:
        return builder.call(aten.lt.Scalar, call.x, 0)
    return _negative(_Numbers(builder), call.x)


def _remainder(builder: Builder, call: Any) -> fx.Node:
    """remainder (with the sign of the divisor) and fmod (that of the dividend), from whichever is in the table."""
    n = _Numbers(builder)
    x, y = _both(builder, call)
    dividends = call.target is aten.fmod.Tensor
    if call.wanted.dtype.is_floating_point:
        rest = builder.call(aten.fmod.Tensor, x, y)
        if dividends:
            return rest
    else:
        quotient = builder.call(aten.floor_divide.default, x, y)
        rest = n.binary("sub", x, n.binary("mul", quotient, y))
        if not dividends:
            return rest
    zero = builder.full(call.wanted.shape, 0, call.wanted.dtype)
    below, wrong = (builder.call(aten.lt.Tensor, number, zero) for number in (rest, x if dividends else y))
    other_sign = builder.call(aten.ne.Tensor, builder.cast(below, torch.int64), builder.cast(wrong, torch.int64))
    beyond = builder.call(aten.logical_and.default, builder.call(aten.ne.Tensor, rest, zero), other_sign)
    return n.where(beyond, n.binary("sub" if dividends else "add", rest, y), rest)


def _ldexp(builder: Builder, call: Any) -> fx.Node:
    n = _Numbers(builder)
    x, exponent = _both(builder, call)
    return n.binary("mul", x, n.builder.call(aten.pow.Scalar, 2.0, exponent))


def _bitwise(builder: Builder, call: Any) -> Any:
    target = {
        aten.bitwise_and.Scalar: aten.bitwise_and.Tensor,
        aten.bitwise_or.Scalar: aten.bitwise_or.Tensor,
        aten.bitwise_xor.Scalar: aten.bitwise_xor.Tensor,
    }[call.target]
    return elementwise(builder, target, [*_both(builder, call)], {}, call.wanted)


MATHEMATICS: dict[Any, Callable[[Builder, Any], Any]] = {
    **dict.fromkeys(_OF_ONE, _of_one),
    aten.hypot.default: _hypot,
    aten.copysign.Tensor: _copysign,
    aten.copysign.Scalar: _copysign,
    aten.signbit.default: _signbit,
    aten.remainder.Tensor: _remainder,
    aten.fmod.Tensor: _remainder,
    aten.ldexp.Tensor: _ldexp,
    aten.bitwise_and.Scalar: _bitwise,
    aten.bitwise_or.Scalar: _bitwise,
    aten.bitwise_xor.Scalar: _bitwise,
}
"""Rewrites by overload, for `relay.capture.core.lowering.REWRITES`."""
