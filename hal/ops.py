"""The one table of ops that a core program may hold: shape and dtype rule, FLOPs, bytes and kind of each.

Devices that do not ask for native graphs get *core* programs, made of these ops and of nothing else. The table is
what a backend implements, what the simulator times, and what decides at compile time whether a program can run. It
computes nothing. Its shape and dtype rules are its own, written apart from PyTorch's, and the lowering compares the
two on every node.

Invariants of a core program, so that a backend need not care about the rest of ATen:

  * Ops are functions of values. Strides mean nothing: `view` is a reshape of the elements in row-major order, and
    every other op's result is what its logical elements say. A backend may carry strides through the ops of kind
    VIEW, and copies only where its own layout makes it.
  * Arguments are positional, in the order of ATen's schema, with all defaults filled in as far as the rule of the
    row has them; `dtype` (of `full`, `arange` and `_to_copy`) and gelu's `approximate` are by keyword, and are always
    given. PyTorch can run the graph as well, with `view` read as `reshape`. Dimensions are not negative, sizes hold no -1, slice
    bounds lie within the dimension.
  * The tensor operands of an element-wise op have one dtype and broadcast; a Python number beside them is of their
    kind (an int for integers, else a float). Casts are `_to_copy` nodes. A condition is bool. Indices are int64.
  * Ops with several results (`native_layer_norm`, `topk`, ...) are followed by `operator.getitem`, which is not in
    the table.
  * Constants without data are ops (`full`, `arange`); constants with data are `get_attr` nodes.

Names are those of the overload, `aten.add.Tensor`; random ops are functions of `hal.random` and go by
`hal.random.keep_mask`. FLOPs are multiplications and additions (2 a multiply-add) and one for any other element-wise
operation; bytes are what an op reads and writes were nothing kept in a cache.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from hal.errors import CompileError, Unsupported
from hal.kernel import Program


class Spec(NamedTuple):
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.count * self.dtype.itemsize


class Kind(enum.Enum):
    """What an op is to a scheduler of memory and to a code generator."""

    VIEW = "view"
    """The same elements under another shape or order: no arithmetic, and no copy where strides can carry it."""
    ELEMENTWISE = "element-wise"
    REDUCTION = "reduction"
    SCAN = "scan"
    NORMALISATION = "normalisation"
    """Passes over rows: softmax, layer norm."""
    MATMUL = "matmul"
    GATHER = "gather"
    SCATTER = "scatter"
    MOVE = "move"
    """Elements put together or in another order: cat, flip, padding."""
    CREATE = "create"
    SORT = "sort"
    WINDOW = "window"
    """Convolution and pooling."""
    RANDOM = "random"


Result = Spec | tuple[Spec, ...]
Rule = Callable[..., Result]
"""Called with an op's arguments, tensors as Spec; returns its results, or raises ValueError for what cannot be."""


@dataclass(frozen=True)
class Op:
    """A row. `rule`, `flops` and `moved` are called with the op's own arguments, tensors as `Spec`."""

    name: str
    kind: Kind
    rule: Rule
    flops_rule: Callable[..., int] | None = None

    def results(self, *args: Any, **kwargs: Any) -> Result:
        """Shapes and dtypes of the results. ValueError where the arguments do not fit the op."""
        return self.rule(*args, **kwargs)

    def flops(self, *args: Any, **kwargs: Any) -> int:
        """Floating-point operations."""
        if self.flops_rule is not None:
            return self.flops_rule(*args, **kwargs)
        written = sum(spec.count for spec in _flat(self.rule(*args, **kwargs)))
        read = max((spec.count for spec in _flat((*args, *kwargs.values()))), default=0)
        if self.kind is Kind.ELEMENTWISE:
            return written
        if self.kind in (Kind.REDUCTION, Kind.SCAN):
            return read
        if self.kind is Kind.NORMALISATION:
            return 5 * read  # two passes of statistics and one of arithmetic, to the nearest small number
        return 0

    def moved(self, *args: Any, **kwargs: Any) -> int:
        """Bytes read and written."""
        if self.kind is Kind.VIEW:
            return 0
        written = sum(spec.size for spec in _flat(self.rule(*args, **kwargs)))
        operands = _flat((*args, *kwargs.values()))
        if self.kind is Kind.GATHER:  # of the first operand, only the elements that are taken
            return 2 * written + sum(spec.size for spec in operands[1:])
        return written + sum(spec.size for spec in operands)


def _flat(value: Any) -> list[Spec]:
    if isinstance(value, Spec):
        return [value]
    if isinstance(value, (tuple, list)):
        return [spec for item in value for spec in _flat(item)]
    return []


# -- rules --------------------------------------------------------------------------------------------------------


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that `shapes` broadcast to. ValueError where they do not."""
    result: list[int] = []
    for place in range(-max(map(len, shapes), default=0), 0):
        extents = {shape[place] for shape in shapes if len(shape) >= -place} - {1}
        _require(len(extents) <= 1, f"{' and '.join(map(str, shapes))} do not broadcast")
        result.append(extents.pop() if extents else 1)
    return tuple(result)


def _floating(spec: Spec) -> Spec:
    _require(spec.dtype.is_floating_point, f"takes floating-point numbers, got {spec.dtype}")
    return spec


def _same(x: Spec) -> Spec:
    return x


def _unary_floating(x: Spec) -> Spec:
    return _floating(x)


def _gelu(x: Spec, *, approximate: str) -> Spec:
    _require(approximate in ("none", "tanh"), f"gelu by {approximate!r}")
    return _floating(x)


def _one_dtype(x: Spec, y: Spec) -> torch.dtype:
    _require(x.dtype is y.dtype, f"operands have two dtypes, {x.dtype} and {y.dtype}")
    return x.dtype


def _binary(x: Spec, y: Spec) -> Spec:
    return Spec(broadcast(x.shape, y.shape), _one_dtype(x, y))


def _binary_floating(x: Spec, y: Spec) -> Spec:
    return _binary(_floating(x), y)


def _compare(x: Spec, y: Spec) -> Spec:
    return Spec(_binary(x, y).shape, torch.bool)


def _scalar(x: Spec, number: Any) -> Spec:
    _require(
        x.dtype.is_floating_point or (isinstance(number, int) and x.dtype is not torch.bool),
        f"the number {number!r} is not of the kind of {x.dtype}",
    )
    return x


def _scalar_first(number: Any, x: Spec) -> Spec:
    return _scalar(x, number)


def _compare_scalar(x: Spec, number: Any) -> Spec:
    _require(
        x.dtype.is_floating_point or isinstance(number, int), f"the number {number!r} is not of the kind of {x.dtype}"
    )
    return Spec(x.shape, torch.bool)


def _logical(x: Spec, y: Spec | None = None) -> Spec:
    _require(x.dtype is torch.bool and (y is None or y.dtype is torch.bool), "takes booleans")
    return x if y is None else _binary(x, y)


def _bits(x: Spec, y: Spec | None = None) -> Spec:
    _require(not x.dtype.is_floating_point, f"takes integers or booleans, got {x.dtype}")
    return x if y is None else _binary(x, y)


def _where(condition: Spec, x: Spec, y: Spec) -> Spec:
    _require(condition.dtype is torch.bool, f"the condition is {condition.dtype}, not bool")
    return Spec(broadcast(condition.shape, x.shape, y.shape), _one_dtype(x, y))


def _clamp(x: Spec, least: Any, most: Any) -> Spec:
    for bound in (least, most):
        if bound is not None:
            _scalar(x, bound)
    return x


def _cast(x: Spec, *, dtype: torch.dtype) -> Spec:
    return Spec(x.shape, dtype)


def _dimension(x: Spec, dim: int) -> int:
    _require(0 <= dim < len(x.shape), f"{x.shape} has no dimension {dim}")
    return x.shape[dim]


def _view(x: Spec, shape: Sequence[int]) -> Spec:
    _require(math.prod(shape) == x.count and min(shape, default=0) >= 0, f"{x.shape} has no view {tuple(shape)}")
    return Spec(tuple(shape), x.dtype)


def _permute(x: Spec, dims: Sequence[int]) -> Spec:
    _require(sorted(dims) == list(range(len(x.shape))), f"{tuple(dims)} is no order of the dimensions of {x.shape}")
    return Spec(tuple(x.shape[dim] for dim in dims), x.dtype)


def _expand(x: Spec, shape: Sequence[int]) -> Spec:
    _require(broadcast(x.shape, shape) == tuple(shape), f"{x.shape} does not expand to {tuple(shape)}")
    return Spec(tuple(shape), x.dtype)


def _squeeze(x: Spec, dims: Sequence[int]) -> Spec:
    _require(all(_dimension(x, dim) == 1 for dim in dims), f"of {x.shape}, {tuple(dims)} are not all 1")
    return Spec(tuple(extent for dim, extent in enumerate(x.shape) if dim not in dims), x.dtype)


def _unsqueeze(x: Spec, dim: int) -> Spec:
    _require(0 <= dim <= len(x.shape), f"{x.shape} has no place {dim}")
    return Spec((*x.shape[:dim], 1, *x.shape[dim:]), x.dtype)


def _select(x: Spec, dim: int, index: int) -> Spec:
    _require(0 <= index < _dimension(x, dim), f"{x.shape} has no index {index} in dimension {dim}")
    return Spec((*x.shape[:dim], *x.shape[dim + 1 :]), x.dtype)


def _slice(x: Spec, dim: int, start: int, end: int, step: int) -> Spec:
    extent = _dimension(x, dim)
    _require(0 <= start <= end <= extent and step > 0, f"{start}:{end}:{step} is no slice of {extent}")
    return Spec((*x.shape[:dim], -(-(end - start) // step), *x.shape[dim + 1 :]), x.dtype)


def _reduced(x: Spec, dims: Sequence[int], keep: bool) -> tuple[int, ...]:
    _require(len(set(dims)) == len(dims) and all(_dimension(x, dim) >= 0 for dim in dims), f"dimensions {dims}")
    if keep:
        return tuple(1 if dim in dims else extent for dim, extent in enumerate(x.shape))
    return tuple(extent for dim, extent in enumerate(x.shape) if dim not in dims)


def _sum(x: Spec, dims: Sequence[int], keep: bool) -> Spec:
    _require(x.dtype is not torch.bool, "booleans are cast before they are summed")
    return Spec(_reduced(x, dims, keep), x.dtype)


def _mean(x: Spec, dims: Sequence[int], keep: bool) -> Spec:
    return Spec(_reduced(_floating(x), dims, keep), x.dtype)


def _extreme(x: Spec, dims: Sequence[int], keep: bool) -> Spec:
    _require(all(x.shape[dim] > 0 for dim in dims), "the extreme of nothing")
    return Spec(_reduced(x, dims, keep), x.dtype)


def _any(x: Spec, dim: int, keep: bool) -> Spec:
    return Spec(_reduced(_logical(x), (dim,), keep), torch.bool)


def _argument(x: Spec, dim: int, keep: bool) -> Spec:
    return Spec(_reduced(x, (dim,), keep), torch.int64)


def _product(x: Spec, dim: int, keep: bool) -> Spec:
    return Spec(_reduced(x, (dim,), keep), x.dtype)


def _scan(x: Spec, dim: int) -> Spec:
    _dimension(x, dim)
    return x


def _mm(x: Spec, y: Spec) -> Spec:
    _require(len(x.shape) == len(y.shape) == 2 and x.shape[1] == y.shape[0], f"{x.shape} times {y.shape}")
    return Spec((x.shape[0], y.shape[1]), _one_dtype(x, y))


def _bmm(x: Spec, y: Spec) -> Spec:
    fits = len(x.shape) == len(y.shape) == 3 and x.shape[0] == y.shape[0] and x.shape[2] == y.shape[1]
    _require(fits, f"{x.shape} times {y.shape}")
    return Spec((x.shape[0], x.shape[1], y.shape[2]), _one_dtype(x, y))


def _addmm(bias: Spec, x: Spec, y: Spec) -> Spec:
    product = _mm(x, y)
    _require(broadcast(bias.shape, product.shape) == product.shape, f"{bias.shape} plus {product.shape}")
    return Spec(product.shape, _one_dtype(bias, product))


def _mm_flops(x: Spec, y: Spec) -> int:
    return 2 * x.count * y.shape[-1]


def _addmm_flops(bias: Spec, x: Spec, y: Spec) -> int:
    return _mm_flops(x, y)


def _softmax(x: Spec, dim: int, half_to_float: bool) -> Spec:
    _require(not half_to_float, "the cast is an op of its own")
    return _safe_softmax(x, dim)


def _safe_softmax(x: Spec, dim: int) -> Spec:
    return _scan(_floating(x), dim) if x.shape else x


def _layer_norm(
    x: Spec, shape: Sequence[int], weight: Spec | None, bias: Spec | None, epsilon: float
) -> tuple[Spec, ...]:
    inner = len(x.shape) - len(shape)
    _require(x.shape[inner:] == tuple(shape), f"{x.shape} does not end in {tuple(shape)}")
    for scale in (weight, bias):
        _require(scale is None or scale == Spec(tuple(shape), x.dtype), f"scale or shift is {scale}")
    statistics = Spec(x.shape[:inner] + (1,) * len(shape), x.dtype)
    return _floating(x), statistics, statistics


def _int64(index: Spec) -> Spec:
    _require(index.dtype is torch.int64, f"indices are {index.dtype}, not int64")
    return index


def _embedding(weight: Spec, index: Spec) -> Spec:
    _require(len(weight.shape) == 2, f"an embedding of {weight.shape}")
    return Spec((*_int64(index).shape, weight.shape[1]), weight.dtype)


def _indexed(x: Spec, indices: Sequence[Spec | None]) -> tuple[int, ...]:
    """The shape of x[indices]: as numpy has it, indices that stand together replace their dimensions in place."""
    used = [place for place, index in enumerate(indices) if index is not None]
    _require(bool(used) and len(indices) <= len(x.shape), f"{len(indices)} indices into {x.shape}")
    picked = broadcast(*[_int64(index).shape for index in indices if index is not None])
    kept = [extent for place, extent in enumerate(x.shape) if place not in used]
    front = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    return (*kept[:front], *picked, *kept[front:])


def _index(x: Spec, indices: Sequence[Spec | None]) -> Spec:
    return Spec(_indexed(x, indices), x.dtype)


def _index_put(x: Spec, indices: Sequence[Spec | None], values: Spec, accumulate: bool) -> Spec:
    target = _indexed(x, indices)
    _require(broadcast(values.shape, target) == target, f"{values.shape} does not fill {target}")
    return Spec(x.shape, _one_dtype(x, values))


def _gather(x: Spec, dim: int, index: Spec) -> Spec:
    _dimension(x, dim)
    _require(len(x.shape) == len(_int64(index).shape), f"{x.shape} by {index.shape}")
    return Spec(index.shape, x.dtype)


def _scatter(x: Spec, dim: int, index: Spec, source: Spec) -> Spec:
    _require(len(source.shape) == len(_gather(x, dim, index).shape), f"{source.shape} into {x.shape}")
    return Spec(x.shape, _one_dtype(x, source))


def _scatter_value(x: Spec, dim: int, index: Spec, value: Any) -> Spec:
    _gather(x, dim, index)
    return x


def _slice_scatter(x: Spec, source: Spec, dim: int, start: int, end: int, step: int) -> Spec:
    _require(_slice(x, dim, start, end, step) == source, f"{source.shape} does not fill the slice")
    return x


def _select_scatter(x: Spec, source: Spec, dim: int, index: int) -> Spec:
    _require(_select(x, dim, index) == source, f"{source.shape} does not fill the selection")
    return x


def _cat(tensors: Sequence[Spec], dim: int) -> Spec:
    first = tensors[0]
    _dimension(first, dim)
    for other in tensors[1:]:
        _one_dtype(first, other)
        same = other.shape[:dim] + other.shape[dim + 1 :] == first.shape[:dim] + first.shape[dim + 1 :]
        _require(same, f"{first.shape} beside {other.shape}")
    total = sum(tensor.shape[dim] for tensor in tensors)
    return Spec((*first.shape[:dim], total, *first.shape[dim + 1 :]), first.dtype)


def _pad(x: Spec, pads: Sequence[int], value: Any) -> Spec:
    shape = list(x.shape)
    for place in range(len(pads) // 2):
        shape[-1 - place] += pads[2 * place] + pads[2 * place + 1]
    _require(min(shape, default=0) >= 0, f"padding {tuple(pads)} of {x.shape}")
    return Spec(tuple(shape), x.dtype)


def _flip(x: Spec, dims: Sequence[int]) -> Spec:
    for dim in dims:
        _dimension(x, dim)
    return x


def _full(shape: Sequence[int], value: Any, *, dtype: torch.dtype) -> Spec:
    return Spec(tuple(shape), dtype)


def _arange(start: Any, end: Any, step: Any, *, dtype: torch.dtype) -> Spec:
    return Spec((max(0, math.ceil((end - start) / step)),), dtype)


def _topk(x: Spec, count: int, dim: int, largest: bool, in_order: bool) -> tuple[Spec, ...]:
    _require(0 <= count <= _dimension(x, dim), f"{count} of {x.shape}")
    shape = (*x.shape[:dim], count, *x.shape[dim + 1 :])
    return Spec(shape, x.dtype), Spec(shape, torch.int64)


def _sort(x: Spec, dim: int, descending: bool) -> tuple[Spec, ...]:
    _dimension(x, dim)
    return x, Spec(x.shape, torch.int64)


def _windows(extents: Sequence[int], kernel: Sequence[int], stride: Any, pad: Any, dilation: Any) -> tuple[int, ...]:
    return tuple(
        (extent + 2 * padding - spread * (size - 1) - 1) // step + 1
        for extent, size, step, padding, spread in zip(extents, kernel, stride, pad, dilation, strict=True)
    )


def _convolution(
    x: Spec,
    weight: Spec,
    bias: Spec | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Spec:
    _require(len(x.shape) == len(weight.shape), f"{x.shape} under {weight.shape}")
    kernel = weight.shape[2:]
    if transposed:
        _require(x.shape[1] == weight.shape[0], f"{x.shape} under {weight.shape}")
        channels = weight.shape[1] * groups
        extents = tuple(
            (extent - 1) * step - 2 * pad + spread * (size - 1) + extra + 1
            for extent, size, step, pad, spread, extra in zip(
                x.shape[2:], kernel, stride, padding, dilation, output_padding, strict=True
            )
        )
    else:
        _require(x.shape[1] == weight.shape[1] * groups, f"{x.shape} under {weight.shape} in {groups} groups")
        channels = weight.shape[0]
        extents = _windows(x.shape[2:], kernel, stride, padding, dilation)
    _require(bias is None or bias.shape == (channels,), f"a bias of {bias} for {channels} channels")
    return Spec((x.shape[0], channels, *extents), _one_dtype(x, weight))


def _convolution_flops(x: Spec, weight: Spec, bias: Spec | None, *rest: Any) -> int:
    result = _convolution(x, weight, bias, *rest)
    transposed = rest[3]
    points = x.shape[2:] if transposed else result.shape[2:]
    return 2 * x.shape[0] * math.prod(points) * weight.count


def _convolution_backward(
    gradient: Spec, x: Spec, weight: Spec, bias_sizes: Sequence[int] | None, *rest: Any
) -> tuple[Spec, ...]:
    channels = gradient.shape[1]
    return x, weight, Spec((channels,), x.dtype)


def _convolution_backward_flops(
    gradient: Spec, x: Spec, weight: Spec, bias_sizes: Sequence[int] | None, *rest: Any
) -> int:
    mask = rest[-1]
    return (bool(mask[0]) + bool(mask[1])) * _convolution_flops(x, weight, None, *rest[:-1])


def _max_pool(
    x: Spec, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], up: bool
) -> tuple[Spec, ...]:
    _require(not up, "pooling that rounds up")
    shape = (*x.shape[:-2], *_windows(x.shape[-2:], kernel, stride, padding, dilation))
    return Spec(shape, x.dtype), Spec(shape, torch.int64)


def _max_pool_backward(gradient: Spec, x: Spec, *rest: Any) -> Spec:
    _int64(rest[-1])
    return Spec(x.shape, _one_dtype(gradient, x))


def _mask(key: Any, number: int, shape: Sequence[int], probability: float) -> Spec:
    return Spec(tuple(shape), torch.bool)


def _numbers(key: Any, number: int, shape: Sequence[int]) -> Spec:
    return Spec(tuple(shape), torch.float32)


# -- the table ----------------------------------------------------------------------------------------------------


def _rows() -> list[Op]:
    rows: list[Op] = []

    def add(kind: Kind, rule: Rule, names: str, flops: Callable[..., int] | None = None) -> None:
        rows.extend(Op(name if name.startswith("hal.") else f"aten.{name}", kind, rule, flops) for name in names.split())

    add(Kind.VIEW, _view, "view.default")
    add(Kind.VIEW, _permute, "permute.default")
    add(Kind.VIEW, _expand, "expand.default")
    add(Kind.VIEW, _squeeze, "squeeze.dims")
    add(Kind.VIEW, _unsqueeze, "unsqueeze.default")
    add(Kind.VIEW, _select, "select.int")
    add(Kind.VIEW, _slice, "slice.Tensor")

    add(Kind.ELEMENTWISE, _unary_floating, "exp.default expm1.default log.default log1p.default sqrt.default")
    add(Kind.ELEMENTWISE, _unary_floating, "rsqrt.default reciprocal.default sin.default cos.default tan.default")
    add(Kind.ELEMENTWISE, _unary_floating, "tanh.default sigmoid.default erf.default floor.default ceil.default")
    add(Kind.ELEMENTWISE, _unary_floating, "trunc.default round.default")
    add(Kind.ELEMENTWISE, _gelu, "gelu.default")
    add(Kind.ELEMENTWISE, _same, "neg.default abs.default sign.default relu.default")
    add(Kind.ELEMENTWISE, _logical, "logical_not.default logical_and.default logical_or.default")
    add(Kind.ELEMENTWISE, _bits, "bitwise_not.default bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor")
    add(Kind.ELEMENTWISE, _binary, "add.Tensor sub.Tensor mul.Tensor maximum.default minimum.default")
    add(Kind.ELEMENTWISE, _binary_floating, "div.Tensor pow.Tensor_Tensor atan2.default")
    add(Kind.ELEMENTWISE, _compare, "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor")
    add(Kind.ELEMENTWISE, _scalar, "add.Scalar mul.Scalar div.Scalar pow.Tensor_Scalar fmod.Scalar remainder.Scalar")
    add(Kind.ELEMENTWISE, _scalar_first, "pow.Scalar")
    add(Kind.ELEMENTWISE, _compare_scalar, "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar")
    add(Kind.ELEMENTWISE, _where, "where.self")
    add(Kind.ELEMENTWISE, _clamp, "clamp.default")
    add(Kind.ELEMENTWISE, _cast, "_to_copy.default")

    add(Kind.REDUCTION, _sum, "sum.dim_IntList")
    add(Kind.REDUCTION, _mean, "mean.dim")
    add(Kind.REDUCTION, _extreme, "amax.default amin.default")
    add(Kind.REDUCTION, _any, "any.dim")
    add(Kind.REDUCTION, _argument, "argmax.default argmin.default")
    add(Kind.REDUCTION, _product, "prod.dim_int")
    add(Kind.SCAN, _scan, "cumsum.default cumprod.default")
    add(Kind.NORMALISATION, _softmax, "_softmax.default _log_softmax.default")
    add(Kind.NORMALISATION, _safe_softmax, "_safe_softmax.default")  # rows of nothing but -inf give zeros
    add(Kind.NORMALISATION, _layer_norm, "native_layer_norm.default")
    add(Kind.MATMUL, _mm, "mm.default", _mm_flops)
    add(Kind.MATMUL, _bmm, "bmm.default", _mm_flops)
    add(Kind.MATMUL, _addmm, "addmm.default", _addmm_flops)

    add(Kind.GATHER, _embedding, "embedding.default")
    add(Kind.GATHER, _index, "index.Tensor")
    add(Kind.GATHER, _gather, "gather.default")
    add(Kind.SCATTER, _index_put, "index_put.default")
    add(Kind.SCATTER, _scatter, "scatter.src scatter_add.default")
    add(Kind.SCATTER, _scatter_value, "scatter.value")
    add(Kind.SCATTER, _slice_scatter, "slice_scatter.default")
    add(Kind.SCATTER, _select_scatter, "select_scatter.default")
    add(Kind.MOVE, _cat, "cat.default")
    add(Kind.MOVE, _pad, "constant_pad_nd.default")
    add(Kind.MOVE, _flip, "flip.default")
    add(Kind.CREATE, _full, "full.default")
    add(Kind.CREATE, _arange, "arange.start_step")
    add(Kind.SORT, _topk, "topk.default")
    add(Kind.SORT, _sort, "sort.default")
    add(Kind.WINDOW, _convolution, "convolution.default", _convolution_flops)
    add(Kind.WINDOW, _convolution_backward, "convolution_backward.default", _convolution_backward_flops)
    add(Kind.WINDOW, _max_pool, "max_pool2d_with_indices.default")
    add(Kind.WINDOW, _max_pool_backward, "max_pool2d_with_indices_backward.default")
    add(Kind.RANDOM, _mask, "hal.random.keep_mask")
    add(Kind.RANDOM, _numbers, "hal.random.uniform hal.random.normal")
    return rows


OPS: dict[str, Op] = {row.name: row for row in _rows()}
"""Every op by name."""


# -- nodes and programs -------------------------------------------------------------------------------------------


def name_of(target: Any) -> str:
    """The table's name for what a node calls: `aten.add.Tensor`, `hal.random.keep_mask`."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{target.__module__}.{target.__qualname__}"


def spec_of(value: Any) -> Any:
    """A node's `meta["val"]` as Spec, or as a tuple of them where the op has several results."""
    if isinstance(value, torch.Tensor):
        return Spec(tuple(value.shape), value.dtype)
    if isinstance(value, (tuple, list)):
        return tuple(spec_of(item) for item in value)
    return value


def arguments_of(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's arguments with tensors as Spec, as the rows of the table take them."""

    def spec(argument: fx.Node) -> Any:
        return spec_of(argument.meta.get("val"))

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), spec)
    return tuple(args), dict(kwargs)


def calls(graph: fx.Graph) -> list[fx.Node]:
    """The ops of a graph in order, `getitem` left out."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]


def count_flops(graph: fx.Graph) -> int:
    """FLOPs of the matrix products and convolutions of a core graph (`Program.flops`); ops not in the table are 0."""
    rows = [(OPS.get(name_of(node.target)), node) for node in calls(graph)]
    return sum(
        row.flops(*args, **kwargs)
        for row, (args, kwargs) in ((row, arguments_of(node)) for row, node in rows)
        if row is not None and row.kind in (Kind.MATMUL, Kind.WINDOW)
    )


def count_moved(graph: fx.Graph) -> int:
    """Bytes that the ops of a core graph read and write (`Program.moved`)."""
    total = 0
    for node in calls(graph):
        row = OPS.get(name_of(node.target))
        if row is not None:
            args, kwargs = arguments_of(node)
            total += row.moved(*args, **kwargs)
    return total


def check(program: Program, device: str, lacking: frozenset[str] = frozenset()) -> None:
    """Hold a program to the table, as `Device.compile` does first. `lacking` are ops that this device has not got.

    Raises Unsupported, naming the op and the layer, for an op outside the table or lacking, and CompileError for a
    node whose shapes or dtypes are not what the table says.
    """
    for node in calls(program.graph):
        name = name_of(node.target)
        row = OPS.get(name)
        value = spec_of(node.meta.get("val"))
        if row is None or name in lacking:
            dtype = str(value.dtype) if isinstance(value, Spec) else ""
            raise Unsupported(
                f"{program.name!r} needs the op {name}, which device {device!r} does not have. Run it on a device that "
                "does (the CPU has all), or write the layer without it.",
                op=name,
                dtype=dtype,
                device=device,
            )
        args, kwargs = arguments_of(node)
        try:
            found = row.results(*args, **kwargs)
        except (ValueError, TypeError, IndexError) as failure:
            raise CompileError(f"{program.name!r}: {name} with {args} {kwargs} is not well formed: {failure}") from failure
        if found != value:
            raise CompileError(f"{program.name!r}: {name} gives {found}, and the graph says {value}")
