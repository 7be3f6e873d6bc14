"""The layout of a layer in a flat region, and the content of a slot: a segment as it lies in host memory.

Nothing is allocated or sent here; that is `hal.slot.device_slot`'s. Invariant: tensors in a flat region start at
multiples of ALIGNMENT, and no transfer is longer than CHUNK.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

ALIGNMENT = 64
"""Bytes: tensors in a flat region start at multiples of it (a cache line, and a SIMD vector)."""
CHUNK = 32 * 2**20
"""Bytes: a longer transfer is cut, so that small transfers (activations) need not wait long for the link."""
SHORT_CHUNK = 16 * 2**20
"""Bytes of the smallest piece: small layers, whose kernels end sooner, are cut into pieces of at least this size."""
PIECES = 24
"""The number of pieces that a layer is cut into, between those two sizes."""


def aligned(size: int) -> int:
    """`size` bytes rounded up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def chunks(flat: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """A flat tensor of bytes cut into the pieces of transfers, with the offset of each."""
    size = flat.numel()
    chunk = min(max(SHORT_CHUNK, aligned(-(-size // PIECES))), CHUNK)
    return [(start, flat[start : start + chunk]) for start in range(0, size, chunk)] or [(0, flat)]


@dataclass(frozen=True)
class Field:
    """A tensor in a flat region, `offset` bytes from its start."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return self.dtype.itemsize * math.prod(self.shape)


def lay_out(tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> tuple[tuple[Field, ...], int]:
    """Lay out tensors one after another, each aligned to ALIGNMENT.

    Args:
        tensors: shape and dtype of each tensor.

    Returns:
        The field of each tensor, and the size of the region in bytes.
    """
    fields = []
    offset = 0
    for shape, dtype in tensors:
        field = Field(offset, shape, dtype)
        fields.append(field)
        offset += aligned(field.size)
    return tuple(fields), offset


@dataclass(frozen=True, eq=False)
class SlotContent:
    """The content of a slot: a segment, as it lies in host memory.

    Args:
        name: the name of the segment.
        fields: the layout of its parameters and buffers in the slot.
        size: bytes of that layout.
        pieces: contiguous host tensors of bytes, each with the byte offset that it is sent to.
        tensors: the same memory as typed tensors, in the order of `fields`.
        gradient_fields: the layout of its gradients in the slot.
        gradient_size: bytes of that layout.
        gradient_pieces: host memory of the gradients, like `pieces`; empty where gradients are not stored on the host.
        gradient_tensors: the same memory as typed tensors, in the order of `gradient_fields`.
        kept_gradients: host memory that gradients are copied to after they arrived, in the order of `gradient_fields`;
            of dtypes that may be narrower. Empty where they are not.
    """

    name: str
    fields: tuple[Field, ...]
    size: int
    pieces: tuple[tuple[int, torch.Tensor], ...]
    tensors: tuple[torch.Tensor, ...]
    gradient_fields: tuple[Field, ...]
    gradient_size: int
    gradient_pieces: tuple[tuple[int, torch.Tensor], ...] = ()
    gradient_tensors: tuple[torch.Tensor, ...] = ()
    kept_gradients: tuple[torch.Tensor, ...] = ()

    @functools.cached_property
    def parts(self) -> tuple[tuple[int, torch.Tensor], ...]:
        """The pieces cut into the chunks of transfers, each with the byte offset that it is sent to."""
        return tuple((at + start, part) for at, piece in self.pieces for start, part in chunks(piece))

    @functools.cached_property
    def identity(self) -> tuple[object, ...]:
        """What the weights of two contents have in common where they are the same memory in the same layout."""
        return (self.fields, *map(id, self.tensors))

    def parts_of(self, indices: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
        """The transfers that send these tensors alone (ascending indices into `fields`), like `parts`."""
        runs: list[tuple[int, int]] = []  # from offset to offset
        for index in indices:
            start, end = self.fields[index].offset, self.fields[index].offset + aligned(self.fields[index].size)
            if runs and runs[-1][1] == start:
                start = runs.pop()[0]
            runs.append((start, end))
        found = []
        for start, end in runs:
            for at, piece in self.pieces:
                first, last = max(start, at), min(end, at + piece.numel())
                if first < last:
                    found += [(first + offset, part) for offset, part in chunks(piece[first - at : last - at])]
        return found

    @functools.cached_property
    def gradient_sizes(self) -> tuple[int, ...]:
        """Bytes of each gradient."""
        return tuple(field.size for field in self.gradient_fields)

    def gradients_in(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The gradients as typed tensors over `flat`, host memory of at least `gradient_size` bytes."""
        return [
            flat[field.offset : field.offset + field.size].view(field.dtype).view(field.shape)
            for field in self.gradient_fields
        ]
