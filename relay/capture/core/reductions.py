"""Rewrites of reductions, scans, softmax and normalisations to ops of the table.

Part of the core lowering (`relay.capture.core.lowering`). Each function takes the builder and the call, and returns the
node (or tuple of nodes) that replaces it, or None to leave the op as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from hal.dtypes import widened
from hal.ops.rules import Spec
from relay.capture.core.builder import Builder, part_spec
from relay.capture.core.call import Call
from relay.capture.core.elementwise import truth

aten = torch.ops.aten


def _dims(call: Call) -> list[int]:
    names = {argument.name for argument in call.target._schema.arguments}
    given = call.get("dim") if "dim" in names else None
    if isinstance(given, int):
        given = [given]
    rank = len(call.spec.shape)
    return sorted(dim % rank for dim in given) if given else list(range(rank))


def _keep(call: Call) -> bool:
    names = {argument.name for argument in call.target._schema.arguments}
    return bool("keepdim" in names and call.get("keepdim"))


def _reduce(builder: Builder, call: Call) -> Any:
    target = {
        "sum": aten.sum.dim_IntList,
        "mean": aten.mean.dim,
        "amax": aten.amax.default,
        "amin": aten.amin.default,
        "max": aten.amax.default,
        "min": aten.amin.default,
    }[call.target._schema.name.split("::")[1]]
    x = builder.cast(call.x, call.wanted.dtype)
    dims = _dims(call)
    if target is aten.sum.dim_IntList and all(call.spec.shape[dim] == 1 for dim in dims):
        return builder.view(x, call.wanted.shape) if dims else x
    return builder.call(target, x, dims, _keep(call)) if dims else x


def _extreme_and_index(builder: Builder, call: Call) -> Any:
    largest = call.target is aten.max.dim
    dim, keep = call.dim(), _keep(call)
    values = builder.call(aten.amax.default if largest else aten.amin.default, call.x, [dim], keep)
    return values, builder.call(aten.argmax.default if largest else aten.argmin.default, call.x, dim, keep)


def _index_of_extreme(builder: Builder, call: Call) -> Any:
    x = builder.cast(call.x, torch.int64) if call.spec.dtype is torch.bool else call.x
    if call.get("dim") is not None:
        return builder.call(call.target, x, call.dim(), call.get("keepdim"))
    flat = builder.view(x, [call.spec.count])
    return builder.view(builder.call(call.target, flat, 0, False), call.wanted.shape)


def _any(builder: Builder, call: Call) -> Any:
    x = truth(builder, call.x)
    for dim in reversed(_dims(call)):
        x = builder.call(aten.any.dim, x, dim, _keep(call))
    return x


def _scan(builder: Builder, call: Call) -> Any:
    x = builder.cast(call.x, call.wanted.dtype)
    return builder.call(call.target, x, call.dim()) if call.spec.shape else x


def _product(builder: Builder, call: Call) -> Any:
    x = builder.cast(call.x, call.wanted.dtype)
    if call.target is aten.prod.default:
        x = builder.view(x, [call.spec.count])
        return builder.call(aten.prod.dim_int, x, 0, False)
    return builder.call(aten.prod.dim_int, x, call.dim(), call.get("keepdim"))


def _softmax(builder: Builder, call: Call) -> Any:
    x = builder.cast(call.x, call.wanted.dtype)
    if call.target is aten._safe_softmax.default:
        return builder.call(call.target, x, call.dim())
    return builder.call(call.target, x, call.dim(), False)


def _moments(builder: Builder, x: fx.Node, dims: Sequence[int], correction: float) -> tuple[fx.Node, fx.Node]:
    """Variance and mean over `dims`, with keepdim, computed in two passes."""
    spec = part_spec(x)
    count = math.prod(spec.shape[dim] for dim in dims)
    mean = builder.call(aten.mean.dim, x, list(dims), True)
    deviation = builder.call(aten.sub.Tensor, x, mean)
    squares = builder.call(aten.mul.Tensor, deviation, deviation)
    total = builder.call(aten.sum.dim_IntList, squares, list(dims), True)
    return builder.call(aten.div.Scalar, total, float(max(count - correction, 0))), mean


def _variance(builder: Builder, call: Call) -> Any:
    correction = call.get("correction")
    pair = _moments(builder, call.x, _dims(call), 1 if correction is None else correction)
    wanted = call.wanted if isinstance(call.wanted, tuple) and not isinstance(call.wanted, Spec) else (call.wanted,)
    parts = tuple(builder.view(part, spec.shape) for part, spec in zip(pair, wanted, strict=False))
    return parts if call.target is aten.var_mean.correction else parts[0]


def _group_norm(builder: Builder, call: Call) -> Any:
    """Group normalisation, in float32 for inputs of lower precision. Source: Wu and He, "Group Normalization", ECCV
    2018, equation 2.
    """
    spec, dtype = call.spec, widened(call.spec.dtype)
    x = builder.cast(call.x, dtype)
    groups = call.get("group")
    grouped = builder.view(x, [spec.shape[0], groups, spec.count // (spec.shape[0] * groups)])
    variance, mean = _moments(builder, grouped, [2], 0)
    scale = builder.call(aten.rsqrt.default, builder.call(aten.add.Scalar, variance, float(call.get("eps"))))
    centred = builder.call(aten.sub.Tensor, grouped, mean)
    result = builder.view(builder.call(aten.mul.Tensor, centred, scale), spec.shape)
    along = [1, spec.shape[1], *[1] * (len(spec.shape) - 2)]
    if call.get("weight") is not None:
        weight = builder.cast(call.get("weight"), dtype)
        result = builder.call(aten.mul.Tensor, result, builder.view(weight, along))
    if call.get("bias") is not None:
        bias = builder.cast(call.get("bias"), dtype)
        result = builder.call(aten.add.Tensor, result, builder.view(bias, along))
    statistics = [builder.view(part, call.wanted[1].shape) for part in (mean, scale)]
    found = zip([result, *statistics], call.wanted, strict=True)
    return tuple(builder.cast(part, wanted.dtype) for part, wanted in found)


def _layer_norm(builder: Builder, call: Call) -> Any:
    """Layer normalisation, in float32 for inputs of lower precision."""
    x, shape, weight, bias, epsilon = call.args
    dtype = widened(call.spec.dtype)
    parameters = [None if part is None else builder.cast(part, dtype) for part in (weight, bias)]
    node = builder.call(call.target, builder.cast(x, dtype), list(shape), *parameters, float(epsilon))
    return tuple(builder.cast(builder.item(node, index), wanted.dtype) for index, wanted in enumerate(call.wanted))


REDUCTIONS: dict[Any, Callable[[Builder, Call], Any]] = {
    aten.sum.default: _reduce,
    aten.sum.dim_IntList: _reduce,
    aten.mean.default: _reduce,
    aten.mean.dim: _reduce,
    aten.amax.default: _reduce,
    aten.amin.default: _reduce,
    aten.max.default: _reduce,
    aten.min.default: _reduce,
    aten.max.dim: _extreme_and_index,
    aten.min.dim: _extreme_and_index,
    aten.argmax.default: _index_of_extreme,
    aten.argmin.default: _index_of_extreme,
    aten.any.default: _any,
    aten.any.dim: _any,
    aten.any.dims: _any,
    aten.cumsum.default: _scan,
    aten.cumprod.default: _scan,
    aten.prod.default: _product,
    aten.prod.dim_int: _product,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten._safe_softmax.default: _softmax,
    aten.var.correction: _variance,
    aten.var_mean.correction: _variance,
    aten.native_group_norm.default: _group_norm,
    aten.native_layer_norm.default: _layer_norm,
}
