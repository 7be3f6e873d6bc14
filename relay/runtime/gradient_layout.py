"""The layout of gradients: which of a partition's values have one, and its order in memory; plans for parameters'.

Segments are processed from the last to the first, since the gradient of a value comes from the segments that use it. A
value that no gradient reaches (behind a `detach`, under `no_grad`, or unused) is `unreached`. The segment that makes it
is captured again with that known, and what only unreached values depend on has no gradient at all. A gradient of zeros
would be wrong: an optimizer decays a parameter that has a gradient, and keeps states for it.

Of a compiled model the plans follow by which the parameter server takes in the gradients of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from hal.program import Program, Role
from relay.capture import Captured
from relay.capture.memory_order import Order
from relay.eps.gradient_plan import GradientPlan, plan_gradients
from relay.eps.rows import TableRows
from relay.errors import PartitionError
from relay.partition.segments import Partition, Segment
from relay.runtime.sparse_rows.table import Table
from relay.runtime.stages import CompiledModel

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


def gradient_plans(
    compiled: CompiledModel, owner: Callable[[str], str], rows_of: Callable[[Table], TableRows], deferred: bool
) -> list[GradientPlan]:
    """What is done with each segment's gradients.

    `owner` gives the tensor whose memory a name's is, and `rows_of` the rows of a table that are sent. `deferred` is
    set where updates wait for all gradients.
    """
    tables = {table.key: table for table in compiled.tables}
    segments = [
        (stage.segment.name, [tables[name].name if name in tables else name for name in stage.gradients])
        for stage in compiled.stages
    ]
    # Deferred updates run when no backward does.
    plans = plan_gradients(segments, [] if deferred else _read_in_backward(compiled, owner))
    for stage in compiled.stages:
        plans[stage.segment.name].presence = stage.gradient_presence
        plans[stage.segment.name].rows = {
            index: rows_of(tables[name]) for index, name in enumerate(stage.gradients) if name in tables
        }
    return [plans[name] for name, _ in segments]


def _read_in_backward(compiled: CompiledModel, owner: Callable[[str], str]) -> list[set[str]]:
    """The parameters whose numbers each segment's backward takes in, by a buffer that shares their memory too."""
    read = []
    for stage in compiled.stages:
        ports = stage.backward.program.inputs if stage.backward is not None else ()
        names = [stage.parameters[port.index] for port in ports if port.role is Role.PARAMETER]
        names += [stage.buffers[port.index] for port in ports if port.role is Role.BUFFER]
        read.append({owner(name) for name in names})
    return read


def narrow_gradients(compiled: CompiledModel, plans: Sequence[GradientPlan]) -> list[Sequence[torch.dtype | None]]:
    """The narrower dtypes in which gradients may wait on the host, by stage and gradient; None for no narrower one.

    They hold what one micro-batch computes, to the bit. Sums need float32: of micro-batches, of uses, of chunks. So
    this is for steps of one micro-batch.
    """
    backwards = [stage.backward for stage in compiled.stages]
    return [
        ()
        if plan.rows or stage.segment.chunks is not None
        else [
            dtype if index in plan.updates and index not in plan.joined else None
            for index, dtype in enumerate([] if backward is None else gradient_precision(backward.program))
        ]
        for plan, stage, backward in zip(plans, compiled.stages, backwards, strict=True)
    ]
