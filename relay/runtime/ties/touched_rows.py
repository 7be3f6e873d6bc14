"""The rows of a tied embedding that a step's batch looks up.

In all other rows an embedding's gradient is zero, so there the head's gradients may be summed over micro-batches at
once, and only the rows looked up are kept for each micro-batch. Plain data; `relay.runtime.ties.find_rows` finds them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TouchedRows:
    """Of a tied parameter: its `name`, its number of rows, and how many of them are kept for each micro-batch.

    `indices` are the numbers of the batch's tensors that look rows up. `value` is the partition's value, one of its
    inputs, that holds the rows' numbers.
    """

    name: str
    of: int
    kept: int
    indices: tuple[int, ...]
    value: int
