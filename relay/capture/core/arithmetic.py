"""Rewrites of element-wise arithmetic in all overloads, of ops that create tensors, and of `addmm`.

Part of the core lowering (`relay.capture.core.lowering`). Each function takes the builder and the call, and returns the
node (or tuple of nodes) that replaces it, or None to leave the op as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from hal.ops.rules import Spec, broadcast
from relay.capture.core.builder import Builder, part_spec
from relay.capture.core.call import Call
from relay.capture.core.elementwise import as_number, elementwise

aten = torch.ops.aten


def _add(builder: Builder, call: Call) -> Any:
    """add and sub. The second operand may have a factor `alpha`, and the first may be a number."""
    first, second = call.args
    alpha = call.get("alpha")
    dtype = call.wanted.dtype
    if alpha != 1:
        if isinstance(second, fx.Node):
            factor = as_number(alpha, dtype)
            second = elementwise(builder, aten.mul.Scalar, [second, factor], {}, Spec(part_spec(second).shape, dtype))
        else:
            second *= alpha
    subtracts = call.target in (aten.sub.Tensor, aten.sub.Scalar)
    if not subtracts:
        return elementwise(builder, aten.add.Tensor, [first, second], {}, call.wanted)
    if not isinstance(second, fx.Node):
        return elementwise(builder, aten.add.Tensor, [first, -second], {}, call.wanted)
    if not isinstance(first, fx.Node):
        negative = builder.call(aten.neg.default, builder.cast(second, dtype))
        return elementwise(builder, aten.add.Tensor, [negative, first], {}, call.wanted)
    return elementwise(builder, aten.sub.Tensor, [first, second], {}, call.wanted)


def _scalar_form(builder: Builder, call: Call) -> Any:
    """mul.Scalar and div.Scalar, whose operands may be of any dtype."""
    target = aten.mul.Tensor if call.target is aten.mul.Scalar else aten.div.Tensor
    return elementwise(builder, target, call.args[:2], {}, call.wanted)


def _power(builder: Builder, call: Call) -> Any:
    exponent = call.args[1]
    x = builder.cast(call.x, call.wanted.dtype)
    if exponent == 1:
        return x
    if exponent in (2, 3):
        square = builder.call(aten.mul.Tensor, x, x)
        return square if exponent == 2 else builder.call(aten.mul.Tensor, square, x)
    simple = {0.5: aten.sqrt.default, -0.5: aten.rsqrt.default, -1: aten.reciprocal.default}.get(exponent)
    if simple is not None and call.wanted.dtype.is_floating_point:
        return builder.call(simple, x)
    return elementwise(builder, call.target, call.args, {}, call.wanted)


def _rounded_division(builder: Builder, call: Call) -> Any:
    mode = call.get("rounding_mode")
    if mode == "floor":
        return elementwise(builder, aten.floor_divide.default, call.args[:2], {}, call.wanted)
    quotient = elementwise(builder, aten.div.Tensor, call.args[:2], {}, call.wanted)  # refuses integers
    return quotient if mode is None else builder.call(aten.trunc.default, quotient)


def _clamp_tensor(builder: Builder, call: Call) -> Any:
    x = call.x
    for bound, target in ((call.get("min"), aten.maximum.default), (call.get("max"), aten.minimum.default)):
        if bound is not None:
            shape = broadcast(part_spec(x).shape, part_spec(bound).shape)
            x = elementwise(builder, target, [x, bound], {}, Spec(shape, call.wanted.dtype))
    return x


def _is_nan(builder: Builder, call: Call) -> Any:
    return builder.call(aten.ne.Tensor, call.x, call.x)


def _is_inf(builder: Builder, call: Call) -> Any:
    return builder.call(aten.eq.Scalar, builder.call(aten.abs.default, call.x), math.inf)


def _full(builder: Builder, call: Call) -> Any:
    constants = {"zeros": 0, "ones": 1, "empty": 0}
    value = constants.get(call.target._schema.name.split("::")[1].removeprefix("new_").split("_")[0])
    if value is None:
        value = call.get("s") if call.target is aten.scalar_tensor.default else call.get("fill_value")
    return builder.full(call.wanted.shape, value, call.wanted.dtype)


def _arange(builder: Builder, call: Call) -> Any:
    start = 0 if call.target is aten.arange.default else call.get("start")
    step = call.get("step") if call.target is aten.arange.start_step else 1
    return builder.call(aten.arange.start_step, start, call.get("end"), step, dtype=call.wanted.dtype)


def _addmm(builder: Builder, call: Call) -> Any:
    bias, x, y = call.args[:3]
    alpha, beta = call.get("alpha"), call.get("beta")
    if alpha == 1 and beta == 1:
        return builder.call(aten.addmm.default, bias, x, y)
    product = builder.call(aten.mm.default, x, y)
    if alpha != 1:
        product = builder.call(aten.mul.Scalar, product, as_number(alpha, call.wanted.dtype))
    if beta == 0:
        return product
    scaled = bias if beta == 1 else builder.call(aten.mul.Scalar, bias, as_number(beta, call.wanted.dtype))
    return builder.call(aten.add.Tensor, scaled, product)


def _dropout(builder: Builder, call: Call) -> Any:
    """Dropout without effect. Dropout in training was replaced by a draw of `hal.random` before."""
    if call.get("train") is not False and call.args[1] != 0:
        return None
    return call.x, builder.full(call.spec.shape, True, torch.bool)


ARITHMETIC: dict[Any, Callable[[Builder, Call], Any]] = {
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _add,
    aten.sub.Scalar: _add,
    aten.mul.Scalar: _scalar_form,
    aten.div.Scalar: _scalar_form,
    aten.div.Tensor_mode: _rounded_division,
    aten.div.Scalar_mode: _rounded_division,
    aten.pow.Tensor_Scalar: _power,
    aten.clamp.Tensor: _clamp_tensor,
    aten.isnan.default: _is_nan,
    aten.isinf.default: _is_inf,
    aten.full.default: _full,
    aten.full_like.default: _full,
    aten.empty.memory_format: _full,
    aten.empty_like.default: _full,
    aten.new_empty.default: _full,
    aten.zeros.default: _full,
    aten.zeros_like.default: _full,
    aten.ones.default: _full,
    aten.ones_like.default: _full,
    aten.new_zeros.default: _full,
    aten.new_ones.default: _full,
    aten.new_full.default: _full,
    aten.scalar_tensor.default: _full,
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.addmm.default: _addmm,
    aten.native_dropout.default: _dropout,
}
