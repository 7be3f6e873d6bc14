"""The rows of a tied embedding that a step's batch looks up.

In all other rows an embedding's gradient is zero, so there the head's gradients may be summed over micro-batches at
once, and only the rows looked up are kept for each micro-batch. Plain data; `relay.runtime.ties.find_rows` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relay.capture.memory_order import Order
from relay.capture.native.embedding_rows import IndexExpression


@dataclass(frozen=True, eq=False)
class RowIndices:
    """Indices that follow from the batch: an expression of a segment's inputs.

    `inputs` are the numbers of the batch's tensors that these are, and `orders` the orders in memory that they have.
    """

    expression: IndexExpression
    inputs: Mapping[int, int]
    orders: Mapping[int, Order]


@dataclass(frozen=True)
class TouchedRows:
    """Of a tied parameter: its `name`, its number of rows, and how many of them are kept for each micro-batch.

    `indices` are those that rows are looked up by. `value` is the partition's value, one of its
    inputs, that holds the rows' numbers.
    """

    name: str
    of: int
    kept: int
    indices: tuple[RowIndices, ...]
    value: int
