"""Device memory for the losses and gradient seeds of a pass.

What they are weighed by is not here (`relay.runtime.schedule`). Invariant: a loss and its seed have the loss's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hal.device import Buffer, View
from relay.runtime.stages import CompiledModel


@dataclass(eq=False)
class Scalars:
    """Device memory for one loss and one gradient seed of each micro-batch: as a row, and one by one.

    Each lane has such `memory`; what is computed is on the lane where the pass turns.
    """

    memory: Sequence[Buffer]
    loss_row: View
    losses: Sequence[View]
    seed_row: View
    seeds: Sequence[View]


def scalars_in(everywhere: Sequence[Buffer], memory: Buffer, compiled: CompiledModel, count: int) -> Scalars:
    """Views for `count` losses and as many gradient seeds, in the dtype of the loss.

    Args:
        everywhere: the memory of each lane.
        memory: that of the lane where the pass turns, which the views are of.
    """
    dtype = compiled.loss_dtype

    def row(start: int) -> tuple[View, list[View]]:
        singles = [memory.view(start + number * dtype.itemsize, (), dtype) for number in range(count)]
        return memory.view(start, (count,), dtype), singles

    return Scalars(everywhere, *row(0), *row(memory.size // 2))
