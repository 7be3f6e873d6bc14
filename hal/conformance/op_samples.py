"""Arguments to try every op of `hal.ops` with, and programs of one op to try them in.

Shapes, dtypes and values come from a seed: small extents with odd sizes, dimensions of 1 that broadcast, tensors
without dimensions, empty ones where the op allows it, and now and then infinities and NaN. It judges nothing.
Invariant: the arguments obey the rule of the op's row.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hal import random as counter_random
from hal.kernel import Port, Program, Role
from hal.ops import OPS, Spec, arguments_of, count_flops, count_moved

Arguments = tuple[list[Any], dict[str, Any]]

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Sampler:
    """Draws arguments. `floating` is the dtype of floating-point tensors."""

    def __init__(self, seed: int, floating: torch.dtype) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.floating = floating

    def shape(self, least: int = 0, most: int = 4, empty: bool = True) -> list[int]:
        """Extents: mostly 1 to 7, sometimes 0 or more than a vector register holds."""
        extents = [self.random.choice((1, 2, 3, 4, 5, 7)) for _ in range(self.random.randint(least, most))]
        if extents and self.random.random() < 0.2:
            extents[self.random.randrange(len(extents))] = self.random.choice((17, 33, 65))
        if extents and empty and self.random.random() < 0.05:
            extents[self.random.randrange(len(extents))] = 0
        return extents

    def dim(self, shape: Sequence[int]) -> int:
        """One of the dimensions."""
        return self.random.randrange(len(shape))

    def dims(self, shape: Sequence[int]) -> list[int]:
        """Some of the dimensions, at least one, in order."""
        return sorted(self.random.sample(range(len(shape)), self.random.randint(1, len(shape))))

    def real(self, shape: Sequence[int], low: float = -3.0, high: float = 3.0) -> torch.Tensor:
        """Floating-point numbers from low to high."""
        drawn = torch.rand(tuple(shape), generator=self.generator, dtype=torch.float64) * (high - low) + low
        return drawn.to(self.floating)

    def special(self, shape: Sequence[int]) -> torch.Tensor:
        """Floating-point numbers, some of them zeros, and sometimes infinities and NaN."""
        result = self.real(shape)
        flat = result.view(-1)
        if flat.numel():
            flat[self.random.randrange(flat.numel())] = 0.0
            if self.random.random() < 0.3:
                for value in (math.inf, -math.inf, math.nan):
                    flat[self.random.randrange(flat.numel())] = value
        return result

    def integers(self, shape: Sequence[int], low: int = -9, high: int = 9, dtype: Any = None) -> torch.Tensor:
        """Integers from low to high, both included, of a dtype drawn if none is given."""
        dtype = dtype or self.random.choice(INTEGERS)
        if dtype is torch.uint8:
            low, high = max(low, 0), max(high, 0)
        return torch.randint(low, high + 1, tuple(shape), generator=self.generator).to(dtype)

    def booleans(self, shape: Sequence[int]) -> torch.Tensor:
        """Both truth values."""
        return torch.rand(tuple(shape), generator=self.generator) < 0.5

    def any_dtype(self, shape: Sequence[int]) -> torch.Tensor:
        """Numbers or booleans of any dtype."""
        kind = self.random.random()
        if kind < 0.6:
            return self.special(shape)
        return self.integers(shape) if kind < 0.85 else self.booleans(shape)

    def number(self) -> torch.Tensor:
        """Numbers of any shape, most of them floating-point."""
        shape = self.shape()
        return self.special(shape) if self.random.random() < 0.7 else self.integers(shape)

    def broadcasting(self, shape: Sequence[int]) -> list[int]:
        """A shape that broadcasts with this one."""
        return [1 if self.random.random() < 0.3 else extent for extent in shape[self.random.randint(0, len(shape)) :]]

    def flag(self) -> bool:
        """True or False."""
        return self.random.random() < 0.5

    def index(self, shape: Sequence[int], extent: int, negative: bool = False) -> torch.Tensor:
        """Indices into a dimension of that extent."""
        return self.integers(shape, -extent if negative else 0, extent - 1, torch.int64)


def sample(name: str, seed: int, floating: torch.dtype = torch.float32) -> Arguments:
    """Arguments for the op of that name: positional and by keyword. CPU tensors."""
    sampler = Sampler(seed, floating)
    args, kwargs = SAMPLES[name](sampler), {}
    if args and isinstance(args[-1], dict):
        kwargs = args.pop()
    return args, kwargs


# Each takes a sampler and returns the arguments; a dict at the end holds those by keyword.


def _unary(low: float = -3.0, high: float = 3.0) -> Callable[[Sampler], list[Any]]:
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


def _real_pair(low: float, high: float) -> Callable[[Sampler], list[Any]]:
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


def _with_number(low: float, high: float) -> Callable[[Sampler], list[Any]]:
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


def _distinct(s: Sampler, shape: Sequence[int]) -> torch.Tensor:
    """Numbers no two of which are equal: which of two equal ones comes first is not defined."""
    count = math.prod(shape)
    places = torch.randperm(count, generator=s.generator).view(tuple(shape))
    return ((places - count // 2) / 8).to(s.floating)


def _any(s: Sampler) -> list[Any]:
    shape = s.shape(1)
    return [s.booleans(shape), s.dim(shape), s.flag()]


def _place(s: Sampler) -> list[Any]:
    shape = s.shape(1, 3, empty=False)
    return [_distinct(s, shape), s.dim(shape), s.flag()]


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


def _extent(s: Sampler) -> int:
    return s.random.choice((1, 2, 3, 5, 8, 16, 17, 33))


def _mm(s: Sampler) -> list[Any]:
    rows, inner, columns = _extent(s), _extent(s), _extent(s)
    return [s.real([rows, inner]), s.real([inner, columns])]


def _addmm(s: Sampler) -> list[Any]:
    x, y = _mm(s)
    return [s.real(s.broadcasting([x.shape[0], y.shape[1]])), x, y]


def _bmm(s: Sampler) -> list[Any]:
    batch, rows, inner, columns = s.random.randint(1, 5), _extent(s), _extent(s), _extent(s)
    return [s.real([batch, rows, inner]), s.real([batch, inner, columns])]


def _view(s: Sampler) -> list[Any]:
    x = s.any_dtype(s.shape())
    extents = [extent for extent in x.shape if extent != 1 or s.flag()]
    if len(extents) > 1 and s.flag():
        place = s.random.randrange(len(extents) - 1)
        extents[place : place + 2] = [extents[place] * extents[place + 1]]
    if s.flag():
        extents.insert(s.random.randint(0, len(extents)), 1)
    return [x, extents]


def _permute(s: Sampler) -> list[Any]:
    x = s.any_dtype(s.shape())
    return [x, s.random.sample(range(x.dim()), x.dim())]


def _expand(s: Sampler) -> list[Any]:
    shape = s.shape()
    return [s.any_dtype(s.broadcasting(shape)), shape]


def _squeeze(s: Sampler) -> list[Any]:
    shape = [1 if s.flag() else extent for extent in s.shape(1)]
    shape[s.dim(shape)] = 1
    ones = [dim for dim, extent in enumerate(shape) if extent == 1]
    return [s.any_dtype(shape), sorted(s.random.sample(ones, s.random.randint(1, len(ones))))]


def _unsqueeze(s: Sampler) -> list[Any]:
    x = s.any_dtype(s.shape())
    return [x, s.random.randint(0, x.dim())]


def _select(s: Sampler) -> list[Any]:
    shape = s.shape(1, empty=False)
    dim = s.dim(shape)
    return [s.any_dtype(shape), dim, s.random.randrange(shape[dim])]


def _bounds(s: Sampler, shape: Sequence[int]) -> list[int]:
    dim = s.dim(shape)
    start, end = sorted((s.random.randint(0, shape[dim]), s.random.randint(0, shape[dim])))
    return [dim, start, end, s.random.choice((1, 1, 2, 3))]


def _slice(s: Sampler) -> list[Any]:
    shape = s.shape(1)
    return [s.any_dtype(shape), *_bounds(s, shape)]


def _embedding(s: Sampler) -> list[Any]:
    rows = _extent(s)
    return [s.real([rows, _extent(s)]), s.index(s.shape(0, 3), rows)]


def _indexed(s: Sampler) -> tuple[list[int], list[Any]]:
    shape = s.shape(1, 4, empty=False)
    used = s.dims(shape)
    picked = s.shape(0, 2, empty=False)
    indices: list[Any] = [None] * (used[-1] + 1)
    for place in used:
        indices[place] = s.index(s.broadcasting(picked), shape[place], negative=s.flag())
    return shape, indices


def _index(s: Sampler) -> list[Any]:
    shape, indices = _indexed(s)
    return [s.any_dtype(shape), indices]


def _index_put(s: Sampler) -> list[Any]:
    shape, indices = _indexed(s)
    x = s.real(shape)
    if s.flag():
        return [x, indices, s.real(s.broadcasting(x[_slices(indices)].shape)), True]
    # Which of two values put to one place stays is not defined: the places differ.
    dim = s.dim(shape)
    count = s.random.randint(1, shape[dim])
    places = torch.randperm(shape[dim], generator=s.generator)[:count]
    indices = [*[None] * dim, places]
    return [x, indices, s.real(x[_slices(indices)].shape), False]


def _slices(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


def _gathered(s: Sampler, distinct: bool) -> tuple[list[int], int, torch.Tensor]:
    shape = s.shape(1, 3, empty=False)
    dim = s.dim(shape)
    extents = [s.random.randint(1, extent) for extent in shape]
    if not distinct:
        extents[dim] = s.random.randint(1, 6)
        return shape, dim, s.index(extents, shape[dim])
    order = torch.rand(shape, generator=s.generator).argsort(dim)
    return shape, dim, order[tuple(slice(0, extent) for extent in extents)].contiguous()


def _gather(s: Sampler) -> list[Any]:
    shape, dim, index = _gathered(s, False)
    return [s.any_dtype(shape), dim, index]


def _scatter(s: Sampler) -> list[Any]:
    shape, dim, index = _gathered(s, True)
    return [s.real(shape), dim, index, s.real([extent + s.random.randint(0, 2) for extent in index.shape])]


def _scatter_add(s: Sampler) -> list[Any]:
    shape, dim, index = _gathered(s, False)
    return [s.real(shape), dim, index, s.real(index.shape)]


def _scatter_value(s: Sampler) -> list[Any]:
    shape, dim, index = _gathered(s, False)
    return [s.real(shape), dim, index, s.random.uniform(-2, 2)]


def _slice_scatter(s: Sampler) -> list[Any]:
    shape = s.shape(1)
    x, bounds = s.real(shape), _bounds(s, shape)
    dim, start, end, step = bounds
    return [x, s.real([*shape[:dim], -(-(end - start) // step), *shape[dim + 1 :]]), *bounds]


def _select_scatter(s: Sampler) -> list[Any]:
    shape = s.shape(1, empty=False)
    dim = s.dim(shape)
    return [s.real(shape), s.real([*shape[:dim], *shape[dim + 1 :]]), dim, s.random.randrange(shape[dim])]


def _cat(s: Sampler) -> list[Any]:
    first = s.any_dtype(s.shape(1))
    dim = s.dim(first.shape)
    parts = [first]
    for _ in range(s.random.randint(0, 3)):
        shape = list(first.shape)
        shape[dim] = s.random.randint(0, 4)
        if first.dtype.is_floating_point:
            parts.append(s.special(shape))
        else:
            parts.append(s.booleans(shape) if first.dtype is torch.bool else s.integers(shape, dtype=first.dtype))
    return [parts, dim]


def _pad(s: Sampler) -> list[Any]:
    shape = [extent + 2 for extent in s.shape(1, empty=False)]
    pads = [s.random.randint(-1, 3) for _ in range(2 * s.random.randint(1, len(shape)))]
    return [s.real(shape), pads, s.random.choice((0.0, 1.5, -math.inf))]


def _flip(s: Sampler) -> list[Any]:
    shape = s.shape(1)
    return [s.any_dtype(shape), s.dims(shape)]


def _full(s: Sampler) -> list[Any]:
    shape = s.shape()
    dtype, value = s.random.choice(
        ((s.floating, 1.5), (s.floating, -math.inf), (torch.int64, 7), (torch.bool, True), (torch.int32, -2))
    )
    return [shape, value, {"dtype": dtype}]


def _arange(s: Sampler) -> list[Any]:
    if s.flag():
        step = s.random.choice((1, 2, 3, -1))
        start = s.random.randint(-3, 3)
        return [start, start + step * s.random.randint(0, 41), step, {"dtype": torch.int64}]
    return [0, s.random.randint(0, 40), 1, {"dtype": s.floating}]


def _topk(s: Sampler) -> list[Any]:
    shape = s.shape(1, 3, empty=False)
    dim = s.dim(shape)
    return [_distinct(s, shape), s.random.randint(1, shape[dim]), dim, s.flag(), True]


def _sort(s: Sampler) -> list[Any]:
    shape = s.shape(1, 3, empty=False)
    return [_distinct(s, shape), s.dim(shape), s.flag()]


def _convolved(s: Sampler) -> list[Any]:
    """(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)."""
    space = s.random.choice((1, 2, 2, 3))
    groups, inner, outer = s.random.choice((1, 1, 2)), s.random.randint(1, 3), s.random.randint(1, 3)
    stride, padding, dilation, kernel = (
        [s.random.randint(least, 2) for _ in range(space)] for least in (1, 0, 1, 1)
    )
    transposed = s.random.random() < 0.3
    further = [s.random.randint(0, step - 1) if transposed else 0 for step in stride]
    extents = [spread * (size - 1) + 5 + s.random.randint(0, 2) for size, spread in zip(kernel, dilation, strict=True)]
    shape = [groups * inner, outer] if transposed else [groups * outer, inner]
    x = s.real([s.random.randint(1, 3), groups * inner, *extents])
    bias = s.real([groups * outer]) if s.flag() else None
    return [x, s.real([*shape, *kernel]), bias, stride, padding, dilation, transposed, further, groups]


def _convolution_backward(s: Sampler) -> list[Any]:
    x, weight, _, *rest = _convolved(s)
    result: Any = OPS["aten.convolution.default"].results(_spec(x), _spec(weight), None, *rest)
    return [s.real(result.shape), x, weight, [result.shape[1]], *rest, [True, True, True]]


def _pooled(s: Sampler) -> list[Any]:
    kernel = [s.random.randint(1, 3) for _ in range(2)]
    padding = [s.random.randint(0, size // 2) for size in kernel]
    stride = [s.random.randint(1, 3) for _ in range(2)]
    shape = [s.random.randint(1, 3), s.random.randint(1, 3), *(size + s.random.randint(2, 6) for size in kernel)]
    return [_distinct(s, shape), kernel, stride, padding, [1, 1], False]


def _pool_backward(s: Sampler) -> list[Any]:
    x, *rest = _pooled(s)
    values, places = torch.ops.aten.max_pool2d_with_indices.default(x, *rest)
    return [s.real(values.shape), x, *rest, places]


def _spec(tensor: torch.Tensor) -> Spec:
    return Spec(tuple(tensor.shape), tensor.dtype)


def _drawn(probability: bool) -> Callable[[Sampler], list[Any]]:
    def draw(s: Sampler) -> list[Any]:
        key = counter_random.RandomKey(*(s.random.randrange(limit) for limit in (2**64, 2**32, 2**20, 2**32)))
        further = [s.random.choice((0.0, 0.1, 0.5, 0.9, 1.0))] if probability else []
        return [key, s.random.randrange(counter_random.OP_LIMIT), s.shape(), *further]

    return draw


def _samples() -> dict[str, Callable[[Sampler], list[Any]]]:
    table: dict[str, Callable[[Sampler], list[Any]]] = {}

    def add(draw: Callable[[Sampler], list[Any]], names: str) -> None:
        table.update({f"aten.{name}": draw for name in names.split()})

    add(_unary_special, "exp.default expm1.default sin.default cos.default tanh.default sigmoid.default erf.default")
    add(_unary_special, "floor.default ceil.default trunc.default round.default")
    add(_unary(0.1, 4.0), "log.default sqrt.default rsqrt.default reciprocal.default")
    add(_unary(-0.8, 4.0), "log1p.default")
    add(_unary(-1.4, 1.4), "tan.default")
    add(lambda s: [s.real(s.shape()), {"approximate": s.random.choice(("none", "tanh"))}], "gelu.default")
    add(_signed, "neg.default abs.default sign.default")
    add(_any_number, "relu.default")
    add(lambda s: [s.booleans(s.shape())], "logical_not.default")
    add(_floor_divided, "floor_divide.default")
    add(_booleans, "logical_and.default logical_or.default")
    add(lambda s: _bits(s)[:1], "bitwise_not.default")
    add(_bits, "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor")
    add(_pair, "add.Tensor sub.Tensor mul.Tensor maximum.default minimum.default")
    add(_pair, "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor")
    add(_real_pair(0.2, 3.0), "div.Tensor pow.Tensor_Tensor atan2.default")
    add(_with_number(-3.0, 3.0), "add.Scalar mul.Scalar")
    add(lambda s: [s.special(s.shape()), s.random.choice((-2.0, 0.5, 3.0))], "div.Scalar")
    add(lambda s: [s.real(s.shape(), 0.1, 3.0), s.random.choice((-2.0, 1.5, 4.0))], "pow.Tensor_Scalar")
    add(lambda s: [s.random.uniform(0.5, 3.0), s.real(s.shape())], "pow.Scalar")
    add(lambda s: [s.real(s.shape(), -9.0, 9.0), 2.0] if s.flag() else [s.integers(s.shape()), 3], "fmod.Scalar")
    add(lambda s: [s.real(s.shape(), -9.0, 9.0), 2.0] if s.flag() else [s.integers(s.shape()), 3], "remainder.Scalar")
    add(_compared, "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar")
    add(_where, "where.self")
    add(_clamp, "clamp.default")
    add(_cast, "_to_copy.default")
    add(_reduced, "sum.dim_IntList amax.default amin.default")
    add(_mean, "mean.dim")
    add(_any, "any.dim")
    add(_place, "argmax.default argmin.default")
    add(_product, "prod.dim_int")
    add(_scan, "cumsum.default cumprod.default")
    add(_softmax, "_softmax.default _log_softmax.default")
    add(_safe_softmax, "_safe_softmax.default")
    add(_layer_norm, "native_layer_norm.default")
    add(_mm, "mm.default")
    add(_bmm, "bmm.default")
    add(_addmm, "addmm.default")
    add(_view, "view.default")
    add(_permute, "permute.default")
    add(_expand, "expand.default")
    add(_squeeze, "squeeze.dims")
    add(_unsqueeze, "unsqueeze.default")
    add(_select, "select.int")
    add(_slice, "slice.Tensor")
    add(_embedding, "embedding.default")
    add(_index, "index.Tensor")
    add(_index_put, "index_put.default")
    add(_gather, "gather.default")
    add(_scatter, "scatter.src")
    add(_scatter_add, "scatter_add.default")
    add(_scatter_value, "scatter.value")
    add(_slice_scatter, "slice_scatter.default")
    add(_select_scatter, "select_scatter.default")
    add(_cat, "cat.default")
    add(_pad, "constant_pad_nd.default")
    add(_flip, "flip.default")
    add(_full, "full.default")
    add(_arange, "arange.start_step")
    add(_topk, "topk.default")
    add(_sort, "sort.default")
    add(_convolved, "convolution.default")
    add(_convolution_backward, "convolution_backward.default")
    add(_pooled, "max_pool2d_with_indices.default")
    add(_pool_backward, "max_pool2d_with_indices_backward.default")
    table["hal.random.keep_mask"] = _drawn(True)
    table["hal.random.uniform"] = table["hal.random.normal"] = _drawn(False)
    return table


SAMPLES: dict[str, Callable[[Sampler], list[Any]]] = _samples()
"""By the names of `hal.ops.OPS`."""


# -- programs of one op -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A program of one op, what to run it with, and what PyTorch makes of it. `key` is None unless it draws."""

    program: Program
    inputs: tuple[torch.Tensor, ...]
    key: counter_random.RandomKey | None
    expected: tuple[torch.Tensor, ...]


def target_of(name: str) -> Any:
    """What a node calls, by the table's name."""
    if name.startswith("hal.random."):
        return getattr(counter_random, name.removeprefix("hal.random."))
    _, packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def expected_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """What PyTorch gives for these arguments, with `view` as a reshape."""
    target = torch.reshape if name == "aten.view.default" else target_of(name)
    result = target(*args, **kwargs)
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def case(name: str, seed: int, floating: torch.dtype = torch.float32) -> Case:
    """The op with arguments drawn by the seed, as a program whose inputs are its tensors."""
    args, kwargs = sample(name, seed, floating)
    graph = fx.Graph()
    tensors: list[torch.Tensor] = []
    key: counter_random.RandomKey | None = None
    key_node: fx.Node | None = None

    def place(argument: Any) -> Any:
        nonlocal key, key_node
        if isinstance(argument, torch.Tensor):
            node = graph.placeholder(f"value_{len(tensors)}")
            node.meta = {"val": argument}
            tensors.append(argument.contiguous())
            return node
        if isinstance(argument, counter_random.RandomKey):
            key, key_node = argument, graph.placeholder("key")
            return key_node
        if isinstance(argument, (list, tuple)):
            return [place(item) for item in argument]
        return argument

    row = OPS[name]
    node = graph.call_function(target_of(name), tuple(place(argument) for argument in args), kwargs)
    specs, named = arguments_of(node)
    results = row.results(*specs, **named)
    blanks = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in _as_tuple(results)]
    node.meta = {"val": blanks[0] if isinstance(results, Spec) else tuple(blanks)}
    outputs: tuple[fx.Node, ...] = (node,)
    if not isinstance(results, Spec):
        outputs = tuple(graph.call_function(operator.getitem, (node, index)) for index in range(len(results)))
        for output, blank in zip(outputs, blanks, strict=True):
            output.meta = {"val": blank}
    graph.output(outputs)
    program = Program(
        name=f"{name} {seed}",
        graph=graph,
        inputs=tuple(Port(Role.VALUE, i, tuple(t.shape), t.dtype) for i, t in enumerate(tensors)),
        outputs=tuple(Port(Role.VALUE, i, spec.shape, spec.dtype, True) for i, spec in enumerate(_as_tuple(results))),
        constants={},
        draws=key is not None,
        flops=count_flops(graph),
        moved=count_moved(graph),
        workspace=sum(spec.size for spec in _as_tuple(results)),
        fingerprint=f"{name} {args} {kwargs} {floating}",
    )
    return Case(program, tuple(tensors), key, expected_of(name, args, kwargs))


def _as_tuple(results: Any) -> tuple[Spec, ...]:
    return (results,) if isinstance(results, Spec) else tuple(results)
