"""What becomes of each ATen op that is not in core form: one small function a family of overloads.

Part of the core lowering (`relay.capture.core`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from hal.op_rules import Spec, broadcast
from relay.capture.core_builder import Builder, constant_of, part_spec
from relay.capture.core_elementwise import as_number, elementwise, truth

aten = torch.ops.aten

_KEYWORDS = {"dtype", "approximate"}


class Call:
    """One call to be rewritten; `get` finds an argument by its name in ATen's schema, its default filled in."""

    def __init__(self, target: Any, args: list[Any], kwargs: dict[str, Any], wanted: Any) -> None:
        self.target, self.args, self.kwargs, self.wanted = target, args, kwargs, wanted

    def get(self, name: str) -> Any:
        """The argument of that name."""
        for position, argument in enumerate(self.target._schema.arguments):
            if argument.name == name:
                if position < len(self.args):
                    return self.args[position]
                return self.kwargs.get(name, argument.default_value)
        raise KeyError(name)

    @property
    def x(self) -> Any:
        """The first argument."""
        return self.args[0]

    @property
    def spec(self) -> Any:
        """The first argument's shape and dtype."""
        return part_spec(self.args[0])

    def dim(self, name: str = "dim") -> int:
        """A dimension, not negative."""
        return int(self.get(name)) % max(len(self.spec.shape), 1)


def with_defaults(
    target: Any, args: list[Any], kwargs: dict[str, Any], wanted: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by the schema: positional with defaults, dimensions not negative, and the keywords that count."""
    call = Call(target, args, kwargs, wanted)
    rank = len(call.spec.shape) if args and isinstance(args[0], fx.Node) else 0
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for argument in target._schema.arguments:
        value = call.get(argument.name)
        if argument.name == "dim" and isinstance(value, int) and rank:
            value %= rank
        elif argument.name in ("dim", "dims") and isinstance(value, (list, tuple)) and rank:
            value = [entry % rank for entry in value]
        if not argument.kwarg_only:
            positional.append(value)
        elif argument.name in _KEYWORDS and argument.name != "dtype":
            named[argument.name] = value
    return positional, named


# Each of these takes the builder and the call, and returns the node (or the tuple of nodes) that stands for it.


def _as_it_is(_: Builder, call: Call) -> Any:
    return call.x


def _to_copy(builder: Builder, call: Call) -> Any:
    return builder.cast(call.x, call.wanted.dtype)


def _view(builder: Builder, call: Call) -> Any:
    return builder.view(call.x, call.wanted.shape)


def _permute(builder: Builder, call: Call) -> Any:
    return builder.permute(call.x, call.get("dims"))


def _transpose(builder: Builder, call: Call) -> Any:
    rank = len(call.spec.shape)
    order = list(range(rank))
    if call.target is aten.t.default:
        order.reverse()
    else:
        first, second = call.get("dim0") % rank, call.get("dim1") % rank
        order[first], order[second] = order[second], order[first]
    return builder.permute(call.x, order)


def _expand(builder: Builder, call: Call) -> Any:
    return builder.expand(call.x, call.wanted.shape)


def _squeeze(builder: Builder, call: Call) -> Any:
    rank = len(call.spec.shape)
    given = range(rank) if call.target is aten.squeeze.default else call.get("dim")
    dims = [dim % rank for dim in ([given] if isinstance(given, int) else given)]
    dims = sorted(dim for dim in dims if call.spec.shape[dim] == 1)
    if constant_of(call.x) is not None:
        return builder.view(call.x, call.wanted.shape)
    return builder.call(aten.squeeze.dims, call.x, dims) if dims else call.x


def _unsqueeze(builder: Builder, call: Call) -> Any:
    if constant_of(call.x) is not None:
        return builder.view(call.x, call.wanted.shape)
    return builder.call(aten.unsqueeze.default, call.x, call.get("dim") % (len(call.spec.shape) + 1))


def _select(builder: Builder, call: Call) -> Any:
    dim = call.dim()
    return builder.call(aten.select.int, call.x, dim, call.get("index") % call.spec.shape[dim])


def _bounds(call: Call) -> tuple[int, int, int, int]:
    dim = call.dim()
    start, end, step = slice(call.get("start"), call.get("end"), call.get("step")).indices(call.spec.shape[dim])
    return dim, start, max(start, end), step


def _slice(builder: Builder, call: Call) -> Any:
    return builder.slice(call.x, *_bounds(call))


def _slice_scatter(builder: Builder, call: Call) -> Any:
    return builder.call(aten.slice_scatter.default, call.x, call.args[1], *_bounds(call))


def _select_scatter(builder: Builder, call: Call) -> Any:
    dim = call.dim()
    index = call.get("index") % call.spec.shape[dim]
    return builder.call(aten.select_scatter.default, call.x, call.args[1], dim, index)


def _split(builder: Builder, call: Call) -> Any:
    dim, start, parts = call.dim(), 0, []
    for part in call.wanted:
        parts.append(builder.slice(call.x, dim, start, start + part.shape[dim]))
        start += part.shape[dim]
    return tuple(parts)


def _unbind(builder: Builder, call: Call) -> Any:
    return tuple(builder.call(aten.select.int, call.x, call.dim(), index) for index in range(len(call.wanted)))


def _add(builder: Builder, call: Call) -> Any:
    """add and sub, whose second operand may carry a factor, and whose first may be a number."""
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
    """mul.Scalar and div.Scalar, which come with operands of any dtype."""
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


def _extreme_and_place(builder: Builder, call: Call) -> Any:
    largest = call.target is aten.max.dim
    dim, keep = call.dim(), _keep(call)
    values = builder.call(aten.amax.default if largest else aten.amin.default, call.x, [dim], keep)
    return values, builder.call(aten.argmax.default if largest else aten.argmin.default, call.x, dim, keep)


def _place_of_extreme(builder: Builder, call: Call) -> Any:
    if call.get("dim") is not None:
        return builder.call(call.target, call.x, call.dim(), call.get("keepdim"))
    flat = builder.view(call.x, [call.spec.count])
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
    """Variance and mean over `dims`, which are kept: two passes, as the mean must be known for the deviations."""
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
    """Source of the formula: Wu and He, "Group Normalization", ECCV 2018, equation 2."""
    x, spec = call.x, call.spec
    groups = call.get("group")
    grouped = builder.view(x, [spec.shape[0], groups, spec.count // (spec.shape[0] * groups)])
    variance, mean = _moments(builder, grouped, [2], 0)
    scale = builder.call(aten.rsqrt.default, builder.call(aten.add.Scalar, variance, float(call.get("eps"))))
    centred = builder.call(aten.sub.Tensor, grouped, mean)
    result = builder.view(builder.call(aten.mul.Tensor, centred, scale), spec.shape)
    along = [1, spec.shape[1], *[1] * (len(spec.shape) - 2)]
    if call.get("weight") is not None:
        result = builder.call(aten.mul.Tensor, result, builder.view(call.get("weight"), along))
    if call.get("bias") is not None:
        result = builder.call(aten.add.Tensor, result, builder.view(call.get("bias"), along))
    return result, builder.view(mean, call.wanted[1].shape), builder.view(scale, call.wanted[2].shape)


def _layer_norm(builder: Builder, call: Call) -> Any:
    """Under autocast the statistics are float32 while the input is not: then all of it is computed in float32."""
    x, shape, weight, bias, epsilon = call.args
    dtype = call.wanted[1].dtype
    parameters = [None if one is None else builder.cast(one, dtype) for one in (weight, bias)]
    node = builder.call(call.target, builder.cast(x, dtype), list(shape), *parameters, float(epsilon))
    return builder.cast(builder.item(node, 0), call.wanted[0].dtype), builder.item(node, 1), builder.item(node, 2)


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


def _embedding(builder: Builder, call: Call) -> Any:
    return builder.call(aten.embedding.default, call.x, builder.cast(call.args[1], torch.int64))


def _indices(builder: Builder, indices: Sequence[Any]) -> list[Any]:
    result = []
    for index in indices:
        if index is not None and part_spec(index).dtype in (torch.bool, torch.uint8):
            raise ValueError("a mask as index makes shapes depend on the data")
        result.append(None if index is None else builder.cast(index, torch.int64))
    return result


def _index(builder: Builder, call: Call) -> Any:
    return builder.call(aten.index.Tensor, call.x, _indices(builder, call.args[1]))


def _index_put(builder: Builder, call: Call) -> Any:
    values = builder.cast(call.args[2], call.spec.dtype)
    indices = _indices(builder, call.args[1])
    return builder.call(aten.index_put.default, call.x, indices, values, call.get("accumulate"))


def _index_select(builder: Builder, call: Call) -> Any:
    index = builder.cast(builder.view(call.args[2], [part_spec(call.args[2]).count]), torch.int64)
    return builder.call(aten.index.Tensor, call.x, [*[None] * call.dim(), index])


def _repeat(builder: Builder, call: Call) -> Any:
    repeats = call.get("repeats")
    inner = [1] * (len(repeats) - len(call.spec.shape)) + list(call.spec.shape)
    pairs = list(zip(repeats, inner, strict=True))
    wide = builder.view(call.x, [extent for _, inside in pairs for extent in (1, inside)])
    return builder.view(builder.expand(wide, [extent for pair in pairs for extent in pair]), call.wanted.shape)


def _cat(builder: Builder, call: Call) -> Any:
    parts = [part for part in call.args[0] if part_spec(part).shape != (0,) or call.wanted.shape == (0,)]
    dim = int(call.get("dim")) % len(call.wanted.shape)
    return builder.call(aten.cat.default, [builder.cast(part, call.wanted.dtype) for part in parts], dim)


def _dropout(builder: Builder, call: Call) -> Any:
    """A dropout that is not training; one that is has become a draw of `hal.random` before."""
    if call.get("train") is not False and call.args[1] != 0:
        return None
    return call.x, builder.full(call.spec.shape, True, torch.bool)


def _copy(builder: Builder, call: Call) -> Any:
    return builder.expand(builder.cast(call.args[1], call.wanted.dtype), call.wanted.shape)


def _pad(builder: Builder, call: Call) -> Any:
    value = as_number(call.get("value"), call.spec.dtype)
    return builder.call(call.target, call.x, list(call.get("pad")), value)


def _scatter_value(builder: Builder, call: Call) -> Any:
    value = as_number(call.get("value"), call.spec.dtype)
    return builder.call(call.target, call.x, call.dim(), call.get("index"), value)


def _pool(builder: Builder, call: Call) -> Any:
    positional, _ = with_defaults(call.target, call.args, call.kwargs, call.wanted)
    places = [argument.name for argument in call.target._schema.arguments]
    for name in ("kernel_size", "stride", "padding", "dilation"):
        place = places.index(name)
        value = list(positional[place]) or list(positional[places.index("kernel_size")])
        positional[place] = value * 2 if len(value) == 1 else value
    return builder.call(call.target, *positional)


def _counted(builder: Builder, count: int, step: int = 1) -> fx.Node:
    return builder.call(aten.arange.start_step, 0, count * step, step, dtype=torch.int64)


def _unfold(builder: Builder, call: Call) -> Any:
    """Windows along a dimension: the places of their elements are looked up, and the window goes last."""
    dim, size, step = call.get("dimension") % len(call.spec.shape), call.get("size"), call.get("step")
    count = (call.spec.shape[dim] - size) // step + 1
    starts = builder.view(_counted(builder, count, step), [count, 1])
    places = builder.call(aten.add.Tensor, starts, _counted(builder, size))
    windows = builder.call(aten.index.Tensor, call.x, [*[None] * dim, places])
    order = [place for place in range(len(call.wanted.shape)) if place != dim + 1]
    return builder.permute(windows, [*order, dim + 1])


def _diagonal_places(builder: Builder, rank: int, offset: int, length: int) -> list[Any]:
    along = _counted(builder, length)
    moved = builder.call(aten.add.Scalar, along, abs(offset)) if offset else along
    return [*[None] * (rank - 2), *([along, moved] if offset >= 0 else [moved, along])]


def _diagonal(builder: Builder, call: Call) -> Any:
    rank = len(call.spec.shape)
    first, second = call.get("dim1") % rank, call.get("dim2") % rank
    last = builder.permute(call.x, [*(dim for dim in range(rank) if dim not in (first, second)), first, second])
    indices = _diagonal_places(builder, rank, call.get("offset"), call.wanted.shape[-1])
    return builder.call(aten.index.Tensor, last, indices)


def _diagonal_scatter(builder: Builder, call: Call) -> Any:
    rank = len(call.spec.shape)
    first, second = call.get("dim1") % rank, call.get("dim2") % rank
    order = [*(dim for dim in range(rank) if dim not in (first, second)), first, second]
    source = call.args[1]
    indices = _diagonal_places(builder, rank, call.get("offset"), part_spec(source).shape[-1])
    put = builder.call(aten.index_put.default, builder.permute(call.x, order), indices, source, False)
    return builder.permute(put, [order.index(dim) for dim in range(rank)])


def _average_pool(builder: Builder, call: Call) -> Any:
    """A convolution of every plane by itself with equal weights; its gradient is the transposed convolution."""
    backward = call.target is aten.avg_pool2d_backward.default
    planes = call.get("self").meta["val"]
    kernel, stride, padding = (
        list(value) * (2 if len(value) == 1 else 1)
        for value in (call.get("kernel_size"), call.get("stride") or call.get("kernel_size"), call.get("padding"))
    )
    divisor = call.get("divisor_override")
    uneven = any(padding) and not call.get("count_include_pad") and divisor is None
    if call.get("ceil_mode") or uneven:
        raise ValueError("pooling that rounds up, or whose windows at the edge divide by less")
    *outer, height, width = planes.shape
    count = math.prod(outer)
    weight = builder.full([1, 1, *kernel], 1.0 / (divisor or math.prod(kernel)), planes.dtype)
    flat = builder.view(call.x, [count, 1, *call.spec.shape[-2:]])
    further = [0, 0]
    if backward:
        further = [
            extent - ((out - 1) * step - 2 * pad + size)
            for extent, out, step, pad, size in zip(
                (height, width), call.spec.shape[-2:], stride, padding, kernel, strict=True
            )
        ]
    result = builder.call(
        aten.convolution.default, flat, weight, None, stride, padding, [1, 1], backward, further, 1
    )
    return builder.view(result, call.wanted.shape)


REWRITES: dict[Any, Callable[[Builder, Call], Any]] = {
    aten.alias.default: _as_it_is,
    aten.clone.default: _as_it_is,
    aten.detach.default: _as_it_is,
    aten.lift_fresh_copy.default: _as_it_is,
    aten._to_copy.default: _to_copy,
    aten.copy.default: _copy,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.permute.default: _permute,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.expand.default: _expand,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.split_with_sizes.default: _split,
    aten.split.Tensor: _split,
    aten.unbind.int: _unbind,
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
    aten.sum.default: _reduce,
    aten.sum.dim_IntList: _reduce,
    aten.mean.default: _reduce,
    aten.mean.dim: _reduce,
    aten.amax.default: _reduce,
    aten.amin.default: _reduce,
    aten.max.default: _reduce,
    aten.min.default: _reduce,
    aten.max.dim: _extreme_and_place,
    aten.min.dim: _extreme_and_place,
    aten.argmax.default: _place_of_extreme,
    aten.argmin.default: _place_of_extreme,
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
    aten.addmm.default: _addmm,
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten.index_select.default: _index_select,
    aten.repeat.default: _repeat,
    aten.cat.default: _cat,
    aten.native_dropout.default: _dropout,
    aten.constant_pad_nd.default: _pad,
    aten.unfold.default: _unfold,
    aten.diagonal.default: _diagonal,
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.avg_pool2d.default: _average_pool,
    aten.avg_pool2d_backward.default: _average_pool,
    aten.scatter.value: _scatter_value,
    aten.max_pool2d_with_indices.default: _pool,
    aten.max_pool2d_with_indices_backward.default: _pool,
}
