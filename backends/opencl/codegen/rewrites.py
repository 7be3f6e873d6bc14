"""What each op of a program that is not element-wise becomes: reductions, rows, products, orders.

Each function takes the tasks, to which it adds its own, then the node and the op's own arguments with tensors as
`Value`; it returns the result as one. Softmax and layer norm are reductions and element-wise ops here, which `plan`
brings together into one kernel again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from backends.opencl.codegen import gemm, scatters, values
from backends.opencl.codegen.elementwise import elementwise
from backends.opencl.codegen.emit import Scope, c_type, number
from backends.opencl.codegen.indexing import INDEXING
from backends.opencl.codegen.tasks import CHEAP, Tasks
from backends.opencl.codegen.values import Computed, Coordinates, Stored, Value, whole
from backends.opencl.codegen.windows import WINDOWS

# -- reductions and rows ------------------------------------------------------------------------------------------


def _reduced(kind: str) -> Callable[..., Value]:
    def function(tasks: Tasks, node: fx.Node, x: Value, dims: Any, keep: bool) -> Value:
        dims = (dims,) if isinstance(dims, int) else tuple(dims)
        if not dims or not x.shape:
            return x
        return values.view(tasks.reduce(kind, x, dims, node), tuple(node.meta["val"].shape))

    return function


def _mean(tasks: Tasks, node: fx.Node, x: Value, dims: Sequence[int], keep: bool) -> Value:
    return values.view(_mean_of(tasks, x, tuple(dims)), tuple(node.meta["val"].shape))


def _mean_of(tasks: Tasks, x: Value, dims: tuple[int, ...]) -> Value:
    if not dims:
        return x
    count = math.prod(x.shape[dim] for dim in dims)
    # The sum of half precision is not rounded before it is divided.
    wide = elementwise("_to_copy", [x], {}, torch.float32) if x.dtype.itemsize == 2 else x
    mean = elementwise("div", [tasks.reduce("sum", wide, dims), float(count) if count else math.nan], {}, wide.dtype)
    return elementwise("_to_copy", [mean], {}, x.dtype)


def _extreme_index(largest: bool) -> Callable[..., Value]:
    def function(tasks: Tasks, node: fx.Node, x: Value, dim: int, keep: bool) -> Value:
        shape = [1 if axis == dim else extent for axis, extent in enumerate(x.shape)]
        target = whole(tasks.buffer(math.prod(shape), torch.int64), shape)
        if target.count:
            tasks.steps.append(scatters.extreme_index(x, dim, largest, target))
        return values.view(target, tuple(node.meta["val"].shape))

    return function


def _scan(kind: str) -> Callable[..., Value]:
    def function(tasks: Tasks, node: fx.Node, x: Value, dim: int) -> Value:
        target = whole(tasks.buffer(x.count, x.dtype), x.shape)
        if target.count:
            tasks.steps.append(scatters.scan(kind, x, dim, target))
        return target

    return function


def _calculated(op: str, dtype: torch.dtype, *args: Any) -> Value:
    return elementwise(op, args, {}, dtype)


def _prepared(tasks: Tasks, x: Value) -> tuple[Value, torch.dtype]:
    """The operand in float and, unless it costs nothing, in memory: it is read in several passes."""
    if isinstance(x, Computed) and x.cost > CHEAP:
        x = tasks.realize(x)
    wide = torch.float32 if x.dtype.itemsize == 2 else x.dtype
    return (_calculated("_to_copy", wide, x) if wide is not x.dtype else x), wide


def _softmax(safe: bool, logarithm: bool) -> Callable[..., Value]:
    def function(tasks: Tasks, node: fx.Node, x: Value, dim: int, *_: Any) -> Value:
        dtype = x.dtype
        if not x.shape:
            x = values.view(x, (1,))
            dim = 0
        if not x.count:
            return values.view(x, tuple(node.meta["val"].shape))
        wide, kind = _prepared(tasks, x)
        most: Value = tasks.reduce("max", wide, (dim,))
        if safe:
            nothing = _calculated("eq", torch.bool, most, -math.inf)
            zero = Computed((), kind, lambda scope, coordinates: number(0, kind))
            most = _calculated("where", kind, nothing, zero, most)
        shifted = _calculated("sub", kind, wide, most)
        weights = _calculated("exp", kind, shifted)
        total: Value = tasks.reduce("sum", weights, (dim,))
        if logarithm:
            result = _calculated("sub", kind, shifted, tasks.realize(_calculated("log", kind, total)))
        else:
            if safe:
                total = _calculated("add", kind, total, _calculated("_to_copy", kind, nothing))
            result = _calculated("div", kind, weights, total)
        if kind is not dtype:
            result = _calculated("_to_copy", dtype, result)
        return values.view(result, tuple(node.meta["val"].shape))

    return function


def _layer_norm(
    tasks: Tasks, node: fx.Node, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, small: float
) -> tuple[Value, ...]:
    """(result, mean, 1 / deviation). Source: Ba, Kiros and Hinton, "Layer Normalization", arXiv 1607.06450."""
    dtype = x.dtype
    dims = tuple(range(len(x.shape) - len(shape), len(x.shape)))
    wide, kind = _prepared(tasks, x)
    mean = tasks.realize(_mean_of(tasks, wide, dims))
    centred = _calculated("sub", kind, wide, mean)
    variance = _mean_of(tasks, _calculated("mul", kind, centred, centred), dims)
    scale = tasks.realize(_calculated("rsqrt", kind, _calculated("add", kind, variance, small)))
    result = _calculated("mul", kind, centred, scale)
    for op, factor in (("mul", weight), ("add", bias)):
        if factor is not None:
            result = _calculated(op, kind, result, _calculated("_to_copy", kind, factor))
    parts = [result, mean, scale]
    # It is used again in the gradient as often as not, and costs a pass over memory either way.
    return tuple(_calculated("_to_copy", dtype, part) if kind is not dtype else part for part in parts)


# -- products -----------------------------------------------------------------------------------------------------


def _mm(tasks: Tasks, node: fx.Node, x: Value, y: Value) -> Value:
    product = _product(tasks, node, values.unsqueeze(x, 0), values.unsqueeze(y, 0), None)
    return values.view(product, tuple(node.meta["val"].shape))


def _bmm(tasks: Tasks, node: fx.Node, x: Value, y: Value) -> Value:
    return _product(tasks, node, x, y, None)


def _addmm(tasks: Tasks, node: fx.Node, bias: Value, x: Value, y: Value) -> Value:
    wide = values.expand(bias, (1, x.shape[0], y.shape[1]))
    product = _product(tasks, node, values.unsqueeze(x, 0), values.unsqueeze(y, 0), wide)
    return values.view(product, tuple(node.meta["val"].shape))


def _product(tasks: Tasks, node: fx.Node, x: Value, y: Value, bias: Value | None) -> Value:
    batch, rows, depth = x.shape
    columns = y.shape[2]
    if not x.dtype.is_floating_point or not depth or not batch * rows * columns:
        return _plain_product(tasks, x, y, bias)
    target, output = _result(tasks, node, (batch, rows, columns))
    real = torch.float64 if x.dtype is torch.float64 else torch.float32
    tile = gemm.tile_of(tasks.traits, rows, columns)
    packed = []
    for value, along, panel in ((x, 1, tile.rows), (y, 2, tile.columns)):
        extent = value.shape[along]
        count = batch * -(-extent // panel) * panel * depth
        buffer = tasks.buffer(count, real)
        tasks.steps.append(gemm.pack(value, buffer, along, panel, tasks.traits))
        packed.append(buffer)
    if bias is not None and bias.cost > CHEAP:
        bias = tasks.realize(bias)
    sizes = gemm.Sizes(batch, rows, columns, depth)
    tasks.steps.append(gemm.product(packed[0], packed[1], target, sizes, tile, bias, output, tasks.traits))
    return target


def _result(tasks: Tasks, node: fx.Node, shape: tuple[int, ...]) -> tuple[Stored, int | None]:
    return tasks.target_of(node, shape, node.meta["val"].dtype)


def _plain_product(tasks: Tasks, x: Value, y: Value, bias: Value | None) -> Value:
    """Of integers, and of nothing: a sum of products."""
    batch, rows, depth = x.shape
    shape = (batch, rows, y.shape[2], depth)
    left = values.expand(values.unsqueeze(x, 2), shape)
    right = values.expand(values.unsqueeze(values.permute(y, (0, 2, 1)), 1), shape)
    result = values.view(tasks.reduce("sum", _calculated("mul", x.dtype, left, right), (3,)), shape[:3])
    return result if bias is None else _calculated("add", x.dtype, result, bias)


# -- creation and order -------------------------------------------------------------------------------------------


def _full(tasks: Tasks, node: fx.Node, shape: Sequence[int], value: Any) -> Value:
    dtype = node.meta["val"].dtype
    return Computed(tuple(shape), dtype, lambda scope, coordinates: number(value, dtype), 0)


def _arange(tasks: Tasks, node: fx.Node, start: Any, end: Any, step: Any) -> Value:
    dtype, shape = node.meta["val"].dtype, tuple(node.meta["val"].shape)

    def function(scope: Scope, coordinates: Coordinates) -> str:
        kind = c_type(dtype)
        name = f"({kind})({number(start, dtype)} + ({kind})({coordinates[0].text}) * {number(step, dtype)})"
        return scope.value(kind, name)

    return Computed(shape, dtype, function, 1)


def _topk(
    tasks: Tasks, node: fx.Node, x: Value, count: int, dim: int, largest: bool, in_order: bool
) -> tuple[Value, ...]:
    source = tasks.realize(x)
    shape = tuple(node.meta["val"][0].shape)
    size = math.prod(shape)
    results = whole(tasks.buffer(size, x.dtype), shape), whole(tasks.buffer(size, torch.int64), shape)
    if size:
        tasks.steps.append(scatters.order(source, dim, count, largest, *results))
    return results


def _sort(tasks: Tasks, node: fx.Node, x: Value, dim: int, descending: bool) -> tuple[Value, ...]:
    return _topk(tasks, node, x, x.shape[dim] if x.shape else 1, dim, descending, True)


def _window(name: str) -> Callable[..., Any]:
    def function(tasks: Tasks, node: fx.Node, *args: Any) -> Any:
        operands = [tasks.realize(arg) if isinstance(arg, Value) else arg for arg in args]
        return WINDOWS[name](tasks, node.meta["val"], *operands)

    return function


def _pass(way: Callable[..., Value]) -> Callable[..., Value]:
    return lambda tasks, node, *args: way(*args)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **INDEXING,
    "view.default": _pass(values.view),
    "permute.default": _pass(values.permute),
    "expand.default": _pass(values.expand),
    "squeeze.dims": _pass(values.squeeze),
    "unsqueeze.default": _pass(values.unsqueeze),
    "select.int": _pass(values.select),
    "slice.Tensor": _pass(values.sliced),
    "flip.default": _pass(values.flip),
    "sum.dim_IntList": _reduced("sum"),
    "amax.default": _reduced("max"),
    "amin.default": _reduced("min"),
    "any.dim": _reduced("any"),
    "prod.dim_int": _reduced("prod"),
    "mean.dim": _mean,
    "argmax.default": _extreme_index(True),
    "argmin.default": _extreme_index(False),
    "cumsum.default": _scan("cumsum"),
    "cumprod.default": _scan("cumprod"),
    "_softmax.default": _softmax(False, False),
    "_safe_softmax.default": _softmax(True, False),
    "_log_softmax.default": _softmax(False, True),
    "native_layer_norm.default": _layer_norm,
    "mm.default": _mm,
    "bmm.default": _bmm,
    "addmm.default": _addmm,
    "full.default": _full,
    "arange.start_step": _arange,
    "topk.default": _topk,
    "sort.default": _sort,
    "convolution.default": _window("convolution"),
    "convolution_backward.default": _window("convolution_backward"),
    "max_pool2d_with_indices.default": _window("max_pool"),
    "max_pool2d_with_indices_backward.default": _window("max_pool_backward"),
}
"""By the names of `hal.ops.OPS` without `aten.`: functions of the tasks, the node and the op's arguments."""
