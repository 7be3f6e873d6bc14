"""Indices as linear expressions of loop variables, so that views cost arithmetic at compile time and none at run time.

A reshape takes an index apart by division. Where the loop variables' ranges show that a division comes out even it
vanishes; where a loop would have to be cut in two for that, `Split` is raised and the kernel is generated again with
two loops; else the division is left to the device. It knows nothing of tensors' contents.

Invariant: every variable is named in `Ranges` and runs from 0 to its extent, less one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Index:
    """constant + sum of coefficient * variable. Terms are sorted by name and have no zero coefficients."""

    terms: tuple[tuple[str, int], ...] = ()
    constant: int = 0

    def plus(self, other: Index) -> Index:
        """The sum."""
        if not other.terms:
            return Index(self.terms, self.constant + other.constant)
        return linear([*self.terms, *other.terms], self.constant + other.constant)

    def times(self, factor: int) -> Index:
        """The product with a number."""
        if factor == 0:
            return ZERO
        return Index(tuple((name, value * factor) for name, value in self.terms), self.constant * factor)

    def only(self, names: Iterable[str]) -> Index:
        """The terms in those variables, without the constant."""
        wanted = set(names)
        return Index(tuple(term for term in self.terms if term[0] in wanted))

    @property
    def text(self) -> str:
        """As C."""
        parts = [name if value == 1 else f"{name}*{value}" for name, value in self.terms]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return "(" + "+".join(parts).replace("+-", "-") + ")"


ZERO = Index()


def linear(terms: Iterable[tuple[str, int]], constant: int = 0) -> Index:
    """The index with those terms, equal names added up."""
    total: dict[str, int] = {}
    for name, value in terms:
        total[name] = total.get(name, 0) + value
    return Index(tuple(sorted((name, value) for name, value in total.items() if value)), constant)


def variable(name: str) -> Index:
    """The index that is a variable."""
    return Index(((name, 1),))


class Split(Exception):
    """A loop over `name` should be two, the inner of extent `inner`."""

    def __init__(self, name: str, inner: int) -> None:
        super().__init__(f"split {name} by {inner}")
        self.name = name
        self.inner = inner


@dataclass
class Ranges:
    """Extents of variables, and which of them are loops that can be split."""

    extents: dict[str, int] = field(default_factory=dict)
    loops: set[str] = field(default_factory=set)

    def bounds(self, index: Index) -> tuple[int, int]:
        """Least and largest value."""
        low = high = index.constant
        for name, value in index.terms:
            reach = value * (self.extents[name] - 1)
            low, high = low + min(reach, 0), high + max(reach, 0)
        return low, high

    def divided(self, index: Index, divisor: int) -> tuple[Index, Index] | None:
        """Quotient and remainder where both are linear, else None. Raises Split where a split would make them so."""
        whole = [(name, value // divisor) for name, value in index.terms if value % divisor == 0]
        rest = Index(tuple((name, value) for name, value in index.terms if value % divisor), index.constant % divisor)
        low, high = self.bounds(rest)
        if low >= 0 and high < divisor:
            return linear(whole, index.constant // divisor), rest
        if low >= 0 and rest.constant == 0:
            name, value = max(rest.terms, key=lambda term: term[1])
            if name in self.loops and value > 0 and divisor % value == 0:
                inner = divisor // value
                if inner < self.extents[name] and self.extents[name] % inner == 0:
                    raise Split(name, inner)
        return None


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def flatten(index: Sequence[Index], shape: Sequence[int]) -> Index:
    """The row-major index of an element."""
    total = ZERO
    for coordinate, stride in zip(index, strides_of(shape), strict=True):
        total = total.plus(coordinate.times(stride))
    return total


def reshaped_strides(shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of a view under another shape, or None where it needs a copy (as PyTorch's computeStride)."""
    if math.prod(shape) == 0:
        return strides_of(wanted)
    groups: list[tuple[int, int]] = []  # (elements, stride of the innermost), outer to inner
    for extent, stride in zip(shape, strides, strict=True):
        if extent == 1:
            continue
        if groups and groups[-1][1] == extent * stride:
            groups[-1] = (groups[-1][0] * extent, stride)
        else:
            groups.append((extent, stride))
    result: list[int] = []
    pending = list(groups)
    left, base = (1, 0)
    for extent in reversed(wanted):
        if extent == 1:
            result.append(0)
            continue
        if left == 1:
            if not pending:
                return None
            left, base = pending.pop()
        if left % extent:
            return None
        result.append(base)
        base *= extent
        left //= extent
    return tuple(reversed(result))
