"""How array code holds numbers: in memory, inside a program, and rounded from one to the other.

Storage and arithmetic are two things. bf16 is stored as uint16 and fp16 as float16; inside a program every
floating-point value is computed in `Arrays.real` (float32), and rounded after each op whose result is half precision.
With `real` float64 nothing is rounded before it is stored: the oracle. The ops themselves are in `hal.kit.arrays.ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

_STORED: dict[torch.dtype, np.dtype[Any]] = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(np.uint16),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.int16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
    torch.bool: np.dtype(np.bool_),
}


@dataclass(frozen=True)
class Arrays:
    """The array module `xp`, the dtype `real` of floating-point arithmetic and `total` of sums, and what `xp` lacks.

    `erf` is element-wise; `draws` are `hal.random`'s keep_mask, uniform and normal, giving arrays of `xp`.
    """

    xp: Any
    erf: Callable[[Any], Any]
    draws: dict[str, Callable[..., Any]] = field(repr=False)
    real: np.dtype[Any]
    total: np.dtype[Any]

    def compute_dtype(self, dtype: torch.dtype) -> np.dtype[Any]:
        """The dtype of values inside a program that are stored as `dtype`."""
        return self.real if dtype.is_floating_point else _STORED[dtype]

    def load(self, stored: Any, dtype: torch.dtype) -> Any:
        """Values from memory, in the dtype that they are computed in. The result may share the memory."""
        if dtype is torch.bfloat16:
            stored = (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(self.compute_dtype(dtype), copy=False)

    def store(self, values: Any, dtype: torch.dtype, memory: Any) -> None:
        """Write values to memory, rounded to nearest even."""
        memory[...] = _to_bf16(self.xp, values) if dtype is torch.bfloat16 else values

    def add_to(self, values: Any, dtype: torch.dtype, memory: Any) -> None:
        """Add values to memory, rounded once."""
        self.store(self.load(memory, dtype) + values, dtype, memory)

    def rounded(self, values: Any, dtype: torch.dtype) -> Any:
        """Values rounded to the dtype; unchanged where arithmetic is in float64."""
        if self.real == np.float64 or dtype not in (torch.float16, torch.bfloat16):
            return values
        if dtype is torch.float16:
            return values.astype(np.float16).astype(self.real)
        return (_to_bf16(self.xp, values).astype(np.uint32) << 16).view(np.float32)


def stored_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The numpy dtype of a dtype in memory; bfloat16 is stored as uint16."""
    return _STORED[dtype]


def _to_bf16(xp: Any, values: Any) -> Any:
    """The upper halves of float32, rounded to nearest even. A NaN keeps its upper half, made quiet."""
    bits = xp.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(xp.shape(values))
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF)).astype(np.uint32)) >> 16
    quiet = (bits >> 16) | np.uint32(0x40)
    return xp.where((bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000), quiet, rounded).astype(np.uint16)
