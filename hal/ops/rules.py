"""The shape and dtype rules of the ops in `hal.ops`, and the FLOPs of those that multiply.

A rule is called with an op's own arguments, tensors as `Spec`. It returns the results' `Spec`, or raises ValueError
for arguments that the op cannot take. Rules are written apart from PyTorch's, against which the lowering holds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Spec:
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


Result = Spec | tuple[Spec | None, ...]
"""Of an op with several results, those that its arguments leave out are None and are never read."""
Rule = Callable[..., Result]
"""Called with an op's arguments, tensors as Spec; returns its results, or raises ValueError for what cannot be."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that `shapes` broadcast to. ValueError where they do not."""
    result: list[int] = []
    for axis in range(-max(map(len, shapes), default=0), 0):
        extents = {shape[axis] for shape in shapes if len(shape) >= -axis} - {1}
        require(len(extents) <= 1, f"{' and '.join(map(str, shapes))} do not broadcast")
        result.append(extents.pop() if extents else 1)
    return tuple(result)


def floating(spec: Spec) -> Spec:
    require(spec.dtype.is_floating_point, f"takes floating-point numbers, got {spec.dtype}")
    return spec


def same(x: Spec) -> Spec:
    return x


def unary_floating(x: Spec) -> Spec:
    return floating(x)


def gelu(x: Spec, *, approximate: str) -> Spec:
    require(approximate in ("none", "tanh"), f"gelu by {approximate!r}")
    return floating(x)


def one_dtype(x: Spec, y: Spec) -> torch.dtype:
    require(x.dtype is y.dtype, f"operands have two dtypes, {x.dtype} and {y.dtype}")
    return x.dtype


def binary(x: Spec, y: Spec) -> Spec:
    return Spec(broadcast(x.shape, y.shape), one_dtype(x, y))


def binary_floating(x: Spec, y: Spec) -> Spec:
    return binary(floating(x), y)


def compare(x: Spec, y: Spec) -> Spec:
    return Spec(binary(x, y).shape, torch.bool)


def scalar(x: Spec, number: Any) -> Spec:
    require(
        x.dtype.is_floating_point or (isinstance(number, int) and x.dtype is not torch.bool),
        f"the number {number!r} is not of the kind of {x.dtype}",
    )
    return x


def scalar_first(number: Any, x: Spec) -> Spec:
    return scalar(x, number)


def compare_scalar(x: Spec, number: Any) -> Spec:
    require(
        x.dtype.is_floating_point or isinstance(number, int), f"the number {number!r} is not of the kind of {x.dtype}"
    )
    return Spec(x.shape, torch.bool)


def logical(x: Spec, y: Spec | None = None) -> Spec:
    require(x.dtype is torch.bool and (y is None or y.dtype is torch.bool), "takes booleans")
    return x if y is None else binary(x, y)


def bits(x: Spec, y: Spec | None = None) -> Spec:
    require(not x.dtype.is_floating_point, f"takes integers or booleans, got {x.dtype}")
    return x if y is None else binary(x, y)


def where(condition: Spec, x: Spec, y: Spec) -> Spec:
    require(condition.dtype is torch.bool, f"the condition is {condition.dtype}, not bool")
    return Spec(broadcast(condition.shape, x.shape, y.shape), one_dtype(x, y))


def clamp(x: Spec, least: Any, most: Any) -> Spec:
    for bound in (least, most):
        if bound is not None:
            scalar(x, bound)
    return x


def cast(x: Spec, *, dtype: torch.dtype) -> Spec:
    return Spec(x.shape, dtype)


def dimension(x: Spec, dim: int) -> int:
    require(0 <= dim < len(x.shape), f"{x.shape} has no dimension {dim}")
    return x.shape[dim]


def view(x: Spec, shape: Sequence[int]) -> Spec:
    require(math.prod(shape) == x.count and min(shape, default=0) >= 0, f"{x.shape} has no view {tuple(shape)}")
    return Spec(tuple(shape), x.dtype)


def permute(x: Spec, dims: Sequence[int]) -> Spec:
    require(sorted(dims) == list(range(len(x.shape))), f"{tuple(dims)} is no order of the dimensions of {x.shape}")
    return Spec(tuple(x.shape[dim] for dim in dims), x.dtype)


def expand(x: Spec, shape: Sequence[int]) -> Spec:
    require(broadcast(x.shape, shape) == tuple(shape), f"{x.shape} does not expand to {tuple(shape)}")
    return Spec(tuple(shape), x.dtype)


def squeeze(x: Spec, dims: Sequence[int]) -> Spec:
    require(all(dimension(x, dim) == 1 for dim in dims), f"of {x.shape}, {tuple(dims)} are not all 1")
    return Spec(tuple(extent for dim, extent in enumerate(x.shape) if dim not in dims), x.dtype)


def unsqueeze(x: Spec, dim: int) -> Spec:
    require(0 <= dim <= len(x.shape), f"{x.shape} has no dimension {dim} to insert")
    return Spec((*x.shape[:dim], 1, *x.shape[dim:]), x.dtype)


def select(x: Spec, dim: int, index: int) -> Spec:
    require(0 <= index < dimension(x, dim), f"{x.shape} has no index {index} in dimension {dim}")
    return Spec((*x.shape[:dim], *x.shape[dim + 1 :]), x.dtype)


def sliced(x: Spec, dim: int, start: int, end: int, step: int) -> Spec:
    extent = dimension(x, dim)
    require(0 <= start <= end <= extent and step > 0, f"{start}:{end}:{step} is no slice of {extent}")
    return Spec((*x.shape[:dim], -(-(end - start) // step), *x.shape[dim + 1 :]), x.dtype)


def reduced(x: Spec, dims: Sequence[int], keep: bool) -> tuple[int, ...]:
    require(len(set(dims)) == len(dims) and all(dimension(x, dim) >= 0 for dim in dims), f"dimensions {dims}")
    if keep:
        return tuple(1 if dim in dims else extent for dim, extent in enumerate(x.shape))
    return tuple(extent for dim, extent in enumerate(x.shape) if dim not in dims)


def total(x: Spec, dims: Sequence[int], keep: bool) -> Spec:
    require(x.dtype is not torch.bool, "booleans are cast before they are summed")
    return Spec(reduced(x, dims, keep), x.dtype)


def mean(x: Spec, dims: Sequence[int], keep: bool) -> Spec:
    return Spec(reduced(floating(x), dims, keep), x.dtype)


def extreme(x: Spec, dims: Sequence[int], keep: bool) -> Spec:
    require(all(x.shape[dim] > 0 for dim in dims), "the extreme of nothing")
    return Spec(reduced(x, dims, keep), x.dtype)


def any_of(x: Spec, dim: int, keep: bool) -> Spec:
    return Spec(reduced(logical(x), (dim,), keep), torch.bool)


def argument(x: Spec, dim: int, keep: bool) -> Spec:
    return Spec(reduced(x, (dim,), keep), torch.int64)


def product(x: Spec, dim: int, keep: bool) -> Spec:
    return Spec(reduced(x, (dim,), keep), x.dtype)


def scan(x: Spec, dim: int) -> Spec:
    dimension(x, dim)
    return x


def mm(x: Spec, y: Spec) -> Spec:
    require(len(x.shape) == len(y.shape) == 2 and x.shape[1] == y.shape[0], f"{x.shape} times {y.shape}")
    return Spec((x.shape[0], y.shape[1]), one_dtype(x, y))


def bmm(x: Spec, y: Spec) -> Spec:
    fits = len(x.shape) == len(y.shape) == 3 and x.shape[0] == y.shape[0] and x.shape[2] == y.shape[1]
    require(fits, f"{x.shape} times {y.shape}")
    return Spec((x.shape[0], x.shape[1], y.shape[2]), one_dtype(x, y))


def addmm(bias: Spec, x: Spec, y: Spec) -> Spec:
    product = mm(x, y)
    require(broadcast(bias.shape, product.shape) == product.shape, f"{bias.shape} plus {product.shape}")
    return Spec(product.shape, one_dtype(bias, product))


def mm_flops(x: Spec, y: Spec) -> int:
    return 2 * x.count * y.shape[-1]


def addmm_flops(bias: Spec, x: Spec, y: Spec) -> int:
    return mm_flops(x, y)


def softmax(x: Spec, dim: int, half_to_float: bool) -> Spec:
    require(not half_to_float, "the cast is an op of its own")
    return safe_softmax(x, dim)


def safe_softmax(x: Spec, dim: int) -> Spec:
    return scan(floating(x), dim) if x.shape else x


def layer_norm(
    x: Spec, shape: Sequence[int], weight: Spec | None, bias: Spec | None, epsilon: float
) -> tuple[Spec, ...]:
    inner = len(x.shape) - len(shape)
    require(x.shape[inner:] == tuple(shape), f"{x.shape} does not end in {tuple(shape)}")
    for scale in (weight, bias):
        require(scale is None or scale == Spec(tuple(shape), x.dtype), f"scale or shift is {scale}")
    statistics = Spec(x.shape[:inner] + (1,) * len(shape), x.dtype)
    return floating(x), statistics, statistics


def int64(index: Spec) -> Spec:
    require(index.dtype is torch.int64, f"indices are {index.dtype}, not int64")
    return index


def embedding(weight: Spec, index: Spec) -> Spec:
    require(len(weight.shape) == 2, f"an embedding of {weight.shape}")
    return Spec((*int64(index).shape, weight.shape[1]), weight.dtype)


def indexed(x: Spec, indices: Sequence[Spec | None]) -> tuple[int, ...]:
    """The shape of x[indices]: as numpy has it, indices that stand together replace their dimensions in place."""
    used = [axis for axis, index in enumerate(indices) if index is not None]
    require(bool(used) and len(indices) <= len(x.shape), f"{len(indices)} indices into {x.shape}")
    picked = broadcast(*[int64(index).shape for index in indices if index is not None])
    remaining = [extent for axis, extent in enumerate(x.shape) if axis not in used]
    front = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    return (*remaining[:front], *picked, *remaining[front:])


def index(x: Spec, indices: Sequence[Spec | None]) -> Spec:
    return Spec(indexed(x, indices), x.dtype)


def index_put(x: Spec, indices: Sequence[Spec | None], values: Spec, accumulate: bool) -> Spec:
    target = indexed(x, indices)
    require(broadcast(values.shape, target) == target, f"{values.shape} does not fill {target}")
    return Spec(x.shape, one_dtype(x, values))


def gather(x: Spec, dim: int, index: Spec) -> Spec:
    dimension(x, dim)
    require(len(x.shape) == len(int64(index).shape), f"{x.shape} by {index.shape}")
    return Spec(index.shape, x.dtype)


def scatter(x: Spec, dim: int, index: Spec, source: Spec) -> Spec:
    require(len(source.shape) == len(gather(x, dim, index).shape), f"{source.shape} into {x.shape}")
    return Spec(x.shape, one_dtype(x, source))


def scatter_value(x: Spec, dim: int, index: Spec, value: Any) -> Spec:
    gather(x, dim, index)
    return x


def slice_scatter(x: Spec, source: Spec, dim: int, start: int, end: int, step: int) -> Spec:
    require(sliced(x, dim, start, end, step) == source, f"{source.shape} does not fill the slice")
    return x


def select_scatter(x: Spec, source: Spec, dim: int, index: int) -> Spec:
    require(select(x, dim, index) == source, f"{source.shape} does not fill the selection")
    return x


def cat(tensors: Sequence[Spec], dim: int) -> Spec:
    first = tensors[0]
    dimension(first, dim)
    for other in tensors[1:]:
        one_dtype(first, other)
        same = other.shape[:dim] + other.shape[dim + 1 :] == first.shape[:dim] + first.shape[dim + 1 :]
        require(same, f"{first.shape} beside {other.shape}")
    total = sum(tensor.shape[dim] for tensor in tensors)
    return Spec((*first.shape[:dim], total, *first.shape[dim + 1 :]), first.dtype)


def pad(x: Spec, pads: Sequence[int], value: Any) -> Spec:
    shape = list(x.shape)
    for axis in range(len(pads) // 2):
        shape[-1 - axis] += pads[2 * axis] + pads[2 * axis + 1]
    require(min(shape, default=0) >= 0, f"padding {tuple(pads)} of {x.shape}")
    return Spec(tuple(shape), x.dtype)


def flip(x: Spec, dims: Sequence[int]) -> Spec:
    for dim in dims:
        dimension(x, dim)
    return x


def full(shape: Sequence[int], value: Any, *, dtype: torch.dtype) -> Spec:
    return Spec(tuple(shape), dtype)


def arange(start: Any, end: Any, step: Any, *, dtype: torch.dtype) -> Spec:
    return Spec((max(0, math.ceil((end - start) / step)),), dtype)


def topk(x: Spec, count: int, dim: int, largest: bool, in_order: bool) -> tuple[Spec, ...]:
    require(0 <= count <= dimension(x, dim), f"{count} of {x.shape}")
    shape = (*x.shape[:dim], count, *x.shape[dim + 1 :])
    return Spec(shape, x.dtype), Spec(shape, torch.int64)


def sort(x: Spec, dim: int, descending: bool) -> tuple[Spec, ...]:
    dimension(x, dim)
    return x, Spec(x.shape, torch.int64)


def mask(key: Any, number: int, shape: Sequence[int], probability: float) -> Spec:
    return Spec(tuple(shape), torch.bool)


def numbers(key: Any, number: int, shape: Sequence[int]) -> Spec:
    return Spec(tuple(shape), torch.float32)
