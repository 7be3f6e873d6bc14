"""Captures the segments of a partition, for one shape of micro-batch.

Segments of equal structure are captured once. How a segment is traced is `relay.capture`'s, and what becomes of its
programs `relay.runtime.compiling.make_stages`'s. Invariant: nothing is compiled, and no device memory is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from relay.capture import Captured, CaptureRequest, Lowering, ObservedGradientPresence, capture
from relay.capture.guards.held_tensors import HeldElsewhere
from relay.capture.memory_order import Order, as_written, order_of, stored_shape
from relay.partition.capture_cache import Captures
from relay.partition.positions.layers import ChunkedLayer, in_row_chunks
from relay.partition.segments import Partition, Segment, Value
from relay.runtime.compiling.make_stages import add_saved, connect, make_stage
from relay.runtime.gradient_layout import Orders, settle_gradients
from relay.runtime.head.chunk_examples import check_captured, chunk_of, row_orders
from relay.runtime.stages import CompiledModel

CPU = torch.device("cpu")


def build_compiled_model(
    partition: Partition,
    training: bool,
    results: bool,
    compute: torch.dtype = torch.float32,
    presences: dict[str, ObservedGradientPresence] | None = None,
    lowering: Lowering = Lowering.NATIVE,
    captures: Captures | None = None,
    recompute: bool | int = True,
    traced_for: torch.device = CPU,
) -> CompiledModel:
    """Capture the segments of a partition. Nothing is compiled yet.

    Args:
        partition: the segments and values.
        training: whether there are backward programs; the last segment then gets one joint program.
        results: whether the model's outputs are computed besides the loss.
        compute: the dtype that is computed in.
        presences: the gradient presence of segments that run eagerly, by name. It is shared by all shapes of
            micro-batch, since a step may have several.
        lowering: the kind of graph that the device executes.
        captures: what earlier calls captured; this call's captures are added.
        recompute: which segments recompute their forward (see `recomputing`).
        traced_for: the torch device that native graphs are traced for.
    """
    capturing = Capturing(training, compute, presences, lowering, captures or Captures(), recompute, traced_for)
    given, found = capturing.forwards(partition, partition.segments)
    if training and partition.has_loss:
        settle_gradients(partition, given, found, functools.partial(capturing.capture, partition))
    built = list(zip(partition.segments, found, strict=True))
    for segment, captured in built:
        add_saved(segment, captured, partition)
    stages = [make_stage(segment, captured, partition, training, results) for segment, captured in built]
    rest = capturing.smaller_chunk(partition, found[-1], given[-1])
    if rest is not None:
        smaller = make_stage(partition.segments[-1], rest, partition, training, results)
        for program, other in ((stages[-1].forward, smaller.forward), (stages[-1].backward, smaller.backward)):
            if program is not None:
                program.rest = other
    connect(stages)
    return CompiledModel(partition, stages)


@dataclass(eq=False)
class Capturing:
    """Captures the segments of partitions. The attributes are those of `build_compiled_model`."""

    training: bool
    compute: torch.dtype
    presences: dict[str, ObservedGradientPresence] | None
    lowering: Lowering
    captures: Captures
    recompute: bool | int
    traced_for: torch.device

    def capture(
        self,
        partition: Partition,
        segment: Segment,
        inputs: list[torch.Tensor],
        seeds: Orders,
        gradients: Orders,
        unreached: frozenset[int],
    ) -> Captured:
        """Capture one segment of a partition, for these orders of seeds and gradients; or find what fits it."""
        count = len(partition.segments)
        last = segment.index == count - 1
        own = count - partition.leading
        recomputes = segment.index - partition.leading < recomputing(self.recompute, own)
        save = self.training and not last and not recomputes
        examples = {index: example_of(partition.values[segment.outputs[index]], seeds[index]) for index in seeds}
        described = [(tuple(x.shape), x.dtype, x.requires_grad, order_of(x)) for x in inputs]
        ends_in_loss = last and partition.has_loss
        shows = frozenset[int]()
        if ends_in_loss and self.training:
            # The joint program computes the loss, and of the other outputs those that are asked for.
            asked = (number for output in partition.named_outputs.values() for number in output.numbers)
            shows = frozenset(segment.outputs.index(partition.results[number]) for number in asked)
        traced, cut = [described, dict(seeds), unreached, segment.row_chunk], (dict(gradients), save, shows)
        captured = self.captures.find(segment, traced, cut)
        if captured is None:
            module, why = segment.module, ""
            if segment.row_chunk is not None:
                module, why = in_row_chunks(module, inputs, segment.name, self.compute, segment.row_chunk)
            captured = _capture(
                segment,
                CaptureRequest(
                    module,
                    inputs,
                    segment.name,
                    ends_in_loss=ends_in_loss,
                    compute_dtype=self.compute,
                    lowering=self.lowering,
                    device=self.traced_for,
                    training=self.training,
                    save=save,
                    seeds=examples,
                    gradient_orders=gradients,
                    unreached=unreached,
                    shown=shows,
                    values={
                        position: tensor
                        for position, number in enumerate(segment.inputs)
                        if segment.chunks is None and (tensor := partition.values[number].own) is not None
                    },
                    adds_loss=segment.chunks is not None,
                    late=module is not segment.module,
                ),
            )
            captured = replace(captured, row_problem=why)
            if isinstance(module, ChunkedLayer):
                captured = replace(captured, reads=module.reads)
            if captured.eager is None:
                captured = self.captures.add(segment, traced, cut, captured)
            elif self.presences is not None:
                captured.eager.presence = self.presences.setdefault(segment.name, captured.eager.presence)
        segment.row_problem = captured.row_problem
        return captured

    def forwards(
        self, partition: Partition, segments: Sequence[Segment]
    ) -> tuple[list[list[torch.Tensor]], list[Captured]]:
        """Capture segments of a partition in order. Returns the examples of inputs that each was given, and captures.

        The values that they make take on the dtype and the order of what is computed.
        """
        requires_grad = {value.index: value.requires_grad for value in partition.values}
        given: list[list[torch.Tensor]] = []
        found: list[Captured] = []
        for value in partition.values:
            if self.lowering is Lowering.CORE:
                value.order = ()
        for segment in segments:
            values = [partition.values[number] for number in segment.inputs]
            inputs = [example_of(value, value.order) for value in values]
            if segment.chunks is not None:
                inputs = chunk_of(segment.chunks, values, segment.chunks.size)
            for example, number in zip(inputs, segment.inputs, strict=True):
                example.requires_grad_(self.training and requires_grad.get(number, False))
            captured = self.capture(partition, segment, inputs, {}, row_orders(segment), frozenset())
            for index, number in enumerate(segment.outputs):
                requires_grad[number] = captured.output_requires_grad[index]
                # As computed, which may differ from what was traced.
                partition.values[number].dtype = captured.forward.outputs[index].dtype
                partition.values[number].order = captured.output_orders.get(index, ())
            given.append(inputs)
            found.append(captured)
        return given, found

    def smaller_chunk(self, partition: Partition, captured: Captured, given: Sequence[torch.Tensor]) -> Captured | None:
        """The last segment once more, for a last chunk of positions that is smaller; None if there is none.

        `captured` is what it was captured as for the other chunks, and `given` the examples for that.
        """
        final = partition.segments[-1]
        if final.chunks is None:
            return None
        check_captured(captured)
        left = final.chunks.rows()[-1][1]
        if left == final.chunks.size:
            return None
        examples = chunk_of(final.chunks, [partition.values[number] for number in final.inputs], left)
        for example, like in zip(examples, given, strict=True):
            example.requires_grad_(like.requires_grad)
        return self.capture(partition, final, examples, {}, row_orders(final), frozenset())


def _capture(segment: Segment, request: CaptureRequest) -> Captured:
    """Capture a segment. Parameters and buffers of others that its code holds become its own as well."""
    while True:
        try:
            return capture(request)
        except HeldElsewhere as elsewhere:
            segment.take(elsewhere.name, elsewhere.tensor)


def example_of(value: Value, order: Order) -> torch.Tensor:
    """A tensor of the value's shape and dtype with that order in memory."""
    return as_written(torch.empty(stored_shape(value.shape, order), dtype=value.dtype), order)


def recomputing(recompute: bool | int, segments: int) -> int:
    """How many of the segments recompute their forward: the first ones.

    Segments near the end save their tensors instead: these are needed again the soonest, and then free their memory.
    """
    if isinstance(recompute, bool):
        return segments if recompute else 0
    return recompute
