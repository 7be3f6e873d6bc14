"""Regions of host memory: where tensors lie in them, and the host memory of the gradients.

A region is a flat tensor of bytes with several tensors in it, so that a layer crosses the link in few pieces. What lies
in the regions of weights is decided by `relay.eps.store`. Invariant: a gradient has the same memory, whichever layers
share its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hal.host import Host
from hal.slot import Field, aligned, lay_out

GRADIENTS = "gradients"


@dataclass(frozen=True)
class GradientField:
    """A gradient that a segment computes: its parameter, its dtype, and which use of a tied parameter it is from.

    `use` counts the segments of a pass that have a gradient for it, in forward order.
    """

    name: str
    dtype: torch.dtype
    use: int = 0


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor and its memory: `offset` bytes into `flat` (a tensor of bytes)."""

    tensor: torch.Tensor
    flat: torch.Tensor
    offset: int


class GradientMemory:
    """The host memory of gradients that wait there until all have arrived."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._stored: dict[GradientField, Stored] = {}
        self._flats: list[torch.Tensor] = []

    def of(self, gradients: Sequence[GradientField], shape: Callable[[str], Sequence[int]]) -> list[Stored]:
        """The memory of these gradients. Those that have none yet get it, side by side."""
        fresh = [one for one in gradients if one not in self._stored]
        fields, size = lay_out([(tuple(shape(one.name)), one.dtype) for one in fresh])
        if fresh:
            flat = self._host.alloc(size, torch.uint8, GRADIENTS, crosses=True)
            self._flats.append(flat)
            for gradient, field in zip(fresh, fields, strict=True):
                tensor = flat[field.offset : field.offset + field.size].view(field.dtype).view(field.shape)
                self._stored[gradient] = Stored(tensor, flat, field.offset)
        return [self._stored[one] for one in gradients]

    def kept(self, gradients: Sequence[GradientField], shape: Callable[[str], Sequence[int]]) -> list[Stored]:
        """Memory for copies of gradients, in these dtypes. Nothing is sent to it, so it is not page-locked."""
        fresh = [one for one in gradients if one not in self._stored]
        for dtype in dict.fromkeys(one.dtype for one in fresh):
            own = [one for one in fresh if one.dtype is dtype]
            fields, size = lay_out([(tuple(shape(one.name)), dtype) for one in own])
            flat = self._host.alloc(size // dtype.itemsize, dtype, GRADIENTS)
            self._flats.append(flat)
            raw = flat.view(torch.uint8)
            for gradient, field in zip(own, fields, strict=True):
                tensor = raw[field.offset : field.offset + field.size].view(dtype).view(field.shape)
                self._stored[gradient] = Stored(tensor, raw, field.offset)
        return [self._stored[one] for one in gradients]

    def beyond(self, other: GradientMemory) -> int:
        """Bytes of gradients here for which another has no memory."""
        return sum(extent(home.tensor) for one, home in self._stored.items() if one not in other._stored)

    def free(self) -> None:
        """Free the memory of all gradients."""
        for flat in self._flats:
            self._host.free(flat, GRADIENTS)
        self._flats.clear()
        self._stored.clear()


def extent(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes in a region, including the padding up to the next tensor."""
    return aligned(tensor.numel() * tensor.dtype.itemsize)


def as_they_lie(stored: Sequence[Stored], fields: Sequence[Field]) -> tuple[tuple[int, torch.Tensor], ...]:
    """The same memory in as few contiguous pieces (of bytes) as possible, each with its offset among the fields."""
    pieces: list[tuple[int, torch.Tensor]] = []
    start = end = 0
    for number, (one, field) in enumerate(zip(stored, fields, strict=True)):
        if not number or one.flat is not stored[number - 1].flat or one.offset != end:
            start = one.offset
            pieces.append((field.offset, one.flat[start:start]))
        end = one.offset + extent(one.tensor)
        pieces[-1] = (pieces[-1][0], one.flat[start:end])
    return tuple(pieces)
