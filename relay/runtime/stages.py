"""Compiled models: the stages of a model, for one shape of micro-batch.

A stage has a segment's kernels and the lists that a visit needs, so that a visit only looks things up. They are made in
`relay.runtime.compiling`. Invariant: nothing but kernels is allocated.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hal.device import DeviceInfo
from hal.program import Kernel, Program, Role
from relay.capture import Captured
from relay.data.index_domain import IndexChecks, Visit
from relay.eps.regions import GradientField, Wanted
from relay.partition.segments import Partition, PositionChunks, Segment
from relay.runtime.gradient_presence import DerivedGradientPresence
from relay.runtime.on_host.calls import bytes_on_host, runs_on_host
from relay.runtime.sparse_rows.table import Table
from relay.runtime.ties.touched_rows import TouchedRows


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

    def bytes_on_host(self, info: DeviceInfo) -> int:
        """Bytes that the host needs for the programs that it runs."""
        programs = [program.program for stage in self.stages for program in stage.programs]
        return sum(bytes_on_host(program) for program in programs if runs_on_host(program, info))

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


def whole_tensors(compiled: CompiledModel, wanted: Sequence[Sequence[Wanted]]) -> list[list[Wanted]]:
    """What the segments need of the model's own tensors; tables of which rows are sent lie by themselves."""
    rows = {table.key for table in compiled.tables}
    return [[tensor for tensor in group if tensor[0] not in rows] for group in wanted]
