"""Values of a program in the generator: in memory with strides, or computed where they are used.

A view of what lies in memory is other strides; where there are none, and for everything computed, a view is another
way to the same elements. Invariant: `at` may be called for any element inside the shape, any number of times, and
writes no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from backends.opencl.codegen.emit import Buffer, Scope
from backends.opencl.codegen.indices import Index, flatten, linear, reshaped_strides, strides_of

Coordinates = tuple[Index, ...]


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor: shape, dtype, and what an element costs to have, in cheap operations."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def cost(self) -> int:
        """Cheap operations an element."""
        return 0

    def at(self, scope: Scope, coordinates: Coordinates) -> str:
        """An element's name in a scope."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Stored(Value):
    """In memory, at offset + sum of coordinate * stride, in elements."""

    buffer: Buffer
    strides: tuple[int, ...]
    offset: int = 0

    def address(self, coordinates: Coordinates) -> Index:
        """Where an element is."""
        terms: list[tuple[str, int]] = []
        constant = self.offset
        for index, stride in zip(coordinates, self.strides, strict=True):
            terms += [(name, value * stride) for name, value in index.terms]
            constant += index.constant * stride
        return linear(terms, constant)

    @property
    def contiguous(self) -> bool:
        """Whether it is row-major and whole."""
        wanted = strides_of(self.shape)
        return self.offset == 0 and all(
            extent == 1 or stride == want for extent, stride, want in zip(self.shape, self.strides, wanted, strict=True)
        )

    def at(self, scope: Scope, coordinates: Coordinates) -> str:
        address = self.address(coordinates)
        ready = scope.notes.get("load")
        if ready is not None:
            return ready(scope, self.buffer, address)  # type: ignore[operator,no-any-return]
        return scope.load(self.buffer, address)


@dataclass(frozen=True, eq=False)
class Computed(Value):
    """Computed from others at each use."""

    function: Callable[[Scope, Coordinates], str]
    price: int = 1

    @property
    def cost(self) -> int:
        return self.price

    def at(self, scope: Scope, coordinates: Coordinates) -> str:
        return self.function(scope, coordinates)


def whole(buffer: Buffer, shape: Sequence[int]) -> Stored:
    """All of a buffer, row-major."""
    return Stored(tuple(shape), buffer.dtype, buffer, strides_of(shape))


def _strided(x: Stored, shape: Sequence[int], strides: Sequence[int], offset: int | None = None) -> Stored:
    return Stored(tuple(shape), x.dtype, x.buffer, tuple(strides), x.offset if offset is None else offset)


def _mapped(x: Value, shape: Sequence[int], way: Callable[[Scope, Coordinates], Coordinates]) -> Computed:
    return Computed(tuple(shape), x.dtype, lambda scope, coordinates: x.at(scope, way(scope, coordinates)), x.cost)


def unflatten(scope: Scope, flat: Index, shape: Sequence[int]) -> Coordinates:
    """The coordinates of a row-major index."""
    result: list[Index] = []
    rest = flat
    for extent, stride in zip(shape, strides_of(shape), strict=True):
        if extent == 1:
            result.append(Index())
            continue
        split = scope.ranges.divided(rest, stride)
        if split is None:
            name = scope.value("INDEX", rest.text)
            most = scope.ranges.bounds(rest)[1]
            scope.ranges.extents.setdefault(name, most + 1)
            quotient = scope.index(f"{name}/{stride}", most // stride + 1)
            remainder = scope.index(f"{name}%{stride}", stride)
            split = quotient, remainder
        result.append(split[0])
        rest = split[1]
    return tuple(result)


def view(x: Value, shape: Sequence[int]) -> Value:
    """Another shape in row-major order."""
    shape = tuple(shape)
    if shape == x.shape:
        return x
    if isinstance(x, Stored):
        strides = reshaped_strides(x.shape, x.strides, shape)
        if strides is not None:
            return _strided(x, shape, strides)

    def way(scope: Scope, coordinates: Coordinates) -> Coordinates:
        return unflatten(scope, flatten(coordinates, shape), x.shape)

    return _mapped(x, shape, way)


def permute(x: Value, dims: Sequence[int]) -> Value:
    """The dimensions in another order."""
    shape = tuple(x.shape[dim] for dim in dims)
    if isinstance(x, Stored):
        return _strided(x, shape, [x.strides[dim] for dim in dims])
    back = [list(dims).index(dim) for dim in range(len(dims))]
    return _mapped(x, shape, lambda scope, coordinates: tuple(coordinates[dim] for dim in back))


def expand(x: Value, shape: Sequence[int]) -> Value:
    """Dimensions of extent 1 repeated, and new ones before them."""
    shape = tuple(shape)
    if shape == x.shape:
        return x
    new = len(shape) - len(x.shape)
    once = [extent == 1 and wanted != 1 for extent, wanted in zip(x.shape, shape[new:], strict=True)]
    if isinstance(x, Stored):
        strides = [0 if single else stride for single, stride in zip(once, x.strides, strict=True)]
        return _strided(x, shape, [0] * new + strides)

    def way(scope: Scope, coordinates: Coordinates) -> Coordinates:
        return tuple(Index() if single else index for single, index in zip(once, coordinates[new:], strict=True))

    return _mapped(x, shape, way)


def squeeze(x: Value, dims: Sequence[int]) -> Value:
    """Without those dimensions of extent 1."""
    return view(x, [extent for dim, extent in enumerate(x.shape) if dim not in dims])


def unsqueeze(x: Value, dim: int) -> Value:
    """With a dimension of extent 1."""
    return view(x, [*x.shape[:dim], 1, *x.shape[dim:]])


def select(x: Value, dim: int, index: int) -> Value:
    """One index of a dimension, which is removed."""
    shape = x.shape[:dim] + x.shape[dim + 1 :]
    if isinstance(x, Stored):
        strides = x.strides[:dim] + x.strides[dim + 1 :]
        return _strided(x, shape, strides, x.offset + index * x.strides[dim])
    return _mapped(x, shape, lambda scope, coordinates: (*coordinates[:dim], Index((), index), *coordinates[dim:]))


def sliced(x: Value, dim: int, start: int, end: int, step: int) -> Value:
    """Every step-th index of a dimension."""
    shape = (*x.shape[:dim], -(-(end - start) // step), *x.shape[dim + 1 :])
    if isinstance(x, Stored):
        strides = (*x.strides[:dim], x.strides[dim] * step, *x.strides[dim + 1 :])
        return _strided(x, shape, strides, x.offset + start * x.strides[dim])

    def way(scope: Scope, coordinates: Coordinates) -> Coordinates:
        return (*coordinates[:dim], coordinates[dim].times(step).plus(Index((), start)), *coordinates[dim + 1 :])

    return _mapped(x, shape, way)


def flip(x: Value, dims: Sequence[int]) -> Value:
    """Dimensions backwards."""

    def way(scope: Scope, coordinates: Coordinates) -> Coordinates:
        return tuple(
            index.times(-1).plus(Index((), extent - 1)) if dim in dims else index
            for dim, (index, extent) in enumerate(zip(coordinates, x.shape, strict=True))
        )

    if isinstance(x, Stored):
        offset = x.offset + sum((x.shape[dim] - 1) * x.strides[dim] for dim in dims if x.shape[dim])
        return _strided(x, x.shape, [-s if dim in dims else s for dim, s in enumerate(x.strides)], offset)
    return _mapped(x, x.shape, way)


def again(value: Value) -> Computed:
    """The value as something to be computed: a copy, when it is put into memory."""
    return Computed(value.shape, value.dtype, lambda scope, coordinates: value.at(scope, coordinates), value.cost)
