"""Compiled models: a partition whose segments are captured, and then compiled, for one shape of micro-batch.

Each segment becomes a stage with its kernels and the lists that a visit needs, so that a visit only looks things up.
Segments of equal structure are captured once and share their kernels. Invariant: nothing but kernels is allocated.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hal.device import Device
from hal.program import Kernel, Program, Role
from hal.slot import lay_out
from relay.capture import Captured, CaptureRequest, Lowering, ObservedGradientPresence, capture
from relay.capture.guards.held_tensors import HeldElsewhere
from relay.capture.memory_order import Order, as_written, order_of, stored_shape
from relay.data.index_domain import IndexChecks, Visit
from relay.eps.regions import GradientField, Wanted
from relay.errors import PartitionError
from relay.partition.capture_cache import Captures
from relay.partition.positions.layers import ChunkedLayer, in_row_chunks
from relay.partition.segments import Partition, PositionChunks, Segment, Value
from relay.runtime.gradient_layout import Orders, settle_gradients
from relay.runtime.gradient_presence import Backward, DerivedGradientPresence, derive_presence
from relay.runtime.head.chunk_examples import check_captured, chunk_of, row_orders
from relay.runtime.sparse_rows.table import Table
from relay.runtime.ties.touched_rows import TouchedRows

CPU = torch.device("cpu")


@dataclass(eq=False)
class StageProgram:
    """One kind of visit to a stage: a program, its kernel once compiled, and where inputs and outputs belong.

    Attributes:
        reads: values that it takes as inputs (of a value with parts, all parts).
        seeds: values whose gradients it takes as inputs.
        writes: values that it computes.
        updates: buffers that it changes.
        parameter_gradients: parameters that it differentiates.
        value_gradients: values that it differentiates; `added` is True for those whose gradient is added to one that
            is there already.
        first, later: the accumulate patterns for the first micro-batch and for the others.
        kernel: the compiled program, once compiled.
        chunks: the chunks of positions that the program is run for, one after the other; None for a program that is run
            once.
        rest: the same visit for the last chunk, where that is smaller.
        tied: how many outputs, at the end, are gradients of tied weights for one micro-batch.
    """

    program: Program
    reads: tuple[int, ...]
    seeds: tuple[int, ...]
    writes: tuple[int, ...]
    updates: tuple[int, ...]
    parameter_gradients: tuple[int, ...]
    value_gradients: tuple[int, ...]
    added: tuple[bool, ...] = ()
    first: tuple[bool, ...] = ()
    later: tuple[bool, ...] = ()
    kernel: Kernel | None = None
    chunks: PositionChunks | None = None
    rest: StageProgram | None = None
    tied: int = 0

    def accumulate(self, later: bool) -> tuple[bool, ...]:
        """The kernel's accumulate pattern, for the first micro-batch or a later one."""
        plain = sum(port.role in (Role.VALUE, Role.BUFFER_UPDATE) for port in self.program.outputs)
        pattern = (False,) * plain + (later,) * len(self.parameter_gradients) + self.added
        return pattern if any(pattern) else ()

    def accumulate_chunk(self, first_microbatch: bool, first_chunk: bool) -> tuple[bool, ...]:
        """The kernel's accumulate pattern for a chunk.

        From the second chunk of a micro-batch on the loss is added, and so are gradients of tied weights.
        """
        later = not (first_microbatch and first_chunk)
        pattern = (not first_chunk,) + (later,) * len(self.parameter_gradients)
        values = len(self.program.outputs) - len(pattern) - self.tied
        pattern += self.added[:values] + (not first_chunk,) * self.tied
        return pattern if any(pattern) else ()


@dataclass(eq=False)
class Stage:
    """A segment ready to run. Names are the model's; `parameters` each once, in the kernels' order.

    `dtypes` are what the kernels take the parameters and then the buffers in. `gradient_presence` is set where data
    decide which gradients a step computes.
    """

    segment: Segment
    captured: Captured
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    forward: StageProgram | None
    backward: StageProgram | None
    gradient_presence: DerivedGradientPresence | None = None

    @property
    def programs(self) -> list[StageProgram]:
        """Its programs: forward and backward, as far as it has them, and those for a smaller last chunk."""
        found = [program for program in (self.forward, self.backward) if program is not None]
        return found + [program.rest for program in found if program.rest is not None]

    @property
    def gradients(self) -> tuple[str, ...]:
        """The parameters that it has gradients for, in the kernel's order."""
        if self.backward is None:
            return ()
        return tuple(self.parameters[index] for index in self.backward.parameter_gradients)


@dataclass(eq=False)
class CompiledModel:
    """All stages, for one shape of micro-batch.

    With a `head` the last stage runs once, over the whole batch: the models of all its micro-batches have one head,
    and each has in its last stage what the head takes of that micro-batch (`relay.runtime.head`).

    `tables` are the parameters of which it takes some rows (`relay.runtime.sparse_rows`), `touched` the rows of tied
    embeddings whose gradients are kept (`relay.runtime.ties`), and `whole` is the model that it was made of.
    `over_rows` are the models made of this one, by how many rows of which tables they take.
    """

    partition: Partition
    stages: list[Stage]
    head: CompiledModel | None = None
    tables: tuple[Table, ...] = ()
    whole: CompiledModel | None = None
    over_rows: dict[tuple[tuple[str, int], ...], CompiledModel] = field(default_factory=dict, init=False)
    touched: tuple[TouchedRows, ...] = ()

    @property
    def loss(self) -> int | None:
        """The value that is the loss, or None."""
        return self.partition.segments[-1].outputs[0] if self.partition.has_loss else None

    @property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of the loss and of its gradient seed."""
        return torch.float32 if self.loss is None else self.partition.values[self.loss].dtype

    @functools.cached_property
    def index_checks(self) -> IndexChecks:
        """The checks of the indices in a micro-batch."""
        if self.whole is not None:
            return self.whole.index_checks
        visits = []
        for stage in self.stages if self.head is None else self.stages[:-1]:  # the head's are checked once, by its own
            chosen = stage.forward or stage.backward
            if chosen is not None and stage.captured.eager is None:
                segment = stage.segment
                visits.append(Visit(segment.name, chosen.program, segment.inputs, segment.outputs))
        return IndexChecks(visits, self.partition.inputs)

    def compile(self, device: Device) -> None:
        """Make the kernels. Raises Unsupported, CompileError or OutOfMemory, naming the layer."""
        for stage in self.stages:
            for program in stage.programs:
                program.kernel = device.compile(program.program)

    def signature(self) -> Any:
        """What must be equal for two micro-batches to take part in one step: the layers, their states and gradients."""
        return [
            (
                stage.segment.name,
                stage.parameters,
                stage.buffers,
                stage.dtypes,
                stage.gradients,
                tuple(program is not None and program.updates for program in (stage.forward, stage.backward)),
            )
            for stage in self.stages
        ]

    def layout(self) -> Any:
        """What must be equal for two micro-batches' values to use the same cells: which stage makes and takes each."""
        return [
            (program.reads, program.writes, program.seeds, program.value_gradients)
            for stage in self.stages
            for program in stage.programs
        ]

    def rows(self, models: Sequence[CompiledModel]) -> list[CompiledModel]:
        """What has values of its own in a step of these `models`: each of them, and the head if there is one."""
        return [*models, *([self.head] if self.head is not None else [])]


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
            module = segment.module
            if segment.row_chunk is not None:
                module = in_row_chunks(module, inputs, segment.name, self.compute, segment.row_chunk)
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
            if isinstance(module, ChunkedLayer):
                captured = replace(captured, reads=module.reads)
            if captured.eager is None:
                captured = self.captures.add(segment, traced, cut, captured)
            elif self.presences is not None:
                captured.eager.presence = self.presences.setdefault(segment.name, captured.eager.presence)
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


def connect(stages: Sequence[Stage]) -> None:
    """Settle which gradients are added to others, and which are made at all, given all stages of a model in order."""
    fed: set[int] = set()
    for stage in reversed(stages):
        if stage.backward is None:
            continue
        stage.backward.added = tuple(value in fed for value in stage.backward.value_gradients)
        if stage.backward.rest is not None:
            stage.backward.rest.added = stage.backward.added
        fed.update(stage.backward.value_gradients)
    for stage in stages:
        for program in stage.programs:
            program.first, program.later = program.accumulate(False), program.accumulate(True)
    _refuse_held_states(stages)
    backwards = [
        Backward(back.program, back.seeds, back.value_gradients, presence_in(stage.captured))
        if (back := stage.backward) is not None
        else None
        for stage in stages
    ]
    for stage, gradient_presence in zip(stages, derive_presence(backwards), strict=True):
        stage.gradient_presence = gradient_presence


def _refuse_held_states(stages: Sequence[Stage]) -> None:
    """Raise PartitionError for a buffer that one segment changes and another one's code holds by itself."""
    changed = {stage.buffers[index]: stage for stage in stages for one in stage.programs for index in one.updates}
    for stage in stages:
        for name in stage.segment.held:
            if changed.get(name, stage) is not stage:
                raise PartitionError(
                    f"{stage.segment.name!r} holds the buffer {name!r}, which {changed[name].segment.name!r} changes "
                    "in its forward. With several micro-batches it would read it too late. Pass it on as a tensor."
                )


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


def add_saved(segment: Segment, captured: Captured, partition: Partition) -> None:
    """Add one value for all tensors that a segment's forward saves for its backward: one transfer if it streams."""
    ports = [port for port in captured.saved if port.index >= len(segment.outputs)]
    if ports:
        fields, size = lay_out([(port.shape, port.dtype) for port in ports])
        value = Value(len(partition.values), (size,), torch.uint8, segment.index, [segment.index], fields)
        partition.values.append(value)
        segment.outputs = (*segment.outputs, value.index)


def make_stage(segment: Segment, captured: Captured, partition: Partition, training: bool, results: bool) -> Stage:
    """The stage of a captured segment."""
    last = segment.index == len(partition.segments) - 1

    values = [value for value in segment.outputs if not partition.values[value].parts]
    bundle = [value for value in segment.outputs if partition.values[value].parts]
    own = [segment.outputs[port.index] for port in captured.saved if port.index < len(values)]
    known = [*segment.inputs, *own]

    def named(indices: list[int], names: Sequence[int]) -> tuple[int, ...]:
        """The values with these indices. Ports beyond the values are the parts of one value."""
        plain = [names[index] for index in indices if index < len(names)]
        return (*plain, *(bundle if len(plain) < len(indices) else ()))

    def make(program: Program) -> StageProgram:
        ports = program.outputs
        return StageProgram(
            program=program,
            reads=named([port.index for port in program.inputs if port.role is Role.VALUE], known),
            seeds=tuple(segment.outputs[port.index] for port in program.inputs if port.role is Role.SEED),
            writes=named([port.index for port in ports if port.role is Role.VALUE], values),
            updates=tuple(port.index for port in ports if port.role is Role.BUFFER_UPDATE),
            parameter_gradients=tuple(port.index for port in ports if port.role is Role.PARAMETER_GRADIENT),
            value_gradients=tuple(segment.inputs[port.index] for port in ports if port.role is Role.VALUE_GRADIENT),
            chunks=segment.chunks,
        )

    forward = backward = None
    if last and partition.has_loss and training:
        assert captured.joint is not None
        backward = make(captured.joint)
    else:
        only_loss = last and partition.has_loss and not results
        forward = make(captured.loss if only_loss and captured.loss is not None else captured.forward)
        if training and captured.backward is not None:
            backward = make(captured.backward)
    parameters = tuple(segment.parameters[names[0]] for names in captured.parameter_names)
    buffers = tuple(segment.buffers[name] for name in captured.buffer_names)
    ports = captured.forward.inputs[: len(parameters) + len(buffers)]
    return Stage(segment, captured, parameters, buffers, tuple(port.dtype for port in ports), forward, backward)


def presence_in(captured: Captured) -> ObservedGradientPresence | None:
    """The record of which gradients a segment that runs eagerly has computed; None for other segments."""
    return captured.eager.presence if captured.eager is not None else None


def wanted_of(compiled: CompiledModel) -> list[list[Wanted]]:
    """The parameters and buffers that each segment needs, each in the dtype that its kernels take."""
    return [list(zip([*stage.parameters, *stage.buffers], stage.dtypes, strict=True)) for stage in compiled.stages]


def changing_buffers(compiled: CompiledModel) -> list[str]:
    """The buffers that a training step changes."""
    return [
        stage.buffers[index] for stage in compiled.stages for program in stage.programs for index in program.updates
    ]


def gradient_fields(compiled: CompiledModel) -> list[list[GradientField]]:
    """The gradients that each segment writes to its slot."""
    uses: Counter[str] = Counter()
    fields = []
    for stage in compiled.stages:
        outputs = stage.backward.program.outputs if stage.backward is not None else ()
        dtypes = [port.dtype for port in outputs if port.role is Role.PARAMETER_GRADIENT]
        named = zip(stage.gradients, dtypes, strict=True)
        fields.append([GradientField(name, dtype, uses[name]) for name, dtype in named])
        uses.update(stage.gradients)
    return fields
