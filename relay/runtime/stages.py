"""Compiled models: a partition captured, and then compiled, for one shape of micro-batch.

Each segment becomes a stage with its kernels and the lists that a visit needs, so that a visit itself only looks
things up. Segments built alike are captured once and share their kernels. It allocates nothing but kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hal.device import Device
from hal.program import Kernel, Program, Role
from hal.slot import lay_out
from relay.capture import Captured, CaptureRequest, Lowering, ObservedGradientPresence, capture
from relay.capture.guards.code_guards import CodeGuards
from relay.capture.guards.code_walk import follow, reads_by_class
from relay.capture.memory_order import Order, as_written, order_of, stored_shape
from relay.eps.store import GradientField, Wanted
from relay.partition.find_blocks import same_structure, tie_pattern
from relay.partition.segments import Partition, Segment, Value
from relay.runtime.gradient_layout import Orders, settle_gradients
from relay.runtime.gradient_presence import Backward, DerivedGradientPresence, derive_presence

CPU = torch.device("cpu")


@dataclass(eq=False)
class StageProgram:
    """One kind of visit to a stage: a program, its kernel once compiled, and where inputs and outputs belong.

    `reads` and `seeds` are the values whose contents and whose gradients it takes in (of a value with parts, all of
    them); `writes` the values it makes;
    `updates` the buffers it changes; `parameter_gradients` the parameters, `value_gradients` the values it
    differentiates (`added` tells which of these come on top of a gradient that is there already). `first` and
    `later` are the accumulate patterns for the first micro-batch and for the others.
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

    def accumulate(self, later: bool) -> tuple[bool, ...]:
        """The kernel's accumulate pattern: `later` for all micro-batches but the first."""
        plain = sum(port.role in (Role.VALUE, Role.BUFFER_UPDATE) for port in self.program.outputs)
        pattern = (False,) * plain + (later,) * len(self.parameter_gradients) + self.added
        return pattern if any(pattern) else ()


@dataclass(eq=False)
class Stage:
    """A segment ready to run. Names are the model's; `parameters` each once, in the kernels' order.

    `dtypes` are what the kernels take the parameters and then the buffers in. `gradient_presence` tells,
    where the data decide it, which of its gradients a step has made.
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
    def gradients(self) -> tuple[str, ...]:
        """The parameters that it has gradients for, in the kernel's order."""
        if self.backward is None:
            return ()
        return tuple(self.parameters[index] for index in self.backward.parameter_gradients)


@dataclass(eq=False)
class CompiledModel:
    """All stages, for one shape of micro-batch."""

    partition: Partition
    stages: list[Stage]

    @property
    def loss(self) -> int | None:
        """The value that is the loss, or None."""
        return self.partition.segments[-1].outputs[0] if self.partition.has_loss else None

    def compile(self, device: Device) -> None:
        """Make the kernels. Raises Unsupported, CompileError or OutOfMemory, naming the layer."""
        for stage in self.stages:
            for one in (stage.forward, stage.backward):
                if one is not None:
                    one.kernel = device.compile(one.program)

    def signature(self) -> Any:
        """What must be equal for two micro-batches to take part in one step: the layers, their states and gradients."""
        return [
            (
                stage.segment.name,
                stage.parameters,
                stage.buffers,
                stage.dtypes,
                stage.gradients,
                tuple(one is not None and one.updates for one in (stage.forward, stage.backward)),
            )
            for stage in self.stages
        ]

    def layout(self) -> Any:
        """What must be equal for two micro-batches' values to lie in the same cells: who makes and who takes which."""
        return [
            (one.reads, one.writes, one.seeds, one.value_gradients)
            for stage in self.stages
            for one in (stage.forward, stage.backward)
            if one is not None
        ]


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
    """Capture; nothing is compiled yet. For `training` the last segment gets one joint pass, else forward passes only;
    `results` asks for the model's outputs besides the loss. `presences` are those of the segments that run eagerly, by
    name: one for all shapes of micro-batch, since a step may have several. `captures` holds what earlier calls
    captured, and takes what this one does. `recompute` says which segments recompute their forward (`recomputing`),
    `traced_for` the device that native graphs are traced for."""
    captures = captures if captures is not None else Captures()
    count = len(partition.segments)

    def captured_as(
        segment: Segment,
        inputs: list[torch.Tensor],
        seeds: Orders,
        gradients: Orders,
        unreached: frozenset[int],
    ) -> Captured:
        last = segment.index == count - 1
        save = training and not last and segment.index >= recomputing(recompute, count)
        examples = {index: _example(partition.values[segment.outputs[index]], seeds[index]) for index in seeds}
        described = [(tuple(one.shape), one.dtype, one.requires_grad, order_of(one)) for one in inputs]
        traced, cut = [described, dict(seeds), unreached], (dict(gradients), save)
        captured = captures.find(segment, traced, cut)
        if captured is None:
            ends_in_loss = last and partition.has_loss
            captured = capture(
                CaptureRequest(
                    segment.module,
                    inputs,
                    segment.name,
                    ends_in_loss=ends_in_loss,
                    compute_dtype=compute,
                    lowering=lowering,
                    device=traced_for,
                    training=training,
                    save=save,
                    seeds=examples,
                    gradient_orders=gradients,
                    unreached=unreached,
                )
            )
            if captured.eager is None:
                captured = captures.add(segment, traced, cut, captured)
            elif presences is not None:
                captured.eager.presence = presences.setdefault(segment.name, captured.eager.presence)
        return captured

    requires_grad: dict[int, bool] = {}
    given: list[list[torch.Tensor]] = []
    found: list[Captured] = []
    for value in partition.values:
        if lowering is Lowering.CORE:
            value.order = ()
    for segment in partition.segments:
        values = [partition.values[value] for value in segment.inputs]
        inputs = [_example(one, one.order) for one in values]
        for one, value in zip(inputs, segment.inputs, strict=True):
            one.requires_grad_(training and requires_grad.get(value, False))
        captured = captured_as(segment, inputs, {}, {}, frozenset())
        for index, value in enumerate(segment.outputs):
            requires_grad[value] = captured.output_requires_grad[index]
            # As computed, which may be other than as traced.
            partition.values[value].dtype = captured.forward.outputs[index].dtype
            partition.values[value].order = captured.output_orders.get(index, ())
        given.append(inputs)
        found.append(captured)
    if training and partition.has_loss:
        settle_gradients(partition, given, found, captured_as)
    built = list(zip(partition.segments, found, strict=True))
    for segment, captured in built:
        _add_saved(segment, captured, partition)

    stages = [_stage(segment, captured, partition, training, results) for segment, captured in built]
    fed: set[int] = set()
    for stage in reversed(stages):
        if stage.backward is None:
            continue
        stage.backward.added = tuple(value in fed for value in stage.backward.value_gradients)
        fed.update(stage.backward.value_gradients)
    for stage in stages:
        for one in (stage.forward, stage.backward):
            if one is not None:
                one.first, one.later = one.accumulate(False), one.accumulate(True)
    backwards = [
        Backward(one.backward.program, one.backward.seeds, one.backward.value_gradients, presence_in(one.captured))
        if one.backward is not None
        else None
        for one in stages
    ]
    for stage, gradient_presence in zip(stages, derive_presence(backwards), strict=True):
        stage.gradient_presence = gradient_presence
    return CompiledModel(partition, stages)


def _example(value: Value, order: Order) -> torch.Tensor:
    """A tensor of the value's shape and dtype that lies in that order."""
    return as_written(torch.empty(stored_shape(value.shape, order), dtype=value.dtype), order)


def recomputing(recompute: bool | int, segments: int) -> int:
    """How many of the segments recompute their forward: the first ones.

    Those near the end keep: their tensors are needed again the soonest, and then make room.
    """
    if isinstance(recompute, bool):
        return segments if recompute else 0
    return recompute


def _add_saved(segment: Segment, captured: Captured, partition: Partition) -> None:
    """A value for all that a segment's forward keeps for its own backward: one transfer, where it streams."""
    ports = [port for port in captured.saved if port.index >= len(segment.outputs)]
    if ports:
        fields, size = lay_out([(port.shape, port.dtype) for port in ports])
        value = Value(len(partition.values), (size,), torch.uint8, segment.index, [segment.index], fields)
        partition.values.append(value)
        segment.outputs = (*segment.outputs, value.index)


class Captures:
    """What has been captured, found again for a segment built alike, whichever partition it is of.

    With `keeps_traces` one trace serves those that differ in what they keep, too; graphs as traced then stay in memory.
    """

    def __init__(self, limit: int = 512, keeps_traces: bool = False) -> None:
        self._limit = limit
        self._keeps_traces = keeps_traces
        self._known: list[tuple[Segment, Any, Any, CodeGuards, Captured]] = []

    def find(self, segment: Segment, traced: Any, cut: Any) -> Captured | None:
        """What serves the segment too, or None. `traced` is what a trace is made for, `cut` what is cut out of it."""
        if segment.alike is None:
            return None
        modes = _modes(segment.module)
        source: Captured | None = None
        for other, other_traced, other_cut, guards, captured in self._known:
            if (
                other_traced == traced
                and (other_cut == cut or captured.recut is not None)
                and _modes(other.module) == modes
                and other.alike[1:] == segment.alike[1:]
                and same_structure(other.alike[0], segment.alike[0], captured.reads)
                and tie_pattern(other.module) == tie_pattern(segment.module)
                and not guards.changed()  # it is as it was when it was captured
            ):
                if other_cut == cut:
                    return captured
                source = captured
        if source is None or source.recut is None:
            return None
        return self.add(segment, traced, cut, source.recut(segment.name, *cut))

    def add(self, segment: Segment, traced: Any, cut: Any, captured: Captured) -> Captured:
        """Keep a capture, which is returned; the oldest goes where there are too many."""
        if not self._keeps_traces:
            captured = replace(captured, recut=None)
        if segment.alike is not None:
            guards = follow(segment.module, reads_by_class(segment.module, captured.reads or {}))
            self._known.append((segment, traced, cut, guards, captured))
            del self._known[: -self._limit]
        return captured

    def clear(self) -> None:
        """Let go of all, and of the layers they were made from."""
        self._known.clear()


def _modes(module: nn.Module) -> Any:
    """What of a module may change after it was captured."""
    return (
        tuple((type(one), one.training) for one in module.modules()),
        tuple((one.shape, one.dtype, one.requires_grad) for one in module.parameters()),
        tuple((one.shape, one.dtype) for one in module.buffers()),
    )


def _stage(segment: Segment, captured: Captured, partition: Partition, training: bool, results: bool) -> Stage:
    last = segment.index == len(partition.segments) - 1

    values = [value for value in segment.outputs if not partition.values[value].parts]
    bundle = [value for value in segment.outputs if partition.values[value].parts]
    own = [segment.outputs[port.index] for port in captured.saved if port.index < len(values)]
    known = [*segment.inputs, *own]

    def named(indices: list[int], names: Sequence[int]) -> tuple[int, ...]:
        """The values by their places, the ports beyond them being the parts of one value."""
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
    """What says of a segment that runs eagerly which gradients it has found."""
    return captured.eager.presence if captured.eager is not None else None


def wanted_of(compiled: CompiledModel) -> list[list[Wanted]]:
    """What each segment wants of the store: its parameters and buffers, each in the dtype that its kernels take."""
    return [
        list(zip([*stage.parameters, *stage.buffers], stage.dtypes, strict=True)) for stage in compiled.stages
    ]


def changing_buffers(compiled: CompiledModel) -> list[str]:
    """The buffers that a training step changes."""
    passes = [(one, each) for one in compiled.stages for each in (one.forward, one.backward) if each is not None]
    return [one.buffers[index] for one, each in passes for index in each.updates]


def gradient_fields(compiled: CompiledModel) -> list[list[GradientField]]:
    """The gradients that each segment leaves in its slot."""
    uses: Counter[str] = Counter()
    fields = []
    for stage in compiled.stages:
        outputs = stage.backward.program.outputs if stage.backward is not None else ()
        dtypes = [port.dtype for port in outputs if port.role is Role.PARAMETER_GRADIENT]
        named = zip(stage.gradients, dtypes, strict=True)
        fields.append([GradientField(name, dtype, uses[name]) for name, dtype in named])
        uses.update(stage.gradients)
    return fields
