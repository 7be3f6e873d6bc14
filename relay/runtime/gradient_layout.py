"""The layout of gradients: which of a partition's values have one, and its order in memory.

Segments are processed from the last to the first, since the gradient of a value comes from the segments that use it. A
value that no gradient reaches (behind a `detach`, under `no_grad`, or unused) is `unreached`. The segment that makes it
is captured again with that known, and what only unreached values depend on has no gradient at all. A gradient of zeros
would be wrong: an optimizer decays a parameter that has a gradient, and keeps states for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from hal.program import Program, Role
from relay.capture import Captured
from relay.capture.memory_order import Order
from relay.errors import PartitionError
from relay.partition.segments import Partition, Segment

Orders = Mapping[int, Order]
"""Orders in memory by the number of an input or output."""


class CapturedAs(Protocol):
    """Captures a segment again: for these orders of seeds and gradients, and outputs that no gradient reaches."""

    def __call__(
        self,
        segment: Segment,
        inputs: list[torch.Tensor],
        seeds: Orders,
        gradients: Orders,
        unreached: frozenset[int],
    ) -> Captured:
        """Seeds and outputs are counted among the segment's outputs, gradients among its inputs."""


def refuse_without_gradient(ending: Captured) -> None:
    """Raise PartitionError where nothing before the loss, the first output of `ending`, is trained."""
    if not ending.output_requires_grad[0]:
        raise PartitionError(
            "The loss depends on no parameter that is trained: torch.no_grad or detach cuts off every path to it, or "
            "the parameters are frozen. Plain PyTorch could not differentiate it either."
        )


def settle_gradients(
    partition: Partition,
    given: Sequence[list[torch.Tensor]],
    found: list[Captured],
    captured_as: CapturedAs,
    of_head: Orders | None = None,
) -> None:
    """Replace captures in `found` by ones that agree on gradients. The partition ends in a loss.

    The segment that first computes a gradient decides its order in memory. Other segments add theirs to it, and a
    segment that was captured for another order is captured again. With `of_head`, the orders of the gradients that a
    head over the whole batch computes, `given` and `found` are of the segments before it. Raises PartitionError.
    """
    if of_head is None:
        refuse_without_gradient(found[-1])
    settled = dict(of_head or {})
    loss = partition.segments[-1].outputs[0]
    segments = partition.segments[: len(found)]
    for segment, inputs in zip(reversed(segments), reversed(given), strict=True):
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
    for value in partition.inputs:
        partition.values[value].gradient_order = settled.get(value, ())


def gradient_precision(backward: Program) -> list[torch.dtype | None]:
    """For each parameter's gradient of a native backward the half precision that it is computed in; None for others.

    Autocast rounds a weight, so autograd widens the gradient of the rounded weight as its last op. What a single run
    writes is then a number of half precision.
    """
    results = next(node for node in reversed(backward.graph.nodes) if node.op == "output").args[0]
    assert isinstance(results, (list, tuple))
    found: list[torch.dtype | None] = []
    for port, node in zip(backward.outputs, results, strict=True):
        if port.role is Role.PARAMETER_GRADIENT:
            found.append(_widened_from(node) if port.dtype is torch.float32 else None)
    return found


def _widened_from(node: Any) -> torch.dtype | None:
    """The half precision from which a node is converted to float32; None for other nodes."""
    if not isinstance(node, fx.Node) or node.target is not torch.ops.aten._to_copy.default:
        return None
    source = node.args[0]
    dtype = source.meta["val"].dtype if isinstance(source, fx.Node) else None
    return dtype if dtype in (torch.bfloat16, torch.float16) else None
