"""Arguments for the ops that compute: element-wise ones, reductions, scans, normalisations, matrix products.

Invariant: the arguments obey the rule of the op's row, and no result depends on what the op leaves open.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hal.conformance.samples.sampler import INTEGERS, Draw, Sampler, table_of


def _unary(low: float = -3.0, high: float = 3.0) -> Draw:
    return lambda s: [s.real(s.shape(), low, high)]


def _unary_special(s: Sampler) -> list[Any]:
    return [s.special(s.shape())]


def _any_number(s: Sampler) -> list[Any]:
    return [s.number()]


def _signed(s: Sampler) -> list[Any]:
    shape = s.shape()
    return [s.special(shape) if s.flag() else s.integers(shape, dtype=s.random.choice(INTEGERS[:-1]))]


def _pair(s: Sampler) -> list[Any]:
    x = s.number()
    other = s.broadcasting(x.shape)
    y = s.special(other) if x.dtype.is_floating_point else s.integers(other, dtype=x.dtype)
    return [x, y] if s.flag() else [y, x]


def _real_pair(low: float, high: float) -> Draw:
    def draw(s: Sampler) -> list[Any]:
        shape = s.shape()
        return [s.real(shape, low, high), s.real(s.broadcasting(shape), low, high)]

    return draw


def _floor_divided(s: Sampler) -> list[Any]:
    shape = s.shape()
    other = s.broadcasting(shape)
    if s.flag():
        return [s.real(shape, -9.0, 9.0), s.real(other, 0.7, 3.0)]
    x = s.integers(shape)
    divisor = s.integers(other, 1, 5, x.dtype)
    return [x, -divisor if s.flag() and x.dtype is not torch.uint8 else divisor]


def _booleans(s: Sampler) -> list[Any]:
    shape = s.shape()
    return [s.booleans(shape), s.booleans(s.broadcasting(shape))]


def _bits(s: Sampler) -> list[Any]:
    shape = s.shape()
    if s.flag():
        return [s.booleans(shape), s.booleans(s.broadcasting(shape))]
    x = s.integers(shape)
    return [x, s.integers(s.broadcasting(shape), dtype=x.dtype)]


def _with_number(low: float, high: float) -> Draw:
    def draw(s: Sampler) -> list[Any]:
        shape = s.shape()
        if s.random.random() < 0.7:
            return [s.special(shape), s.random.uniform(low, high)]
        return [s.integers(shape), s.random.randint(max(1, math.ceil(low)), max(1, math.floor(high)))]

    return draw


def _compared(s: Sampler) -> list[Any]:
    x = s.number()
    if x.dtype.is_floating_point:
        return [x, s.random.choice((0.0, 1.0, math.inf, -math.inf, s.random.uniform(-3, 3)))]
    return [x, s.random.randint(0, 5)]


def _where(s: Sampler) -> list[Any]:
    shape = s.shape()
    x = s.any_dtype(s.broadcasting(shape))
    y = s.broadcasting(shape)
    if x.dtype.is_floating_point:
        other = s.special(y)
    else:
        other = s.booleans(y) if x.dtype is torch.bool else s.integers(y, dtype=x.dtype)
    return [s.booleans(shape), x, other]


def _clamp(s: Sampler) -> list[Any]:
    x = s.number()
    bounds: list[Any] = [-1.5, 2.0] if x.dtype.is_floating_point else [1, 4]
    if s.flag():
        bounds[s.random.randrange(2)] = None
    return [x, *bounds]


def _cast(s: Sampler) -> list[Any]:
    shape = s.shape()
    real = s.floating if s.floating is torch.float64 or s.flag() else torch.float32
    target = s.random.choice((real, real, torch.int64, torch.int32, torch.bool))
    # Casting what an integer cannot hold is not defined, so it is not tried.
    x = s.real(shape, 0.0, 100.0) if s.flag() else s.integers(shape, 0, 9) if s.flag() else s.booleans(shape)
    return [x, {"dtype": target}]


def _reduced(s: Sampler) -> list[Any]:
    shape = s.shape(1, empty=False)
    x = s.real(shape) if s.random.random() < 0.7 else s.integers(shape, dtype=torch.int64)
    return [x, s.dims(shape), s.flag()]


def _mean(s: Sampler) -> list[Any]:
    shape = s.shape(1, empty=False)
    return [s.real(shape), s.dims(shape), s.flag()]


def _any(s: Sampler) -> list[Any]:
    shape = s.shape(1)
    return [s.booleans(shape), s.dim(shape), s.flag()]


def _extreme_index(s: Sampler) -> list[Any]:
    shape = s.shape(1, 3, empty=False)
    return [s.distinct(shape), s.dim(shape), s.flag()]


def _product(s: Sampler) -> list[Any]:
    shape = s.shape(1, 3, empty=False)
    return [s.real(shape, 0.5, 1.5), s.dim(shape), s.flag()]


def _scan(s: Sampler) -> list[Any]:
    shape = s.shape(1, 3)
    return [s.real(shape, 0.5, 1.5), s.dim(shape)]


def _softmax(s: Sampler) -> list[Any]:
    shape = s.shape(1, empty=False)
    return [s.real(shape, -9.0, 9.0), s.dim(shape), False]


def _safe_softmax(s: Sampler) -> list[Any]:
    x, dim, _ = _softmax(s)
    x = torch.where(s.booleans(x.shape), x, -math.inf)
    return [torch.where(s.booleans(x.select(dim, 0).shape).unsqueeze(dim), x, -math.inf), dim]


def _layer_norm(s: Sampler) -> list[Any]:
    shape = s.shape(1, empty=False)
    shape[-1] = max(shape[-1], 3)
    inner = shape[s.random.randrange(len(shape)) :]
    weight = s.real(inner) if s.flag() else None
    return [s.real(shape), inner, weight, s.real(inner) if s.flag() else None, s.random.choice((1e-5, 1e-3))]


def _mm(s: Sampler) -> list[Any]:
    rows, inner, columns = s.extent(), s.extent(), s.extent()
    return [s.real([rows, inner]), s.real([inner, columns])]


def _addmm(s: Sampler) -> list[Any]:
    x, y = _mm(s)
    return [s.real(s.broadcasting([x.shape[0], y.shape[1]])), x, y]


def _bmm(s: Sampler) -> list[Any]:
    batch, rows, inner, columns = s.random.randint(1, 5), s.extent(), s.extent(), s.extent()
    return [s.real([batch, rows, inner]), s.real([batch, inner, columns])]


ARITHMETIC: dict[str, Draw] = table_of(
    [
        (_unary_special, "exp.default expm1.default sin.default cos.default tanh.default sigmoid.default erf.default"),
        (_unary_special, "floor.default ceil.default trunc.default round.default"),
        (_unary(0.1, 4.0), "log.default sqrt.default rsqrt.default reciprocal.default"),
        (_unary(-0.8, 4.0), "log1p.default"),
        (_unary(-1.4, 1.4), "tan.default"),
        (lambda s: [s.real(s.shape()), {"approximate": s.random.choice(("none", "tanh"))}], "gelu.default"),
        (_signed, "neg.default abs.default sign.default"),
        (_any_number, "relu.default"),
        (lambda s: [s.booleans(s.shape())], "logical_not.default"),
        (_floor_divided, "floor_divide.default"),
        (_booleans, "logical_and.default logical_or.default"),
        (lambda s: _bits(s)[:1], "bitwise_not.default"),
        (_bits, "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor"),
        (_pair, "add.Tensor sub.Tensor mul.Tensor maximum.default minimum.default"),
        (_pair, "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor"),
        (_real_pair(0.2, 3.0), "div.Tensor pow.Tensor_Tensor atan2.default"),
        (_real_pair(0.2, 3.0), "fmod.Tensor"),
        (_with_number(-3.0, 3.0), "add.Scalar mul.Scalar"),
        (lambda s: [s.special(s.shape()), s.random.choice((-2.0, 0.5, 3.0))], "div.Scalar"),
        (lambda s: [s.real(s.shape(), 0.1, 3.0), s.random.choice((-2.0, 1.5, 4.0))], "pow.Tensor_Scalar"),
        (lambda s: [s.random.uniform(0.5, 3.0), s.real(s.shape())], "pow.Scalar"),
        (lambda s: [s.real(s.shape(), -9.0, 9.0), 2.0] if s.flag() else [s.integers(s.shape()), 3], "fmod.Scalar"),
        (lambda s: [s.real(s.shape(), -9.0, 9.0), 2.0] if s.flag() else [s.integers(s.shape()), 3], "remainder.Scalar"),
        (_compared, "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar"),
        (_where, "where.self"),
        (_clamp, "clamp.default"),
        (_cast, "_to_copy.default"),
        (_reduced, "sum.dim_IntList amax.default amin.default"),
        (_mean, "mean.dim"),
        (_any, "any.dim"),
        (_extreme_index, "argmax.default argmin.default"),
        (_product, "prod.dim_int"),
        (_scan, "cumsum.default cumprod.default"),
        (_softmax, "_softmax.default _log_softmax.default"),
        (_safe_softmax, "_safe_softmax.default"),
        (_layer_norm, "native_layer_norm.default"),
        (_mm, "mm.default"),
        (_bmm, "bmm.default"),
        (_addmm, "addmm.default"),
    ]
)
"""By the names of `hal.ops.OPS`."""
