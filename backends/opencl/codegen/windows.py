"""Convolution and pooling as reductions over windows that are read in place: plain rather than fast.

Shapes: N samples, G groups, C channels in of a group, O channels out of a group; space may have any number of
dimensions. What a window meets outside its input is zero (or minus infinity, for the maximum).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from backends.opencl.codegen import scatters, values
from backends.opencl.codegen.elementwise import elementwise
from backends.opencl.codegen.emit import Scope, c_type, number
from backends.opencl.codegen.indices import Index
from backends.opencl.codegen.tasks import Tasks
from backends.opencl.codegen.values import Computed, Coordinates, Value, whole


def _met(scope: Scope, at: Sequence[Index], extents: Sequence[int]) -> tuple[Coordinates, str]:
    """Places brought inside the extents, and C for whether they were."""
    inside, coordinates = [], []
    for index, extent in zip(at, extents, strict=True):
        low, high = scope.ranges.bounds(index)
        if low >= 0 and high < extent:
            coordinates.append(index)
            continue
        name = scope.value("INDEX", index.text)
        inside.append(f"{name} >= 0 && {name} < {extent}")
        coordinates.append(scope.index(f"min(max({name}, (INDEX)0), (INDEX){extent - 1})", extent))
    return tuple(coordinates), " && ".join(inside) or "1"


def _moved(out: Sequence[Index], point: Sequence[Index], stride: Any, padding: Any, dilation: Any) -> list[Index]:
    return [
        index.times(step).plus(k.times(far)).plus(Index((), -pad))
        for index, k, step, pad, far in zip(out, point, stride, padding, dilation, strict=True)
    ]


def _grouped(x: Value, groups: int) -> Value:
    return values.view(x, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))


def _split(weight: Value, groups: int) -> Value:
    return values.view(weight, (groups, weight.shape[0] // groups, *weight.shape[1:]))


def _summed(tasks: Tasks, shape: Sequence[int], outer: int, dtype: torch.dtype, function: Any) -> Value:
    """The sum of a function over the last dimensions of a shape, in float."""
    real = torch.float64 if dtype is torch.float64 else torch.float32
    total = tasks.reduce("sum", Computed(tuple(shape), real, function), tuple(range(outer, len(shape))))
    result = values.view(total, shape[:outer])
    return result if real is dtype else elementwise("_to_copy", [result], {}, dtype)


def _correlate(tasks: Tasks, x: Value, weight: Value, out: Sequence[int], stride: Any, pad: Any, far: Any) -> Value:
    """(N, G, C, ...) under (G, O, C, kernel) to (N, G, O, ...)."""
    space = len(out)
    kernel = weight.shape[3:]
    shape = (x.shape[0], *weight.shape[:2], *out, weight.shape[2], *kernel)

    def function(scope: Scope, coordinates: Coordinates) -> str:
        n, g, o = coordinates[:3]
        c, point = coordinates[3 + space], coordinates[4 + space :]
        at, inside = _met(scope, _moved(coordinates[3 : 3 + space], point, stride, pad, far), x.shape[3:])
        product = f"{x.at(scope, (n, g, c, *at))} * {weight.at(scope, (g, o, c, *point))}"
        return scope.value(c_type(x.dtype), f"({inside} ? {product} : 0)")

    return _summed(tasks, shape, 3 + space, x.dtype, function)


def _spread(
    tasks: Tasks, gradient: Value, weight: Value, extents: Sequence[int], stride: Any, pad: Any, far: Any
) -> Value:
    """The transpose of `_correlate`: (N, G, O, ...) to (N, G, C, ...)."""
    space = len(extents)
    kernel = weight.shape[3:]
    shape = (gradient.shape[0], weight.shape[0], weight.shape[2], *extents, weight.shape[1], *kernel)

    def function(scope: Scope, coordinates: Coordinates) -> str:
        n, g, c = coordinates[:3]
        o, point = coordinates[3 + space], coordinates[4 + space :]
        at, hits = [], []
        for index, k, step, padding, spread, extent in zip(
            coordinates[3 : 3 + space], point, stride, pad, far, gradient.shape[3:], strict=True
        ):
            reach = scope.value("INDEX", index.plus(Index((), padding)).plus(k.times(-spread)).text)
            hits.append(f"{reach} >= 0 && {reach} % {step} == 0 && {reach} / {step} < {extent}")
            at.append(scope.index(f"min(max({reach} / {step}, (INDEX)0), (INDEX){extent - 1})", extent))
        product = f"{gradient.at(scope, (n, g, o, *at))} * {weight.at(scope, (g, o, c, *point))}"
        return scope.value(c_type(gradient.dtype), f"({' && '.join(hits) or '1'} ? {product} : 0)")

    return _summed(tasks, shape, 3 + space, gradient.dtype, function)


def _weight_gradient(
    tasks: Tasks, gradient: Value, x: Value, kernel: Sequence[int], stride: Any, pad: Any, far: Any
) -> Value:
    """(N, G, O, ...) and (N, G, C, ...) to (G, O, C, kernel)."""
    space = len(kernel)
    out = gradient.shape[3:]
    shape = (x.shape[1], gradient.shape[2], x.shape[2], *kernel, x.shape[0], *out)

    def function(scope: Scope, coordinates: Coordinates) -> str:
        g, o, c = coordinates[:3]
        n, where = coordinates[3 + space], coordinates[4 + space :]
        at, inside = _met(scope, _moved(where, coordinates[3 : 3 + space], stride, pad, far), x.shape[3:])
        product = f"{gradient.at(scope, (n, g, o, *where))} * {x.at(scope, (n, g, c, *at))}"
        return scope.value(c_type(x.dtype), f"({inside} ? {product} : 0)")

    return _summed(tasks, shape, 3 + space, x.dtype, function)


def _convolution(
    tasks: Tasks,
    spec: Any,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Value:
    grouped, kernels = _grouped(x, groups), _split(weight, groups)
    way = _spread if transposed else _correlate
    result = values.view(way(tasks, grouped, kernels, spec.shape[2:], stride, padding, dilation), tuple(spec.shape))
    if bias is None:
        return result
    return elementwise("add", [result, values.view(bias, (bias.count, *[1] * (len(x.shape) - 2)))], {}, x.dtype)


def _convolution_backward(
    tasks: Tasks,
    spec: Any,
    gradient: Value,
    x: Value,
    weight: Value,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Value | None, ...]:
    outer, inner, kernels = _grouped(gradient, groups), _grouped(x, groups), _split(weight, groups)
    by_input = by_weight = by_bias = None
    if wanted[0]:
        way = _correlate if transposed else _spread
        by_input = values.view(way(tasks, outer, kernels, x.shape[2:], stride, padding, dilation), x.shape)
    if wanted[1]:
        pair = (inner, outer) if transposed else (outer, inner)
        found = _weight_gradient(tasks, *pair, weight.shape[2:], stride, padding, dilation)
        by_weight = values.view(found, weight.shape)
    if wanted[2]:
        by_bias = values.view(tasks.reduce("sum", gradient, (0, *range(2, len(x.shape)))), (gradient.shape[1],))
    return by_input, by_weight, by_bias


def _max_pool(
    tasks: Tasks, spec: Any, x: Value, kernel: Any, stride: Any, padding: Any, dilation: Any, up: bool
) -> tuple[Value, Value]:
    shape = tuple(spec[0].shape)
    lead = len(shape) - 2
    size = math.prod(kernel)

    def window(scope: Scope, coordinates: Coordinates) -> tuple[Coordinates, str]:
        point = values.unflatten(scope, coordinates[-1], tuple(kernel))
        return _met(scope, _moved(coordinates[lead : lead + 2], point, stride, padding, dilation), x.shape[-2:])

    def function(scope: Scope, coordinates: Coordinates) -> str:
        at, inside = window(scope, coordinates)
        return scope.value(c_type(x.dtype), f"({inside} ? {x.at(scope, (*coordinates[:lead], *at))} : -INFINITY)")

    met = Computed((*shape, size), x.dtype, function)
    best = values.view(tasks.reduce("max", met, (lead + 2,)), shape)
    won = whole(tasks.buffer(math.prod(shape), torch.int64), (*shape, 1))
    tasks.steps.append(scatters.extreme_index(met, lead + 2, True, won))

    def index_of(scope: Scope, coordinates: Coordinates) -> str:
        point = scope.index(f"(INDEX){won.at(scope, (*coordinates, Index()))}", size)
        at, _ = window(scope, (*coordinates, point))
        return scope.value("long", f"((long){at[0].text} * {x.shape[-1]} + {at[1].text})")

    return best, tasks.realize(Computed(shape, torch.int64, index_of))


def _max_pool_backward(
    tasks: Tasks,
    spec: Any,
    gradient: Value,
    x: Value,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    up: bool,
    indices: Value,
) -> Value:
    planes, plane = math.prod(x.shape[:-2]), x.shape[-2] * x.shape[-1]
    zeros = Computed((planes, plane), x.dtype, lambda scope, coordinates: number(0, x.dtype))
    target = tasks.realize(zeros)
    each = (planes, gradient.shape[-2] * gradient.shape[-1])
    tasks.steps.append(scatters.scatter(target, 1, values.view(indices, each), values.view(gradient, each), True, None))
    return values.view(target, x.shape)


WINDOWS: dict[str, Callable[..., Any]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "max_pool": _max_pool,
    "max_pool_backward": _max_pool_backward,
}
"""Called with the tasks, the node's value as traced, and the op's arguments in memory."""
