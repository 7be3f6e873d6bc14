"""Shapes, dtypes and values drawn from a seed, as the samples of ops are made of them.

Small extents with odd sizes, dimensions of 1 that broadcast, tensors without dimensions, empty ones where an op allows
it, and now and then infinities and NaN. It knows no op.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

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

    def distinct(self, shape: Sequence[int]) -> torch.Tensor:
        """Numbers no two of which are equal: which of two equal ones comes first is not defined."""
        count = math.prod(shape)
        order = torch.randperm(count, generator=self.generator).view(tuple(shape))
        return ((order - count // 2) / 8).to(self.floating)

    def extent(self) -> int:
        """One extent, from a scalar's to more than a tile's."""
        return self.random.choice((1, 2, 3, 5, 8, 16, 17, 33))


Draw = Callable[[Sampler], list[Any]]
"""Arguments of an op by position; a dict at the end holds those by keyword."""


def table_of(rows: Sequence[tuple[Draw, str]]) -> dict[str, Draw]:
    """Each row's function under the full name of each of its ops, which are parted by spaces."""
    return {f"aten.{name}": draw for draw, names in rows for name in names.split()}
