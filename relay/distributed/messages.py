"""The layout of the messages that carry a segment's gradients to their owners, and its weights back to all ranks.

A message to or from an owner has a head (its status, and which parameters have a gradient) and the owner's range of
each parameter, aligned. Messages are laid out in flat memory of bytes; sending them is `relay.distributed.channel`'s.
Invariant: all ranks lay out the messages of a segment alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hal.slot.layout import aligned
from relay.distributed.ownership import Ownership

OK, FAILED = 0, 1
"""The status of a message: the first byte of its head."""


@dataclass(frozen=True)
class Piece:
    """An owner's range of one parameter, `offset` bytes into a message. `index` counts the message's parameters."""

    index: int
    start: int
    stop: int
    offset: int
    dtype: torch.dtype

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The range of a whole parameter or gradient."""
        return tensor.reshape(-1)[self.start : self.stop]

    def within(self, message: torch.Tensor) -> torch.Tensor:
        """The range in a message."""
        size = (self.stop - self.start) * self.dtype.itemsize
        return message[self.offset : self.offset + size].view(self.dtype)


@dataclass(frozen=True)
class Layout:
    """The messages of one owner: `count` parameters in the head, then the pieces; `size` in bytes."""

    count: int
    pieces: tuple[Piece, ...]
    size: int


def lay_out_messages(names: Sequence[str], dtypes: Sequence[torch.dtype], ownership: Ownership) -> list[Layout]:
    """The layout of the messages of each owner, for these parameters in these dtypes."""
    layouts = []
    for rank in range(ownership.count):
        offset = aligned(1 + len(names))
        pieces = []
        for index, (name, dtype) in enumerate(zip(names, dtypes, strict=True)):
            start, stop = ownership.ranges(name)[rank]
            if stop > start:
                pieces.append(Piece(index, start, stop, offset, dtype))
                offset += aligned((stop - start) * dtype.itemsize)
        layouts.append(Layout(len(names), tuple(pieces), offset))
    return layouts


def write_head(message: torch.Tensor, layout: Layout, status: int, present: Sequence[bool]) -> None:
    """Write a message's head: `present` says which parameters have a gradient."""
    message[0] = status
    message[1 : 1 + layout.count] = torch.tensor(list(present), dtype=torch.uint8)


def read_head(message: torch.Tensor, layout: Layout) -> tuple[int, list[bool]]:
    """A message's status, and which parameters have a gradient."""
    return int(message[0]), [bool(value) for value in message[1 : 1 + layout.count].tolist()]


def sum_in_rank_order(messages: Sequence[torch.Tensor], layout: Layout) -> tuple[dict[int, torch.Tensor], list[bool]]:
    """The sums of an owner's messages, one from each rank, and which parameters have a gradient on any rank.

    A sum is in the memory of its first term, by the parameter's index. Ranks without a gradient of a parameter add
    nothing to it.
    """
    heads = [read_head(message, layout)[1] for message in messages]
    sums: dict[int, torch.Tensor] = {}
    for piece in layout.pieces:
        terms = [piece.within(message) for message, head in zip(messages, heads, strict=True) if head[piece.index]]
        if terms:
            for term in terms[1:]:
                terms[0].add_(term)
            sums[piece.index] = terms[0]
    return sums, [any(column) for column in zip(*heads, strict=True)] if layout.count else []
