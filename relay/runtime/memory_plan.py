"""The memory plan of a pass over the model: what it needs on the device, computed before anything is allocated.

A `Requirement` is bytes by purpose. Where it exceeds the device's capacity the run is refused at once, with what would
reduce it. Stash plans are made here, by the order of the schedule's visits. Nothing is allocated here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hal.errors import OutOfMemory
from hal.program import Program, Role
from hal.slot.layout import lay_out
from hal.spec.units import format_size
from relay.partition.segments import Value
from relay.runtime.head.cut_advice import cut_advice, why_whole
from relay.runtime.lanes.visit_plan import VisitKey, VisitPlan, visits_of
from relay.runtime.stages import CompiledModel, StageProgram
from relay.runtime.stash.plan import Key, Life, StashPlan, device_bytes, plan_stash, saved_bytes, tied_bytes

RESIDENT_FROM = 3
"""Values that at least this many segments use stay on the device: they are few, and do not grow with depth."""

SMALL = 4096
"""Bytes up to which what is prepared for the last segment stays on the device."""


@dataclass(frozen=True)
class Requirement:
    """Bytes of device memory that a training step needs, by purpose.

    Attributes:
        slots: all slots together; there are `slot_count`.
        stash: values between segments. `saved` of it are tensors saved for the backward instead of recomputing them,
            and `tied` gradients of tied weights, kept for each micro-batch.
        workspace: what the largest kernel needs while it runs.
        scalars: losses and gradient seeds.
        layers: the most layers that share a slot.
        group: the most segments that the device takes at a time; it has as many times the slots.
        resident: the slots of resident layers. There are `resident_count`; `most_resident` fit.
        cuts: cuts of the head or of layers that would reduce the workspace, in words.
        whole: why the head is not cut where that was asked for, as a sentence.
    """

    slots: int
    slot_count: int
    stash: int
    workspace: int
    scalars: int
    saved: int = 0
    tied: int = 0
    layers: int = 1
    group: int = 1
    resident: int = 0
    resident_count: int = 0
    most_resident: int = 0
    cuts: tuple[str, ...] = ()
    whole: str = ""

    @property
    def total(self) -> int:
        """All bytes."""
        return self.slots + self.stash + self.workspace + self.scalars + self.resident

    def check(self, device: str, capacity: int | None, stash: str, microbatches: int, largest: str) -> None:
        """Raise OutOfMemory, with advice, where the requirement exceeds the capacity."""
        if capacity is not None and self.total > capacity:
            advice = self.advice(stash, microbatches, largest)
            raise OutOfMemory(f"This run on device {device!r}", self.total, 0, capacity, advice)

    def advice(self, stash: str, microbatches: int, largest: str) -> str:
        """What the bytes are for, and what would reduce them."""
        options = []
        if self.resident_count:
            fewer = min(self.most_resident, self.resident_count - 1)
            options.append(
                f"resident_layers={fewer} ({self.resident_count} take {format_size(self.resident)}; at most "
                f"{self.most_resident} fit beside the rest)"
            )
        if self.tied:
            options.append(f"exact_ties=False (gradients of tied weights take {format_size(self.tied)})")
        if self.saved:
            options.append(f"recompute=True (the saved tensors take {format_size(self.saved)})")
        if self.group > 1:
            options.append(f"layers_per_visit={self.group - 1} (up to {self.group} segments have slots at a time)")
        if self.layers > 1:
            options.append(f"layers_per_slot={self.layers - 1} (a slot holds up to {self.layers} layers)")
        if stash == "device":
            options.append(f"stash='host' (the stash takes {format_size(self.stash)})")
        if self.slot_count > self.group:
            fewer, each = self.slot_count // self.group - 1, format_size(self.slots // self.slot_count)
            options.append(f"slots={fewer} (each takes {each})")
        options += self.cuts
        options.append(f"more micro-batches than {microbatches} (smaller pieces: less workspace and stash)")
        resident = f"{self.resident_count} resident layers {self.resident:,}, " if self.resident_count else ""
        return (
            f"It needs {self.total:,} bytes: {self.slot_count} slots of {self.slots // self.slot_count:,} (the largest "
            f"layer is {largest!r}), {resident}stash {self.stash:,}, workspace {self.workspace:,}. "
            f"What reduces it: {'; '.join(options)}; or raise capacity=.{self.whole}"
        )


def requirement_of(
    compiled: Sequence[CompiledModel],
    plans: Sequence[StashPlan],
    slot_count: int,
    slot_size: int,
    visits: VisitPlan | None = None,
    lane: int = 0,
    parts: Sequence[Program] = (),
) -> Requirement:
    """What a pass on these micro-batches, with their stash plans, needs with slots of `slot_size` bytes.

    With a plan of `visits`, what one lane needs of it; else all is on one. `parts` are the device's parts of updates.
    """
    return Requirement(
        slots=slot_count * slot_size,
        slot_count=slot_count,
        stash=device_bytes(plans, lane),
        workspace=max(
            *(kernel_workspace(model, visits, lane) for model in dict.fromkeys(compiled)),
            *(part.workspace for part in parts),
            0,
        ),
        scalars=scalar_bytes(len(compiled)),
        saved=saved_bytes(plans, lane),
        tied=tied_bytes(plans, lane),
        layers=max(stage.segment.layers for stage in compiled[0].stages),
        group=1 if visits is None else max(1, visits.largest(lane)),
        cuts=cut_advice(compiled),
        whole=why_whole(compiled),
    )


def with_advice(failure: OutOfMemory, advice: str) -> OutOfMemory:
    """The same error with advice on what would reduce the need, if it has none."""
    if failure.advice or not advice:
        return failure
    return OutOfMemory(failure.what, failure.requested, failure.in_use, failure.capacity, advice)


def planned_slot_sizes(compiled: CompiledModel) -> tuple[int, int]:
    """Bytes of the largest segment's weights and of the largest's gradients, before the model is in the store."""
    weights = [stage.captured.forward.inputs[: len(stage.dtypes)] for stage in compiled.stages]
    gradients = [
        [port for port in stage.backward.program.outputs if port.role is Role.PARAMETER_GRADIENT]
        for stage in compiled.stages
        if stage.backward is not None
    ]
    parameter_size, gradient_size = (
        max(lay_out([(port.shape, port.dtype) for port in ports])[1] for ports in (*rows, []))
        for rows in (weights, gradients)
    )
    return parameter_size, gradient_size


def scalar_bytes(microbatches: int) -> int:
    """Two rows (losses, and seeds) of one number of up to 8 bytes a micro-batch."""
    return 2 * max(64, 8 * microbatches)


def kernel_workspace(compiled: CompiledModel, visits: VisitPlan | None = None, lane: int = 0) -> int:
    """Bytes that the largest kernel needs while it runs; with a plan of `visits`, the largest on a lane."""
    programs = [program for stage in compiled.stages for program in stage.programs]
    if visits is not None:
        programs = [
            program
            for group in visits.groups
            if group.lane == lane
            for visit in group.visits
            for program in programs_of(compiled, visit)
        ]
    return max((program.program.workspace for program in programs), default=0)


def programs_of(compiled: CompiledModel, visit: VisitKey) -> list[StageProgram]:
    """The program of a visit, and the one for a smaller last chunk."""
    stage = compiled.stages[visit.segment]
    program = stage.backward if visit.backward else stage.forward
    return [one for one in (program, program.rest if program is not None else None) if one is not None]


def plan_for(models: Sequence[CompiledModel], stash: str, training: bool, lanes: Sequence[int] = ()) -> StashPlan:
    """Where each value and gradient of a pass lives, by the order of visits that the schedule makes.

    `lanes` are the lanes of the visits; all on one if not given. What stays on devices has memory on each lane that
    uses it.

    `models` are of one layout, the largest micro-batch first; what segments save may be largest in another. What a head
    over the whole batch takes of a micro-batch stays on the device with its gradient: it takes all of them at once.
    """
    compiled, values = models[0], models[0].partition.values
    corresponding = zip(*(model.partition.values for model in models), strict=False)  # as far as they are used
    sizes = [max(map(_bytes, alike)) for alike in corresponding]
    order = visits_of(compiled.stages, training)
    programs = [programs_of(compiled, visit)[:1] for visit in order]
    visits = [(program, lane) for (program,), lane in zip(programs, lanes or [0] * len(order), strict=True)]
    end = len(visits)
    lives: dict[Key, Life] = {}
    most_streamed = most_tied = 0
    parts = compiled.stages[-1].programs if compiled.head is not None else []
    at_once = {value for part in parts for value in (*part.reads, *part.value_gradients)}
    # What is prepared for the last segment is the same few numbers at any depth.
    first = compiled.partition.segments[: compiled.partition.leading]
    at_once |= {value for segment in first for value in segment.outputs if sizes[value] <= SMALL}

    def use(key: Key, visit: int) -> None:
        where = "device" if key.value in at_once else stash
        _use(lives, key, visit, values[key.value], sizes[key.value], where)

    for value in compiled.partition.inputs:
        if values[value].consumers:
            use(Key(value, False), 0)
    for number, (program, lane) in enumerate(visits):
        keys = [Key(value, False) for value in (*program.reads, *program.writes)]
        keys += [Key(value, True) for value in (*program.seeds, *program.value_gradients)]
        keys = [
            key for key in keys if key.value != compiled.loss
        ]  # the loss and its seed are scalars, not in the stash
        for key in keys:
            use(key, number)
            lives[key].lanes.add(lane)
        streamed = [lives[key] for key in keys if lives[key].streams]
        most_streamed = max(most_streamed, sum(not life.saved and not life.tied for life in streamed))
        most_tied = max(most_tied, sum(life.tied for life in streamed))
    read_back = [Key(value, False) for value in compiled.partition.results]
    read_back += [Key(value, True) for value in compiled.partition.inputs]
    for key in read_back:
        life = lives.get(key)
        if life is not None:  # it is read back after the last visit
            life.last, life.streams = end, False
    return plan_stash(lives, most_streamed, most_tied)


def plans_for(
    models: Sequence[CompiledModel], stash: str, training: bool, visits: VisitPlan | None = None
) -> list[StashPlan]:
    """A plan for each micro-batch, the largest first, and one for the values of a head over the whole batch.

    Micro-batches whose values are handed on alike share one plan. `visits` has the lane of each visit; all are on one
    if it is not given.
    """
    groups: list[list[CompiledModel]] = []
    for model in dict.fromkeys(models):
        group = next((group for group in groups if group[0].layout() == model.layout()), None)
        if group is None:
            groups.append([model])
        else:
            group.append(model)
    lanes, turn = ([], 0) if visits is None else (visits.lanes, visits.turn)
    plans = {model: plan for group in groups for plan in [plan_for(group, stash, training, lanes)] for model in group}
    head = models[0].head
    of_head = [] if head is None else [plan_for([head], "device", training, [turn])]
    return [*(plans[model] for model in models), *of_head]


def _bytes(value: Value) -> int:
    return value.dtype.itemsize * math.prod(value.shape)


def _use(lives: dict[Key, Life], key: Key, visit: int, value: Value, size: int, stash: str) -> None:
    life = lives.get(key)
    if life is None:
        resident = stash == "device" or len(set(value.consumers)) >= RESIDENT_FROM
        saved = bool(value.parts) and not value.tied
        life = lives[key] = Life(visit, visit, size, not resident, saved, value.tied)
    life.last = visit
