"""What a last segment that runs over chunks of positions is captured with.

The segment takes the rows of one chunk, as parts of the memory that holds the values of the whole micro-batch. Nothing
is captured here. Invariant: a chunk's rows and their gradients are contiguous in that memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from relay.capture import Captured
from relay.capture.memory_order import Order
from relay.partition.positions.labels import NotByPosition
from relay.partition.segments import PositionChunks, Segment, Value


def chunk_of(chunks: PositionChunks, values: Sequence[Value], rows: int) -> list[torch.Tensor]:
    """Examples of the segment's inputs for a chunk of that many positions.

    Raises NotByPosition for a value whose memory does not hold the positions in order.
    """
    examples = []
    for value, lead in zip(values, chunks.leads, strict=True):
        if lead and value.order:
            raise NotByPosition("a layer writes its output in another order than that of the positions")
        shape = (rows, *value.shape[lead:]) if lead else value.shape
        assert not lead or math.prod(value.shape[:lead]) == chunks.positions
        examples.append(torch.empty(shape, dtype=value.dtype))
    return examples


def row_orders(segment: Segment) -> dict[int, Order]:
    """The memory orders in which the gradients of a chunk's rows are wanted; empty for other segments."""
    leads = segment.chunks.leads if segment.chunks is not None else ()
    return {number: () for number, lead in enumerate(leads) if lead}


def check_captured(captured: Captured) -> None:
    """Raise NotByPosition for a capture that cannot run chunk by chunk."""
    if captured.eager is not None:
        raise NotByPosition("the segment after the last layer runs eagerly")
    if captured.forward.draws or (captured.joint is not None and captured.joint.draws):
        raise NotByPosition("the segment after the last layer draws random numbers")
