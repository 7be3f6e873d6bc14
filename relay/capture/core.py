"""The core lowering: a graph rewritten to the closed set of ops of `hal.ops`, in the one form that it promises.

Tracing with `decompositions()` under `attention()` leaves core ATen, in whichever of its overloads PyTorch happened
to use. `simplify` brings that into the form that backends are promised (see `hal.ops`): arguments positional, dtypes
of operands equal, views as reshapes. On the way it drops what computes nothing (copies, views of nothing, sums with
one operand) and merges ops that are there twice. It does not fuse and it does not reorder.

Invariant: every node's shape and dtype by the table of `hal.ops` equal those that PyTorch's own tracing gave. An op
that has no row is kept as it is, for the device to refuse by name.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.nn.attention import SDPBackend, sdpa_kernel

from hal.ops import OPS, Kind, Spec, arguments_of, broadcast, name_of, spec_of
from relay.errors import CaptureError

aten = torch.ops.aten

_FURTHER = [
    aten.linalg_vector_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten.elu.default,
    aten.leaky_relu.default,
    aten.hardtanh.default,
]
"""Core ATen ops that others say as well."""

_KEPT = [aten._safe_softmax.default]
"""Decomposed by core ATen into seven passes over the attention scores; a backend does it in the softmax's own."""


def attention() -> contextlib.AbstractContextManager[Any]:
    """Scaled dot-product attention traced as matrix products: the decomposed fused kernel has wrong gradients."""
    context: contextlib.AbstractContextManager[Any] = sdpa_kernel(SDPBackend.MATH)
    return context


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions to trace with."""
    table = dict(core_aten_decompositions())
    table.update(get_decompositions(_FURTHER))
    for target in _KEPT:
        table.pop(target, None)
    return table


def simplify(graph: fx.Graph, layer: str) -> fx.Graph:
    """The same computation in the form that `hal.ops` promises, with meta data of its own. Raises CaptureError."""
    builder = Builder()
    environment: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            copied = builder.graph.node_copy(node)
            copied.meta = {"val": node.meta.get("val")}
            environment[node] = copied
        elif node.op == "output":
            builder.graph.output(fx.node.map_arg(node.args[0], environment.__getitem__))
        else:
            environment[node] = _rewritten(builder, node, environment, layer)
    builder.graph.eliminate_dead_code()
    return builder.graph


def _rewritten(builder: Builder, node: fx.Node, environment: dict[fx.Node, Any], layer: str) -> Any:
    arguments = fx.node.map_aggregate(
        (tuple(node.args), dict(node.kwargs)),
        lambda item: environment[item] if isinstance(item, fx.Node) else item,
    )
    args, kwargs = arguments
    if node.target is operator.getitem:
        return args[0][args[1]] if isinstance(args[0], tuple) else builder.item(args[0], args[1])
    wanted = spec_of(node.meta["val"])
    try:
        result = _rewrite(builder, node.target, list(args), dict(kwargs), wanted)
    except (ValueError, TypeError, IndexError, KeyError) as failure:
        raise CaptureError(
            f"layer {layer!r}: {node.target} with {node.args} {node.kwargs} has no core form: {failure}",
            layer=layer,
            op=str(node.target),
        ) from failure
    if result is None:  # no row, no rewrite
        result = builder.graph.call_function(node.target, tuple(args), dict(kwargs))
        result.meta = {"val": node.meta["val"]}
        return result
    # Results that nobody asks for may be missing.
    found = tuple(None if part is None else part_spec(part) for part in result) if isinstance(result, tuple) else (
        part_spec(result)
    )
    agree = found == wanted or (
        isinstance(found, tuple)
        and not isinstance(found, Spec)
        and all(mine is None or mine == theirs for mine, theirs in zip(found, wanted, strict=False))
    )
    if not agree:
        raise CaptureError(
            f"layer {layer!r}: the core form of {node.target} gives {found}, where PyTorch has {wanted}.",
            layer=layer,
            op=str(node.target),
        )
    return result


def part_spec(node: fx.Node) -> Any:
    """Shape and dtype of a node of a core graph."""
    return spec_of(node.meta["val"])


class Lowering(enum.Enum):
    """Which graph of a segment a device is given."""

    NATIVE = "native"
    """As PyTorch's autograd runs it, fused ops and all."""
    CORE = "core"
    """Decomposed to the ops of `hal.ops`."""


class Builder:
    """A graph under construction. Equal calls are made once: the ops of the table are functions of their values."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._made: dict[str, fx.Node] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node of that op, whose shapes and dtypes come from the table. ValueError where they do not fit."""
        signature = f"{name_of(target)} {args} {kwargs}"
        node = self._made.get(signature)
        if node is None:
            node = self.graph.call_function(target, args, kwargs)
            row = OPS[name_of(target)]
            specs, named = arguments_of(node)
            node.meta = {"val": _blank(row.results(*specs, **named))}
            self._made[signature] = node
        return node

    def item(self, source: fx.Node, index: int) -> fx.Node:
        """One result of an op that has several."""
        signature = f"item {source} {index}"
        node = self._made.get(signature)
        if node is None:
            node = self.graph.call_function(operator.getitem, (source, index))
            node.meta = {"val": source.meta["val"][index]}
            self._made[signature] = node
        return node

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`x` in that dtype."""
        if part_spec(x).dtype is dtype:
            return x
        constant = constant_of(x)
        if constant is not None:
            return self.full(part_spec(x).shape, constant, dtype)
        return self.call(aten._to_copy.default, x, dtype=dtype)

    def full(self, shape: Sequence[int], value: Any, dtype: torch.dtype) -> fx.Node:
        """A tensor of one number, which is rounded to the dtype here."""
        rounded = torch.full((), value, dtype=dtype).item()
        return self.call(aten.full.default, list(shape), rounded, dtype=dtype)

    def view(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        """`x` under another shape, through any views before it."""
        if constant_of(x) is not None:
            return self.full(shape, constant_of(x), part_spec(x).dtype)
        if x.target in (aten.view.default, aten.unsqueeze.default, aten.squeeze.dims):
            x = x.args[0]  # type: ignore[assignment]
        return x if part_spec(x).shape == tuple(shape) else self.call(aten.view.default, x, list(shape))

    def permute(self, x: fx.Node, dims: Sequence[int]) -> fx.Node:
        """`x` with its dimensions in another order, through any permutation before it."""
        rank = len(part_spec(x).shape)
        order = [dim % rank for dim in dims]
        if x.target is aten.permute.default:
            inner: Any = x.args[1]
            order, x = [inner[dim] for dim in order], x.args[0]  # type: ignore[assignment]
        return x if order == list(range(rank)) else self.call(aten.permute.default, x, order)

    def expand(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        """`x` repeated along dimensions of 1, and along new ones in front."""
        if part_spec(x).shape == tuple(shape):
            return x
        if constant_of(x) is not None:
            return self.full(shape, constant_of(x), part_spec(x).dtype)
        return self.call(aten.expand.default, x, list(shape))

    def slice(self, x: fx.Node, dim: int, start: int, end: int, step: int = 1) -> fx.Node:
        """Part of `x`, or `x` where that is all of it."""
        if step == 1 and start == 0 and end == part_spec(x).shape[dim]:
            return x
        return self.call(aten.slice.Tensor, x, dim, start, end, step)


def constant_of(node: Any) -> Any:
    """The number that a tensor is full of, where the graph says so, else None."""
    return node.args[1] if isinstance(node, fx.Node) and node.target is aten.full.default else None


def _blank(results: Any) -> Any:
    if isinstance(results, Spec):
        return torch.empty(results.shape, dtype=results.dtype, device="meta")
    return tuple(_blank(result) for result in results)


# -- rewriting ----------------------------------------------------------------------------------------------------

_COMPARISONS = {
    getattr(aten, name).Tensor: getattr(aten, name).Scalar for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_MIRRORED = {
    aten.eq.Scalar: aten.eq.Scalar,
    aten.ne.Scalar: aten.ne.Scalar,
    aten.lt.Scalar: aten.gt.Scalar,
    aten.le.Scalar: aten.ge.Scalar,
    aten.gt.Scalar: aten.lt.Scalar,
    aten.ge.Scalar: aten.le.Scalar,
    aten.add.Scalar: aten.add.Scalar,
    aten.mul.Scalar: aten.mul.Scalar,
}
_WITH_SCALAR = {
    **_COMPARISONS,
    aten.add.Tensor: aten.add.Scalar,
    aten.mul.Tensor: aten.mul.Scalar,
    aten.div.Tensor: aten.div.Scalar,
}
_KEYWORDS = {"dtype", "approximate"}


def _rewrite(builder: Builder, target: Any, args: list[Any], kwargs: dict[str, Any], wanted: Any) -> Any:
    """The core form of one call, or None for an op that has none."""
    rewrite = _REWRITES.get(target)
    if rewrite is not None:
        return rewrite(builder, _Call(target, args, kwargs, wanted))
    name = name_of(target)
    row = OPS.get(name)
    if row is None:
        return None
    if not isinstance(target, torch._ops.OpOverload):
        return builder.call(target, *args, **kwargs)
    positional, named = _with_defaults(target, args, kwargs, wanted)
    if row.kind is Kind.ELEMENTWISE:
        return _elementwise(builder, target, positional, named, wanted)
    return builder.call(target, *positional, **named)


class _Call:
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


def _with_defaults(
    target: Any, args: list[Any], kwargs: dict[str, Any], wanted: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by the schema: positional with defaults, dimensions not negative, and the keywords that count."""
    call = _Call(target, args, kwargs, wanted)
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


def _elementwise(builder: Builder, target: Any, args: list[Any], kwargs: dict[str, Any], wanted: Spec) -> Any:
    """An element-wise call with operands of one dtype, numbers as numbers, and constants computed here."""
    compares = wanted.dtype is torch.bool
    tensors = [argument for argument in args if isinstance(argument, fx.Node)]
    if target in _LOGICAL:
        dtype = torch.bool
    elif target is aten.where.self:
        args[0] = builder.cast(args[0], torch.bool)
        dtype = wanted.dtype
    elif compares:
        dtype = _promoted(args)
    else:
        dtype = wanted.dtype
    args = [
        argument
        if not isinstance(argument, fx.Node) or (target is aten.where.self and position == 0)
        else _truth(builder, argument) if dtype is torch.bool and target in _LOGICAL
        else builder.cast(argument, dtype)
        for position, argument in enumerate(args)
    ]
    if target in _WITH_SCALAR and len(tensors) >= 1:
        for position in (1, 0):
            number = args[position] if not isinstance(args[position], fx.Node) else constant_of(args[position])
            other = args[1 - position]
            if number is None or not isinstance(other, fx.Node) or part_spec(other).shape != wanted.shape:
                continue
            scalar = _WITH_SCALAR[target]
            if position == 1 or scalar in _MIRRORED:
                target = scalar if position == 1 else _MIRRORED[scalar]
                args = [other, number]
                break
    places = _number_places(target)
    for position, argument in enumerate(args):
        if position in places and isinstance(argument, (int, float)):
            args[position] = _number(argument, dtype)
        elif argument is not None and not isinstance(argument, (fx.Node, str)) and target in _TENSORS_ONLY:
            args[position] = builder.full((), argument, dtype)
    if dtype is torch.bool and target in (aten.mul.Tensor, aten.maximum.default, aten.minimum.default):
        target = aten.logical_or.default if target is aten.maximum.default else aten.logical_and.default
    if target in (aten.mul.Scalar, aten.div.Scalar) and args[1] == 1:
        return args[0]
    folded = _folded(builder, target, args, kwargs)
    return folded if folded is not None else builder.call(target, *args, **kwargs)


_LOGICAL = {aten.logical_and.default, aten.logical_or.default, aten.logical_not.default}
_TENSORS_ONLY = {
    *_WITH_SCALAR,
    aten.sub.Tensor,
    aten.pow.Tensor_Tensor,
    aten.atan2.default,
    aten.maximum.default,
    aten.minimum.default,
    aten.where.self,
    aten.bitwise_and.Tensor,
    aten.bitwise_or.Tensor,
    aten.bitwise_xor.Tensor,
}


def _number_places(target: Any) -> range:
    """Where an op takes numbers that are of its tensor's kind."""
    if target is aten.clamp.default:
        return range(1, 3)
    if target is aten.pow.Scalar:
        return range(1)
    return range(1, 2) if str(target).endswith("Scalar") else range(0)


def _number(value: Any, dtype: torch.dtype) -> Any:
    return float(value) if dtype.is_floating_point else int(value)


def _promoted(args: Sequence[Any]) -> torch.dtype:
    """The dtype in which PyTorch would compare or combine these, by its own rules of promotion."""
    tensors = [
        torch.empty(part_spec(argument).shape, dtype=part_spec(argument).dtype, device="meta")
        if isinstance(argument, fx.Node)
        else argument
        for argument in args
        if argument is not None
    ]
    return functools.reduce(_common, tensors).dtype if len(tensors) > 1 else tensors[0].dtype


def _common(first: Any, second: Any) -> torch.Tensor:
    shape = broadcast(*[tuple(value.shape) for value in (first, second) if isinstance(value, torch.Tensor)])
    return torch.empty(shape, dtype=torch.result_type(first, second), device="meta")


def _truth(builder: Builder, x: fx.Node) -> fx.Node:
    if part_spec(x).dtype is torch.bool:
        return x
    return builder.call(aten.ne.Scalar, x, _number(0, part_spec(x).dtype))


def _folded(builder: Builder, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> fx.Node | None:
    """The constant that an element-wise op of constants gives."""
    if not all(constant_of(argument) is not None for argument in args if isinstance(argument, fx.Node)):
        return None
    numbers = [
        torch.full((), constant_of(argument), dtype=part_spec(argument).dtype)
        if isinstance(argument, fx.Node)
        else argument
        for argument in args
    ]
    result: torch.Tensor = target(*numbers, **kwargs)
    shape = broadcast(*[part_spec(argument).shape for argument in args if isinstance(argument, fx.Node)])
    return builder.full(shape, result.item(), result.dtype)


# Each of these takes the builder and the call, and returns the node (or the tuple of nodes) that stands for it.


def _as_it_is(_: Builder, call: _Call) -> Any:
    return call.x


def _to_copy(builder: Builder, call: _Call) -> Any:
    return builder.cast(call.x, call.wanted.dtype)


def _view(builder: Builder, call: _Call) -> Any:
    return builder.view(call.x, call.wanted.shape)


def _permute(builder: Builder, call: _Call) -> Any:
    return builder.permute(call.x, call.get("dims"))


def _transpose(builder: Builder, call: _Call) -> Any:
    rank = len(call.spec.shape)
    order = list(range(rank))
    if call.target is aten.t.default:
        order.reverse()
    else:
        first, second = call.get("dim0") % rank, call.get("dim1") % rank
        order[first], order[second] = order[second], order[first]
    return builder.permute(call.x, order)


def _expand(builder: Builder, call: _Call) -> Any:
    return builder.expand(call.x, call.wanted.shape)


def _squeeze(builder: Builder, call: _Call) -> Any:
    rank = len(call.spec.shape)
    given = range(rank) if call.target is aten.squeeze.default else call.get("dim")
    dims = [dim % rank for dim in ([given] if isinstance(given, int) else given)]
    dims = sorted(dim for dim in dims if call.spec.shape[dim] == 1)
    if constant_of(call.x) is not None:
        return builder.view(call.x, call.wanted.shape)
    return builder.call(aten.squeeze.dims, call.x, dims) if dims else call.x


def _unsqueeze(builder: Builder, call: _Call) -> Any:
    if constant_of(call.x) is not None:
        return builder.view(call.x, call.wanted.shape)
    return builder.call(aten.unsqueeze.default, call.x, call.get("dim") % (len(call.spec.shape) + 1))


def _select(builder: Builder, call: _Call) -> Any:
    dim = call.dim()
    return builder.call(aten.select.int, call.x, dim, call.get("index") % call.spec.shape[dim])


def _bounds(call: _Call) -> tuple[int, int, int, int]:
    dim = call.dim()
    start, end, step = slice(call.get("start"), call.get("end"), call.get("step")).indices(call.spec.shape[dim])
    return dim, start, max(start, end), step


def _slice(builder: Builder, call: _Call) -> Any:
    return builder.slice(call.x, *_bounds(call))


def _slice_scatter(builder: Builder, call: _Call) -> Any:
    return builder.call(aten.slice_scatter.default, call.x, call.args[1], *_bounds(call))


def _select_scatter(builder: Builder, call: _Call) -> Any:
    dim = call.dim()
    index = call.get("index") % call.spec.shape[dim]
    return builder.call(aten.select_scatter.default, call.x, call.args[1], dim, index)


def _split(builder: Builder, call: _Call) -> Any:
    dim, start, parts = call.dim(), 0, []
    for part in call.wanted:
        parts.append(builder.slice(call.x, dim, start, start + part.shape[dim]))
        start += part.shape[dim]
    return tuple(parts)


def _unbind(builder: Builder, call: _Call) -> Any:
    return tuple(builder.call(aten.select.int, call.x, call.dim(), index) for index in range(len(call.wanted)))


def _add(builder: Builder, call: _Call) -> Any:
    """add and sub, whose second operand may carry a factor, and whose first may be a number."""
    first, second = call.args
    alpha = call.get("alpha")
    dtype = call.wanted.dtype
    if alpha != 1:
        if isinstance(second, fx.Node):
            factor = _number(alpha, dtype)
            second = _elementwise(builder, aten.mul.Scalar, [second, factor], {}, Spec(part_spec(second).shape, dtype))
        else:
            second *= alpha
    subtracts = call.target in (aten.sub.Tensor, aten.sub.Scalar)
    if not subtracts:
        return _elementwise(builder, aten.add.Tensor, [first, second], {}, call.wanted)
    if not isinstance(second, fx.Node):
        return _elementwise(builder, aten.add.Tensor, [first, -second], {}, call.wanted)
    if not isinstance(first, fx.Node):
        negative = builder.call(aten.neg.default, builder.cast(second, dtype))
        return _elementwise(builder, aten.add.Tensor, [negative, first], {}, call.wanted)
    return _elementwise(builder, aten.sub.Tensor, [first, second], {}, call.wanted)


def _scalar_form(builder: Builder, call: _Call) -> Any:
    """mul.Scalar and div.Scalar, which come with operands of any dtype."""
    target = aten.mul.Tensor if call.target is aten.mul.Scalar else aten.div.Tensor
    return _elementwise(builder, target, call.args[:2], {}, call.wanted)


def _power(builder: Builder, call: _Call) -> Any:
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
    return _elementwise(builder, call.target, call.args, {}, call.wanted)


def _clamp_tensor(builder: Builder, call: _Call) -> Any:
    x = call.x
    for bound, target in ((call.get("min"), aten.maximum.default), (call.get("max"), aten.minimum.default)):
        if bound is not None:
            shape = broadcast(part_spec(x).shape, part_spec(bound).shape)
            x = _elementwise(builder, target, [x, bound], {}, Spec(shape, call.wanted.dtype))
    return x


def _is_nan(builder: Builder, call: _Call) -> Any:
    return builder.call(aten.ne.Tensor, call.x, call.x)


def _is_inf(builder: Builder, call: _Call) -> Any:
    return builder.call(aten.eq.Scalar, builder.call(aten.abs.default, call.x), math.inf)


def _full(builder: Builder, call: _Call) -> Any:
    value = {"zeros": 0, "ones": 1}.get(call.target._schema.name.split("::")[1].removeprefix("new_").split("_")[0])
    if value is None:
        value = call.get("s") if call.target is aten.scalar_tensor.default else call.get("fill_value")
    return builder.full(call.wanted.shape, value, call.wanted.dtype)


def _arange(builder: Builder, call: _Call) -> Any:
    start = 0 if call.target is aten.arange.default else call.get("start")
    step = call.get("step") if call.target is aten.arange.start_step else 1
    return builder.call(aten.arange.start_step, start, call.get("end"), step, dtype=call.wanted.dtype)


def _dims(call: _Call) -> list[int]:
    names = {argument.name for argument in call.target._schema.arguments}
    given = call.get("dim") if "dim" in names else None
    if isinstance(given, int):
        given = [given]
    rank = len(call.spec.shape)
    return sorted(dim % rank for dim in given) if given else list(range(rank))


def _keep(call: _Call) -> bool:
    names = {argument.name for argument in call.target._schema.arguments}
    return bool("keepdim" in names and call.get("keepdim"))


def _reduce(builder: Builder, call: _Call) -> Any:
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


def _extreme_and_place(builder: Builder, call: _Call) -> Any:
    largest = call.target is aten.max.dim
    dim, keep = call.dim(), _keep(call)
    values = builder.call(aten.amax.default if largest else aten.amin.default, call.x, [dim], keep)
    return values, builder.call(aten.argmax.default if largest else aten.argmin.default, call.x, dim, keep)


def _place_of_extreme(builder: Builder, call: _Call) -> Any:
    if call.get("dim") is not None:
        return builder.call(call.target, call.x, call.dim(), call.get("keepdim"))
    flat = builder.view(call.x, [call.spec.count])
    return builder.view(builder.call(call.target, flat, 0, False), call.wanted.shape)


def _any(builder: Builder, call: _Call) -> Any:
    x = _truth(builder, call.x)
    for dim in reversed(_dims(call)):
        x = builder.call(aten.any.dim, x, dim, _keep(call))
    return x


def _scan(builder: Builder, call: _Call) -> Any:
    x = builder.cast(call.x, call.wanted.dtype)
    return builder.call(call.target, x, call.dim()) if call.spec.shape else x


def _product(builder: Builder, call: _Call) -> Any:
    x = builder.cast(call.x, call.wanted.dtype)
    if call.target is aten.prod.default:
        x = builder.view(x, [call.spec.count])
        return builder.call(aten.prod.dim_int, x, 0, False)
    return builder.call(aten.prod.dim_int, x, call.dim(), call.get("keepdim"))


def _softmax(builder: Builder, call: _Call) -> Any:
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


def _variance(builder: Builder, call: _Call) -> Any:
    correction = call.get("correction")
    pair = _moments(builder, call.x, _dims(call), 1 if correction is None else correction)
    wanted = call.wanted if isinstance(call.wanted, tuple) and not isinstance(call.wanted, Spec) else (call.wanted,)
    parts = tuple(builder.view(part, spec.shape) for part, spec in zip(pair, wanted, strict=False))
    return parts if call.target is aten.var_mean.correction else parts[0]


def _group_norm(builder: Builder, call: _Call) -> Any:
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


def _layer_norm(builder: Builder, call: _Call) -> Any:
    """Under autocast the statistics are float32 while the input is not: then all of it is computed in float32."""
    x, shape, weight, bias, epsilon = call.args
    dtype = call.wanted[1].dtype
    parameters = [None if one is None else builder.cast(one, dtype) for one in (weight, bias)]
    node = builder.call(call.target, builder.cast(x, dtype), list(shape), *parameters, float(epsilon))
    return builder.cast(builder.item(node, 0), call.wanted[0].dtype), builder.item(node, 1), builder.item(node, 2)


def _addmm(builder: Builder, call: _Call) -> Any:
    bias, x, y = call.args[:3]
    alpha, beta = call.get("alpha"), call.get("beta")
    if alpha == 1 and beta == 1:
        return builder.call(aten.addmm.default, bias, x, y)
    product = builder.call(aten.mm.default, x, y)
    if alpha != 1:
        product = builder.call(aten.mul.Scalar, product, _number(alpha, call.wanted.dtype))
    if beta == 0:
        return product
    scaled = bias if beta == 1 else builder.call(aten.mul.Scalar, bias, _number(beta, call.wanted.dtype))
    return builder.call(aten.add.Tensor, scaled, product)


def _embedding(builder: Builder, call: _Call) -> Any:
    return builder.call(aten.embedding.default, call.x, builder.cast(call.args[1], torch.int64))


def _indices(builder: Builder, indices: Sequence[Any]) -> list[Any]:
    result = []
    for index in indices:
        if index is not None and part_spec(index).dtype in (torch.bool, torch.uint8):
            raise ValueError("a mask as index makes shapes depend on the data")
        result.append(None if index is None else builder.cast(index, torch.int64))
    return result


def _index(builder: Builder, call: _Call) -> Any:
    return builder.call(aten.index.Tensor, call.x, _indices(builder, call.args[1]))


def _index_put(builder: Builder, call: _Call) -> Any:
    values = builder.cast(call.args[2], call.spec.dtype)
    indices = _indices(builder, call.args[1])
    return builder.call(aten.index_put.default, call.x, indices, values, call.get("accumulate"))


def _index_select(builder: Builder, call: _Call) -> Any:
    index = builder.cast(builder.view(call.args[2], [part_spec(call.args[2]).count]), torch.int64)
    return builder.call(aten.index.Tensor, call.x, [*[None] * call.dim(), index])


def _repeat(builder: Builder, call: _Call) -> Any:
    repeats = call.get("repeats")
    inner = [1] * (len(repeats) - len(call.spec.shape)) + list(call.spec.shape)
    pairs = list(zip(repeats, inner, strict=True))
    wide = builder.view(call.x, [extent for _, inside in pairs for extent in (1, inside)])
    return builder.view(builder.expand(wide, [extent for pair in pairs for extent in pair]), call.wanted.shape)


def _cat(builder: Builder, call: _Call) -> Any:
    parts = [part for part in call.args[0] if part_spec(part).shape != (0,) or call.wanted.shape == (0,)]
    dim = int(call.get("dim")) % len(call.wanted.shape)
    return builder.call(aten.cat.default, [builder.cast(part, call.wanted.dtype) for part in parts], dim)


def _dropout(builder: Builder, call: _Call) -> Any:
    """A dropout that is not training; one that is has become a draw of `hal.random` before."""
    if call.get("train") is not False and call.args[1] != 0:
        return None
    return call.x, builder.full(call.spec.shape, True, torch.bool)


def _copy(builder: Builder, call: _Call) -> Any:
    return builder.expand(builder.cast(call.args[1], call.wanted.dtype), call.wanted.shape)


def _pad(builder: Builder, call: _Call) -> Any:
    value = _number(call.get("value"), call.spec.dtype)
    return builder.call(call.target, call.x, list(call.get("pad")), value)


def _scatter_value(builder: Builder, call: _Call) -> Any:
    value = _number(call.get("value"), call.spec.dtype)
    return builder.call(call.target, call.x, call.dim(), call.get("index"), value)


def _pool(builder: Builder, call: _Call) -> Any:
    positional, _ = _with_defaults(call.target, call.args, call.kwargs, call.wanted)
    places = [argument.name for argument in call.target._schema.arguments]
    for name in ("kernel_size", "stride", "padding", "dilation"):
        place = places.index(name)
        value = list(positional[place]) or list(positional[places.index("kernel_size")])
        positional[place] = value * 2 if len(value) == 1 else value
    return builder.call(call.target, *positional)


_REWRITES: dict[Any, Callable[[Builder, _Call], Any]] = {
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
    aten.pow.Tensor_Scalar: _power,
    aten.clamp.Tensor: _clamp_tensor,
    aten.isnan.default: _is_nan,
    aten.isinf.default: _is_inf,
    aten.full.default: _full,
    aten.full_like.default: _full,
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
    aten.scatter.value: _scatter_value,
    aten.max_pool2d_with_indices.default: _pool,
    aten.max_pool2d_with_indices_backward.default: _pool,
}
