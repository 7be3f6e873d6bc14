"""Arguments for every op of `hal.ops`: odd shapes, broadcasting, edges, made anew from a seed that is the op's name.

These are chosen for their edges; `op_samples` draws any. A row says which kinds of dtype an op is tried in and how its
arguments are made. It says nothing of results. Invariant:
every op of the table has a row, and no sample depends on which of two equal elements an op picks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32)
BOOLEANS = (torch.bool,)


@dataclass(frozen=True)
class Sample:
    """One call of an op. Tensors among the arguments become inputs of a program."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


class Maker:
    """Makes tensors of one dtype, the same ones each time."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {dtype}".encode()))

    def numbers(self, *shape: int, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
        """Numbers from `low` to `high`; integers from -9 to 9 and booleans whatever these say."""
        if self.dtype is torch.bool:
            return torch.rand(shape, generator=self._generator) < 0.5
        if not self.dtype.is_floating_point:
            return torch.randint(-9, 10, shape, generator=self._generator).to(self.dtype)
        return (torch.rand(shape, generator=self._generator) * (high - low) + low).to(self.dtype)

    def distinct(self, *shape: int) -> torch.Tensor:
        """No two numbers alike, so that order is a matter of value alone. At most 200 elements."""
        count = math.prod(shape)
        order = torch.randperm(count, generator=self._generator) - count // 2
        return (order.reshape(shape) / (4 if self.dtype.is_floating_point else 1)).to(self.dtype)

    def booleans(self, *shape: int) -> torch.Tensor:
        """True and False."""
        return torch.rand(shape, generator=self._generator) < 0.5

    def indices(self, *shape: int, below: int) -> torch.Tensor:
        """int64 indices, with repetitions."""
        return torch.randint(0, below, shape, generator=self._generator)

    def distinct_indices(self, *shape: int, dim: int, below: int) -> torch.Tensor:
        """int64 indices of which none comes twice along `dim`."""
        ranks = list(shape)
        ranks[dim] = below
        order = torch.rand(ranks, generator=self._generator).argsort(dim)
        return order.narrow(dim, 0, shape[dim]).contiguous()


Build = Callable[[Maker], list[tuple[Any, ...]]]
_ROWS: dict[str, tuple[Build, tuple[torch.dtype, ...]]] = {}


def samples(name: str, dtype: torch.dtype) -> list[Sample]:
    """The calls of an op that are tried in a dtype."""
    build, _ = _ROWS[name]
    made = []
    for arguments in build(Maker(name, dtype)):
        named = arguments[-1] if arguments and isinstance(arguments[-1], dict) else {}
        made.append(Sample(arguments[: len(arguments) - bool(named)], named))
    return made


def tried() -> Iterator[tuple[str, torch.dtype]]:
    """Every op and dtype that there are samples for."""
    for name, (_, dtypes) in _ROWS.items():
        for dtype in dtypes:
            yield name, dtype


def _row(names: str, build: Build, dtypes: tuple[torch.dtype, ...] = FLOATING) -> None:
    for name in names.split():
        _ROWS[f"aten.{name}"] = (build, dtypes)


def _unary(low: float = -2.0, high: float = 2.0) -> Build:
    """One tensor: of no dimension, of odd sizes, and long enough for several work groups and a remainder."""
    return lambda make: [(make.numbers(*shape, low=low, high=high),) for shape in ((), (3, 5, 7), (2051,))]


def _two(low: float = -2.0, high: float = 2.0) -> Build:
    pairs = [((3, 5, 7), (3, 5, 7)), ((3, 1, 7), (5, 1)), ((), (11,)), ((1027,), (1027,)), ((4, 6), (1, 6))]
    return lambda make: [
        (make.numbers(*left, low=low, high=high), make.numbers(*right, low=low, high=high)) for left, right in pairs
    ]


def _with_number(number: Any) -> Build:
    def build(make: Maker) -> list[tuple[Any, ...]]:
        value = number if make.dtype.is_floating_point else int(number)
        return [(make.numbers(*shape, low=-2.0, high=2.0), value) for shape in ((), (3, 5, 7), (515,))]

    return build


def _whole_quotients(make: Maker) -> list[tuple[Any, ...]]:
    divisors = torch.tensor([-3, -2, -1, 1, 2, 3, 7], dtype=make.dtype)
    return [(make.numbers(3, 5, 7), divisors), (make.numbers(11), divisors[:1].reshape(()))]


def _reduced(*extra: Any) -> Build:
    def build(make: Maker) -> list[tuple[Any, ...]]:
        return [
            (make.distinct(3, 5, 7), [1], False, *extra),
            (make.distinct(3, 5, 7), [0, 2], True, *extra),
            (make.distinct(5, 31), [1], True, *extra),
            (make.distinct(3, 5, 7), [0, 1, 2], False, *extra),
        ]

    return build


def _summed(make: Maker) -> list[tuple[Any, ...]]:
    return [
        (make.numbers(3, 5, 7), [1], False),
        (make.numbers(3, 5, 7), [0, 2], True),
        (make.numbers(9, 1031), [1], False),
        (make.numbers(1031, 9), [0], False),
        (make.numbers(3, 5, 7), [0, 1, 2], False),
    ]


def _along(make: Maker) -> list[tuple[Any, ...]]:
    return [(make.distinct(3, 5, 7), 1, False), (make.distinct(7, 13), 0, True), (make.distinct(11), 0, False)]


def _of_dimension(*extra: Any) -> Build:
    return lambda make: [
        (make.numbers(3, 5, 7, low=-1.2, high=1.2), 1, *extra),
        (make.numbers(4, 133, low=-1.2, high=1.2), 1, *extra),
        (make.numbers(9, 5, low=-1.2, high=1.2), 0, *extra),
    ]


def _safe_softmax(make: Maker) -> list[tuple[Any, ...]]:
    x = make.numbers(4, 6, 9)
    x[1, 2] = -math.inf
    x[0, :, 4:] = -math.inf
    return [(x, 2), (make.numbers(5, 3), 0)]


def _layer_norm(make: Maker) -> list[tuple[Any, ...]]:
    return [
        (make.numbers(3, 5, 8), [8], make.numbers(8), make.numbers(8), 1e-5),
        (make.numbers(7, 131), [131], make.numbers(131), None, 1e-3),
        (make.numbers(4, 3, 5), [3, 5], None, None, 1e-5),
    ]


def _products(make: Maker) -> list[tuple[Any, ...]]:
    sizes = [(1, 1, 1), (5, 7, 3), (33, 65, 17), (64, 128, 64), (1, 40, 9), (9, 40, 1)]
    return [(make.numbers(m, k), make.numbers(k, n)) for m, k, n in sizes]


def _batched(make: Maker) -> list[tuple[Any, ...]]:
    sizes = [(3, 5, 7, 2), (1, 16, 16, 16), (6, 17, 33, 9)]
    return [(make.numbers(b, m, k), make.numbers(b, k, n)) for b, m, k, n in sizes]


def _addmm(make: Maker) -> list[tuple[Any, ...]]:
    biases: list[tuple[int, ...]] = [(17,), (33, 17), (33, 1), ()]
    return [(make.numbers(*bias), make.numbers(33, 20), make.numbers(20, 17)) for bias in biases]


def _indexed(make: Maker) -> list[tuple[Any, ...]]:
    return [
        (make.numbers(7, 5, 3), [make.indices(4, below=7)]),
        (make.numbers(7, 5, 3), [make.indices(4, 2, below=7) - 7, make.indices(2, below=5)]),
        (make.numbers(7, 5, 3), [None, make.indices(6, below=5)]),
        (make.numbers(7, 5, 3), [make.indices(2, below=7), None, make.indices(2, below=3)]),
    ]


def _put(make: Maker) -> list[tuple[Any, ...]]:
    index = make.distinct_indices(4, dim=0, below=7)
    return [
        (make.numbers(7, 5), [make.indices(40, below=7)], make.numbers(40, 5), True),
        (make.numbers(7, 5), [make.indices(3, 4, below=7)], make.numbers(3, 4, 5), True),
        (make.numbers(7, 5), [index], make.numbers(4, 5), False),
        (make.numbers(7, 5), [None, make.indices(9, below=5)], make.numbers(7, 9), True),
        (make.numbers(7, 5), [index], make.numbers(1, 5), False),
    ]


def _scattered(repeated: bool) -> Build:
    def build(make: Maker) -> list[tuple[Any, ...]]:
        rows = [((5, 7), 1, (5, 3)), ((9, 4), 0, (6, 2)), ((3, 5, 7), 1, (3, 4, 7))]
        made = []
        for shape, dim, taken in rows:
            index = (
                make.indices(*taken, below=shape[dim])
                if repeated
                else make.distinct_indices(*taken, dim=dim, below=shape[dim])
            )
            made.append((make.numbers(*shape), dim, index, make.numbers(*taken)))
        return made

    return build


def _padded(make: Maker) -> list[tuple[Any, ...]]:
    number = 1.5 if make.dtype.is_floating_point else 3
    return [
        (make.numbers(3, 5), [1, 2], number),
        (make.numbers(3, 5, 7), [0, 3, 2, 0], number),
        (make.numbers(4, 6), [-1, 2, 1, -2], number),
    ]


def _convolved(make: Maker) -> list[tuple[Any, ...]]:
    """(input, weight, bias, stride, padding, dilation, transposed, output padding, groups)."""
    return [
        (make.numbers(2, 3, 9), make.numbers(4, 3, 3), None, [2], [1], [1], False, [0], 1),
        (make.numbers(2, 4, 7, 6), make.numbers(6, 2, 3, 2), make.numbers(6), [2, 1], [1, 0], [1, 2], False, [0, 0], 2),
        (make.numbers(2, 4, 5, 4), make.numbers(4, 3, 3, 2), None, [2, 1], [1, 0], [1, 1], True, [1, 0], 1),
    ]


def _convolved_back(make: Maker) -> list[tuple[Any, ...]]:
    """With every mask that training asks for: all, no gradient of the data, no bias, the weight's alone."""
    masks = ([True, True, True], [False, True, True], [True, True, False], [False, True, False])
    calls = _convolved(make)
    made = []
    for (x, weight, _, *rest), mask in zip([*calls, calls[1]], masks, strict=True):
        gradient = torch.convolution(x.double(), weight.double(), None, *rest)
        sizes = [gradient.shape[1]] if mask[2] else None
        made.append((make.numbers(*gradient.shape), x, weight, sizes, *rest, mask))
    return made


def _pooled(make: Maker) -> list[tuple[Any, ...]]:
    return [
        (make.distinct(2, 2, 6, 7), [2, 3], [2, 2], [0, 1], [1, 1], False),
        (make.distinct(1, 3, 7, 7), [3, 3], [2, 1], [1, 1], [1, 2], False),
        (make.distinct(2, 1, 9, 7), [2, 2], [1, 1], [1, 1], [2, 2], False),
    ]


def _pooled_back(make: Maker) -> list[tuple[Any, ...]]:
    made = []
    for x, *window in _pooled(make):
        best, indices = torch.ops.aten.max_pool2d_with_indices.default(x.double(), *window)
        made.append((make.numbers(*best.shape), x, *window, indices))
    return made


def _register() -> None:
    every = (*FLOATING, *INTEGERS, *BOOLEANS)
    counted = (*FLOATING, *INTEGERS)
    whole = (*INTEGERS, *BOOLEANS)
    _row("view.default", lambda m: [(m.numbers(6, 10), [3, 4, 5]), (m.numbers(1), []), (m.numbers(4, 3), [12])], every)
    _row("permute.default", lambda m: [(m.numbers(3, 5, 7), [2, 0, 1]), (m.numbers(33, 70), [1, 0])], every)
    _row("expand.default", lambda m: [(m.numbers(3, 1, 7), [2, 3, 5, 7]), (m.numbers(), [11])], every)
    _row("squeeze.dims", lambda m: [(m.numbers(3, 1, 5, 1), [1, 3]), (m.numbers(1), [0])], every)
    _row("unsqueeze.default", lambda m: [(m.numbers(3, 5), 1), (m.numbers(3), 1), (m.numbers(), 0)], every)
    _row("select.int", lambda m: [(m.numbers(3, 5, 7), 1, 4), (m.numbers(9), 0, 2)], every)
    _row("slice.Tensor", lambda m: [(m.numbers(3, 9), 1, 2, 8, 3), (m.numbers(7, 5), 0, 1, 7, 1)], every)

    _row("exp.default expm1.default sin.default cos.default tanh.default sigmoid.default erf.default", _unary())
    _row("log.default log1p.default sqrt.default rsqrt.default reciprocal.default", _unary(0.1, 4.0))
    _row("tan.default", _unary(-1.2, 1.2))
    _row("floor.default ceil.default trunc.default round.default", _unary(-9, 9))
    _row("gelu.default", lambda m: [(m.numbers(3, 5, 7), {"approximate": by}) for by in ("none", "tanh")])
    _row("neg.default abs.default sign.default", _unary(), counted)
    _row("relu.default", _unary())
    _row("logical_not.default", _unary(), BOOLEANS)
    _row("logical_and.default logical_or.default", _two(), BOOLEANS)
    _row("bitwise_not.default", _unary(), whole)
    _row("bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor", _two(), whole)
    _row("add.Tensor sub.Tensor mul.Tensor maximum.default minimum.default", _two(), counted)
    _row("div.Tensor", _two(0.5, 2.0))
    _row("floor_divide.default", _whole_quotients, INTEGERS)
    _row("pow.Tensor_Tensor", _two(0.25, 2.0))
    _row("atan2.default", _two())
    _row("eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor", _two(), counted)
    _row("add.Scalar mul.Scalar", _with_number(3.5), counted)
    _row("div.Scalar", _with_number(4.0))
    _row("pow.Tensor_Scalar", lambda m: [(m.numbers(3, 5, low=0.25), power) for power in (2.0, 3.0, -1.0, 0.5, -1.5)])
    _row("fmod.Scalar remainder.Scalar", _with_number(0.75))
    _row("fmod.Tensor", _two(0.25, 2.0))
    _row("pow.Scalar", lambda m: [(2.0, m.numbers(3, 5, 7)), (0.5, m.numbers())])
    _row("eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar", _with_number(1.0), counted)
    _row(
        "where.self",
        lambda m: [
            (m.booleans(3, 1, 7), m.numbers(5, 7), m.numbers(3, 5, 1)),
            (m.booleans(515), m.numbers(515), m.numbers()),
        ],
        every,
    )
    _row("clamp.default", lambda m: [(m.numbers(3, 7), a, b) for a, b in ((-1, 1), (None, 1), (-1, None))], counted)
    _row("_to_copy.default", lambda m: [(m.numbers(3, 5, low=0, high=9), {"dtype": to}) for to in every], every)

    _row("sum.dim_IntList", _summed, counted)
    _row("mean.dim", _summed)
    _row("amax.default amin.default", _reduced(), counted)
    _row(
        "any.dim",
        lambda m: [(m.numbers(3, 5, 7) & m.numbers(3, 1, 7), 1, False), (m.numbers(40, 3), 0, True)],
        BOOLEANS,
    )
    _row("argmax.default argmin.default", _along, counted)
    _row("prod.dim_int", lambda m: [(m.numbers(3, 5, 7), 1, False), (m.numbers(4, 6), 0, True)], counted)
    _row("cumsum.default", _of_dimension(), counted)
    _row("cumprod.default", lambda m: [(m.numbers(3, 5), 1), (m.numbers(4, 3), 0)])
    _row("_softmax.default _log_softmax.default", _of_dimension(False))
    _row("_safe_softmax.default", _safe_softmax)
    _row("native_layer_norm.default", _layer_norm)
    _row("mm.default", _products)
    _row("bmm.default", _batched)
    _row("addmm.default", _addmm)

    _row(
        "embedding.default",
        lambda m: [(m.numbers(11, 6), m.indices(3, 5, below=11)), (m.numbers(4, 3), m.indices(9, below=4))],
    )
    _row("index.Tensor", _indexed, counted)
    _row(
        "gather.default",
        lambda m: [
            (m.numbers(5, 7), 1, m.indices(5, 3, below=7)),
            (m.numbers(9, 4), 0, m.indices(6, 2, below=9)),
            (m.numbers(3, 5, 7), 1, m.indices(2, 8, 6, below=5)),
        ],
        counted,
    )
    _row("index_put.default", _put)
    _row("scatter.src", _scattered(False), counted)
    _row("scatter_add.default", _scattered(True))
    _row(
        "scatter.value",
        lambda m: [(m.numbers(5, 7), 1, m.indices(5, 3, below=7), 2.0 if m.dtype.is_floating_point else 2)],
        counted,
    )
    _row(
        "slice_scatter.default",
        lambda m: [(m.numbers(3, 9), m.numbers(3, 2), 1, 2, 8, 3), (m.numbers(7, 5), m.numbers(6, 5), 0, 1, 7, 1)],
        counted,
    )
    _row("select_scatter.default", lambda m: [(m.numbers(3, 5, 7), m.numbers(3, 7), 1, 4)], counted)
    _row(
        "cat.default",
        lambda m: [([m.numbers(3, 2), m.numbers(3, 5), m.numbers(3, 1)], 1), ([m.numbers(2, 3), m.numbers(4, 3)], 0)],
        every,
    )
    _row("constant_pad_nd.default", _padded, counted)
    _row("flip.default", lambda m: [(m.numbers(3, 5, 7), [0, 2]), (m.numbers(9), [0])], counted)
    _row(
        "full.default",
        lambda m: [
            (shape, 1.5 if m.dtype.is_floating_point else 1, {"dtype": m.dtype}) for shape in ([], [3, 5], [300])
        ],
        counted,
    )
    _row("arange.start_step", lambda m: [(0, 9, 1, {"dtype": m.dtype}), (-3, 20, 4, {"dtype": m.dtype})], counted)
    _row(
        "topk.default", lambda m: [(m.distinct(5, 9), 3, 1, True, True), (m.distinct(7, 3), 4, 0, False, True)], counted
    )
    _row("sort.default", lambda m: [(m.distinct(5, 9), 1, False), (m.distinct(7, 3), 0, True)], counted)
    _row("convolution.default", _convolved)
    _row("convolution_backward.default", _convolved_back)
    _row("max_pool2d_with_indices.default", _pooled)
    _row("max_pool2d_with_indices_backward.default", _pooled_back)


_register()
