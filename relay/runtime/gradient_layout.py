"""Which of a partition's values a gradient comes back to, and how it lies in memory.

From the end to the beginning, since a gradient comes from the segments that use a value. One that no gradient comes
back to (behind a `detach`, under `no_grad`, used by nobody) is `unreached`: the segment that makes it is captured again
with that known, and what nothing but unreached values depend on has no gradient at all. A gradient of zeros would not
do: an optimizer decays what has one, and keeps states for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from relay.capture import Captured
from relay.capture.memory_order import Order
from relay.errors import PartitionError
from relay.partition.segments import Partition, Segment

Orders = Mapping[int, Order]
"""Orders in memory by the number of an input or output."""


class CapturedAs(Protocol):
    """Captures a segment again: for seeds and gradients that lie so, and outputs that no gradient comes back to."""

    def __call__(
        self,
        segment: Segment,
        inputs: list[torch.Tensor],
        seeds: Orders,
        gradients: Orders,
        unreached: frozenset[int],
    ) -> Captured:
        """Seeds and outputs are counted among the segment's outputs, gradients among its inputs."""


def settle_gradients(
    partition: Partition, given: Sequence[list[torch.Tensor]], found: list[Captured], captured_as: CapturedAs
) -> None:
    """Put in place of what was `found` of a partition that ends in a loss what its gradients ask for.

    Each gradient lies as the segment that makes it first makes it. Others add theirs to that, and the segment that
    takes it is captured again if it was captured for another order. Raises PartitionError.
    """
    if not found[-1].output_requires_grad[0]:
        raise PartitionError(
            "The loss depends on nothing that is trained: every way to it is cut off by torch.no_grad or detach, or "
            "leads to frozen parameters. Plain PyTorch could not differentiate it either."
        )
    settled: dict[int, Order] = {}
    loss = partition.segments[-1].outputs[0]
    for segment, inputs in zip(reversed(partition.segments), reversed(given), strict=True):
        captured = found[segment.index]
        unreached = frozenset(
            index
            for index in captured.seed_orders
            if segment.outputs[index] != loss and segment.outputs[index] not in settled
        )
        if unreached:
            captured = found[segment.index] = captured_as(segment, inputs, {}, {}, unreached)
        seeds = {
            index: settled[segment.outputs[index]]
            for index, order in captured.seed_orders.items()
            if settled.get(segment.outputs[index], order) != order
        }
        gradients = {
            index: settled[segment.inputs[index]]
            for index, order in captured.gradient_orders.items()
            if settled.get(segment.inputs[index], order) != order
        }
        if seeds or gradients:
            captured = found[segment.index] = captured_as(segment, inputs, seeds, gradients, unreached)
        for index, order in captured.seed_orders.items():
            partition.values[segment.outputs[index]].gradient_order = order
        for index, order in captured.gradient_orders.items():
            settled.setdefault(segment.inputs[index], order)
