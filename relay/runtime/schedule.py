"""The schedule: every micro-batch of a step passes through a layer before the next layer takes its place.

The loop order is for layer: for micro-batch. The forward goes up to the last segment, which runs once together with its
backward, and the backward goes back down. Weights cross the link once in each direction; a layer that is still in its
slot at the turn is not sent again. The next layers load while one computes; gradients are sent to the host and updates
run behind. Everything is submitted from here and ordered by events alone; only the caller waits, at the end.

Invariant: this file decides the order of visits and nothing else. Which event orders which access is decided by the
slot, the stash and the server, where the memory is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hal.device import KernelCall, View
from hal.event import Event
from hal.random import RandomKey
from hal.slot.device_slot import GradientRegion
from hal.slot.layout import SlotContent
from relay.eps.gradient_plan import GradientPlan
from relay.eps.server import ParameterServer
from relay.eps.step_record import SubmittedStep
from relay.eps.store import LayerStore
from relay.runtime.head.chunk_calls import chunk_calls
from relay.runtime.lanes.lane import Lane
from relay.runtime.lanes.visit import LoadAhead, Visit, assign_slots, may_load
from relay.runtime.lanes.visit_plan import VisitPlan
from relay.runtime.residency.slots import ResidentSlot
from relay.runtime.scalars import Scalars
from relay.runtime.stages import CompiledModel, StageProgram
from relay.runtime.stash.memory import Stash
from relay.runtime.stash.plan import Key
from relay.runtime.trace import Trace


@dataclass(eq=False)
class PreparedStep:
    """What a pass over the model runs on, compiled and allocated.

    Attributes:
        compiled: the compiled model for the shape of each micro-batch; they share a head over the whole batch, if any.
        contents: what the slots hold, segment by segment.
        gradient_plans: what is done with each segment's gradients; empty for a forward pass alone.
        scheduler: submits the pass.
        lanes: the devices that it runs on, and `visits` which of them runs which segment.
        stash: the values between segments.
        scalars: the losses and the gradient seeds.
        saved_buffers: memory for the buffers that the pass changes, by name, in case the step is not applied.
        workspaces: bytes that the largest kernel needs while it runs, on each lane.
        advice: what would reduce the need of device memory.
        loose_ties: the tied parameters whose gradients are not added in PyTorch's order.
    """

    compiled: Sequence[CompiledModel]
    contents: Sequence[SlotContent]
    gradient_plans: Sequence[GradientPlan]
    scheduler: Scheduler
    lanes: Sequence[Lane]
    visits: VisitPlan
    stash: Stash
    scalars: Scalars
    saved_buffers: Mapping[str, torch.Tensor]
    advice: str
    loose_ties: frozenset[str] = frozenset()
    workspaces: Sequence[int] = ()

    @property
    def rows(self) -> list[CompiledModel]:
        """What has a row of values in the stash: every micro-batch, and then a head over the whole batch."""
        return self.compiled[0].rows(self.compiled)

    @property
    def turn(self) -> Lane:
        """The lane that computes the losses."""
        return self.lanes[self.visits.turn]


@dataclass(eq=False)
class ForwardPass:
    """A forward pass. `seed` and `number` (of the step) go into every random key; `trace` records calls, if given.

    `first` is the number of its first micro-batch in the whole batch.
    """

    prepared: PreparedStep
    seed: int
    number: int
    trace: Trace | None
    first: int = field(default=0, kw_only=True)


@dataclass(eq=False)
class TrainingStep(ForwardPass):
    """A training step.

    Attributes:
        seeds_ready: after this event the gradient seeds are on the device.
        submit_verdict: submits the check of the losses, once their kernels are submitted.
        groups: the optimizer's parameter groups as they are now, without parameters.
        unscale: the factor that removes the loss scale from a gradient.
    """

    seeds_ready: Event
    submit_verdict: Callable[[SubmittedStep], Event]
    groups: Sequence[Mapping[str, Any]]
    unscale: float


class Scheduler:
    """Submits passes over the model on some lanes: training steps and forward passes."""

    def __init__(self, lanes: Sequence[Lane], store: LayerStore, server: ParameterServer) -> None:
        self._lanes = lanes
        self._store = store
        self._server = server

    def train(self, step: TrainingStep, submitted: SubmittedStep) -> None:
        """Submit one training step, and note its events in `submitted`."""
        prepared, trace = step.prepared, step.trace
        contents = prepared.contents
        last = len(contents) - 1
        scalars = prepared.scalars

        def at_the_turn(microbatch: int) -> tuple[list[View], list[View], list[Event]]:
            return [scalars.seeds[microbatch]], [scalars.losses[microbatch]], [step.seeds_ready]

        groups = self._groups_of(prepared)
        unsent: list[Visit] = []  # the updates of these are not submitted as a whole
        for group in self._loaded(groups, submitted, trace):
            for visit in group:
                if visit.region is not None:
                    self._server.updater.end_open(submitted, visit.region)
            turning = group[0].index == last
            self._run_group(group, step, submitted, at_the_turn if turning else None)
            if turning:
                submitted.verdict = step.submit_verdict(submitted)
            for visit in group:
                if visit.backward and prepared.gradient_plans[visit.index].names:
                    self._collect(visit, step, submitted)
                    unsent += [visit] if visit is not groups[-1][-1] else []
                    unsent = self._refresh_updated(unsent, prepared.gradient_plans, submitted, trace)
        regions = self._regions_of(prepared)
        self._server.conclude(prepared.gradient_plans, contents, regions, step.groups, step.unscale, submitted)
        self._refresh_updated(unsent, prepared.gradient_plans, submitted, trace)
        if trace is not None:
            for segment, event in zip(submitted.updated_segments, submitted.updates, strict=True):
                trace.mark("update", segment, event)

    def _regions_of(self, prepared: PreparedStep) -> list[GradientRegion]:
        """Memory for gradients of each segment, outside of the backward, on a lane that visits it."""
        lane_of = {visit.segment: group.lane for group in prepared.visits.groups for visit in group.visits}
        of_lane = [lane.slots.regions_of(prepared.contents) if lane.slots is not None else [] for lane in self._lanes]
        return [of_lane[lane_of[index]][index] for index in range(len(prepared.contents))]

    def _collect(self, visit: Visit, step: TrainingStep, submitted: SubmittedStep) -> None:
        """Send a segment's gradients to the parameter server."""
        plan, drained = step.prepared.gradient_plans[visit.index], len(submitted.drains)
        assert visit.slot is not None
        self._server.collect(plan, visit.slot, visit.lane.drain, step.groups, step.unscale, submitted)
        if step.trace is not None:
            for event in submitted.drains[drained:]:
                step.trace.mark(f"{visit.lane.label}drain", "gradients", event)

    def _refresh_updated(
        self, visits: Sequence[Visit], plans: Sequence[GradientPlan], submitted: SubmittedStep, trace: Trace | None
    ) -> list[Visit]:
        """Refresh those of these visits of which all of the update is submitted; the others are returned."""
        waiting = [visit for visit in visits if self._server.updater.is_open(plans[visit.index])]
        for visit in visits:
            if visit not in waiting:
                self._refresh(visit, submitted, trace)
        return waiting

    def forward(self, step: ForwardPass, submitted: SubmittedStep) -> None:
        """Submit a forward pass alone, and note its events in `submitted`."""
        prepared = step.prepared
        last = len(prepared.contents) - 1
        losses = prepared.scalars.losses if prepared.compiled[0].partition.has_loss else None

        def at_the_end(microbatch: int) -> tuple[list[View], list[View], list[Event]]:
            return [], [losses[microbatch]] if losses is not None else [], []

        for group in self._loaded(self._groups_of(prepared), submitted, step.trace):
            self._run_group(group, step, submitted, at_the_end if group[0].index == last else None)

    def _groups_of(self, prepared: PreparedStep) -> list[list[Visit]]:
        """The visits of a pass, in the groups of its plan."""
        stages, contents = prepared.compiled[0].stages, prepared.contents
        numbers = iter(range(len(prepared.visits.lanes)))
        return [
            [
                Visit(next(numbers), self._lanes[group.lane], index, backward, contents[index], stages[index])
                for index, backward in group.visits
            ]
            for group in prepared.visits.groups
        ]

    def _loaded(
        self, groups: Sequence[list[Visit]], submitted: SubmittedStep, trace: Trace | None
    ) -> Iterator[list[Visit]]:
        """Yield the groups in order, each with its slots loading, and the loads of the next ones submitted.

        A load is submitted after the kernels of all visits before it that its memory depends on, whatever their lane.
        """
        visits = [visit for group in groups for visit in group]
        lanes = {lane: LoadAhead([visit for visit in visits if visit.lane is lane]) for lane in self._lanes}
        for lane, ahead in lanes.items():
            assign_slots(lane, ahead.visits)
        # A resident layer is sent once a pass at most, even if an update in the pass changes what no later visit reads.
        versions = {visit.content: self._store.versions(visit.content) for visit in visits if visit.is_resident}
        submitted.resident_layers = len(versions)
        changing = [visit for visit in visits if visit.changes_buffers]
        for group in groups:
            done = group[0].number
            for lane, ahead in lanes.items():
                while ahead.loaded < len(ahead.visits):
                    following = ahead.visits[ahead.loaded]
                    before = [visit for visit in changing if done <= visit.number < following.number]
                    if not may_load(lane, following, ahead.coming, before):
                        break
                    self._submit_load(following, versions.get(following.content, ()), submitted, trace)
                    ahead.coming.append(following)
                    ahead.loaded += 1
            for visit in group:
                if visit.slot is not None and visit.slot.content is not visit.content:
                    visit.slot.exchange(visit.content)
                if visit.slot is not None and visit.region is not None:
                    visit.slot.borrow(visit.region)
            yield group
            coming = lanes[group[0].lane].coming
            del coming[: len(group)]

    def _submit_load(
        self,
        visit: Visit,
        versions: tuple[int, ...],
        submitted: SubmittedStep,
        trace: Trace | None,
        refresh: bool = False,
    ) -> None:
        """Send what the slot lacks of a segment: of a resident one the tensors older than these versions."""
        slot, content = visit.slot, visit.content
        assert slot is not None
        stale: list[int] | None = None
        if isinstance(slot, ResidentSlot):
            stale = slot.stale(versions)
            slot.versions = versions
            if stale == []:
                return
        elif slot.content is content and slot.version == self._store.version:
            return
        queue = visit.lane.refresh if refresh else visit.lane.load
        ready = self._store.ready(content)
        if isinstance(slot, ResidentSlot):
            submitted.loads += slot.reload(content, stale, queue, ready)
        else:
            submitted.loads += slot.load(content, self._store.version, queue, ready)
        submitted.weight_bytes += content.size if stale is None else sum(content.fields[index].size for index in stale)
        if trace is not None:
            for event in slot.loaded:
                trace.mark(f"{visit.lane.label}load", content.name, event)

    def _refresh(self, visit: Visit, submitted: SubmittedStep, trace: Trace | None) -> None:
        """After the last visit of a resident segment: send its new weights as soon as they are updated.

        Deferred updates come when the backward has ended; their weights are sent in the next step, in forward order.
        """
        if visit.is_resident and not self._server.deferred:
            self._submit_load(visit, self._store.versions(visit.content), submitted, trace, refresh=True)

    def _run_group(
        self,
        group: Sequence[Visit],
        step: ForwardPass,
        submitted: SubmittedStep,
        special: Callable[[int], tuple[list[View], list[View], list[Event]]] | None,
    ) -> None:
        """Run every micro-batch through the segments of a group; a head over the whole batch runs once, for all.

        `special` gives, for a micro-batch at the last segment, the inputs and outputs that are not in the stash and
        the events that they wait for.
        """
        models = step.prepared.compiled
        if models[0].head is not None and group[0].index == len(models[0].stages) - 1:
            parts = [group[0].program_of(model.stages[-1]) for model in step.prepared.rows]
            self._run(group[0], step, submitted, 0, list(enumerate(parts)), special)
        else:
            for microbatch, compiled in enumerate(models):
                for visit in group:
                    program = visit.program_of(compiled.stages[visit.index])
                    self._run(visit, step, submitted, microbatch, [(microbatch, program)], special)
        for visit in group:
            self._send_buffers(visit, submitted)

    def _run(
        self,
        visit: Visit,
        step: ForwardPass,
        submitted: SubmittedStep,
        microbatch: int,
        parts: Sequence[tuple[int, StageProgram]],
        special: Callable[[int], tuple[list[View], list[View], list[Event]]] | None,
    ) -> None:
        """Run one kernel, for a micro-batch.

        `parts` are what its program takes and makes in each row of the stash; those of one program, in its order.
        """
        slot, stash, lane = visit.slot, step.prepared.stash, visit.lane
        assert slot is not None
        program, stage = parts[0][1], visit.stage
        assert program.kernel is not None
        accesses = [
            stash.access(Key(value, False), row, lane.number, False) for row, part in parts for value in part.reads
        ]
        inputs = [*slot.parameters, *[view for access in accesses for view in access.views]]
        waits: list[Event] = []
        outputs: list[View] = []
        if special is not None:
            more_inputs, more_outputs, waits = special(microbatch)
            inputs += more_inputs
            outputs += more_outputs
            waits = list(waits)
        else:
            for row, part in parts:
                for value in part.seeds:
                    access = stash.access(Key(value, True), row, lane.number, False)
                    accesses.append(access)
                    inputs += access.views
        written = [(row, value) for row, part in parts for value in part.writes]
        for row, value in written[len(outputs) :]:
            access = stash.access(Key(value, False), row, lane.number, True)
            accesses.append(access)
            outputs += access.views
        outputs += [slot.parameters[len(stage.parameters) + index] for index in program.updates]
        if program.parameter_gradients:
            outputs += slot.gradients
        for row, part in parts:
            for value, added in zip(part.value_gradients, part.added, strict=True):
                access = stash.access(Key(value, True), row, lane.number, True, added)
                accesses.append(access)
                outputs += access.views
        for access in accesses:
            waits += access.waits
        key = None
        if program.program.draws:
            key = RandomKey(step.seed, step.number, stage.segment.layer_index, step.first + microbatch)
        call = KernelCall(program.kernel, inputs, outputs, program.first if microbatch == 0 else program.later, key)
        calls = [call] if program.chunks is None else chunk_calls(program, call, accesses, microbatch == 0)
        for call in calls:
            event = slot.run(lane.compute, call, waits, bool(program.parameter_gradients))
            submitted.compute.append(event)
            if step.trace is not None:
                # Layers built alike share a program, which has the first one's name.
                kind = program.program.name.rpartition(" ")[2]
                step.trace.mark(f"{lane.label}compute", f"{visit.content.name} {kind} {microbatch}", event)
        for access in accesses:
            access.finish(event)

    def _send_buffers(self, visit: Visit, submitted: SubmittedStep) -> None:
        """Send the buffers that a forward changed to the host. On a unified device they are there already."""
        stage = visit.stage
        updates = visit.program_of(stage).updates
        if not updates or visit.lane.device.info.unified:
            return
        slot = visit.slot
        assert slot is not None
        targets: list[tuple[torch.Tensor, View]] = [
            (self._store[stage.buffers[index]], slot.parameters[len(stage.parameters) + index]) for index in updates
        ]
        sent = slot.send(visit.lane.drain, targets)
        submitted.reads += sent
        self._store.changed(stage.buffers[index] for index in updates)
        for index in updates:
            self._store.updated[stage.buffers[index]] = sent[-1]
