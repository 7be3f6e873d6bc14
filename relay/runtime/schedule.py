"""The schedule: every micro-batch of a step passes through a layer before the next layer takes its place.

The loop order is for layer: for micro-batch. The forward goes up to the last segment, which runs once together with its
backward, and the backward goes back down. Weights cross the link once in each direction; a layer that is still in its
slot at the turn is not sent again. The next layers load while one computes; gradients are sent to the host and updates
run behind. Everything is submitted from here and ordered by events alone; only the caller waits, at the end.

Invariant: this file decides the order of visits and nothing else. Which event orders which access is decided by the
slot, the stash and the server, where the memory is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hal.device import Buffer, Device, KernelCall, Queue, View
from hal.event import Event
from hal.host import Host
from hal.random import RandomKey
from hal.slot import DeviceSlot, GradientRegion, SlotContent
from relay.eps.gradient_plan import GradientPlan
from relay.eps.server import ParameterServer
from relay.eps.step_record import SubmittedStep
from relay.eps.store import LayerStore
from relay.runtime.head.chunk_calls import chunk_calls
from relay.runtime.residency.slots import ResidentSlot, Slots
from relay.runtime.stages import CompiledModel, Stage, StageProgram
from relay.runtime.stash import Key, Stash
from relay.runtime.trace import Trace


@dataclass(eq=False)
class Scalars:
    """Device memory for one loss and one gradient seed of each micro-batch: as a row, and one by one."""

    memory: Buffer
    loss_row: View
    losses: Sequence[View]
    seed_row: View
    seeds: Sequence[View]


@dataclass(eq=False)
class PreparedStep:
    """What a pass over the model runs on, compiled and allocated.

    Attributes:
        compiled: the compiled model for the shape of each micro-batch; they share a head over the whole batch, if any.
        contents: what the slots hold, segment by segment.
        gradient_plans: what is done with each segment's gradients; empty for a forward pass alone.
        scheduler: submits the pass.
        stash: the values between segments.
        scalars: the losses and the gradient seeds.
        saved_buffers: memory for the buffers that the pass changes, by name, in case the step is not applied.
        advice: what would reduce the need of device memory.
        loose_ties: the tied parameters whose gradients are not added in PyTorch's order.
    """

    compiled: Sequence[CompiledModel]
    contents: Sequence[SlotContent]
    gradient_plans: Sequence[GradientPlan]
    scheduler: Scheduler
    stash: Stash
    scalars: Scalars
    saved_buffers: Mapping[str, torch.Tensor]
    advice: str
    loose_ties: frozenset[str] = frozenset()

    @property
    def rows(self) -> list[CompiledModel]:
        """What has a row of values in the stash: every micro-batch, and then a head over the whole batch."""
        return self.compiled[0].rows(self.compiled)


@dataclass(eq=False)
class ForwardPass:
    """A forward pass. `seed` and `number` (of the step) go into every random key; `trace` records calls, if given."""

    prepared: PreparedStep
    seed: int
    number: int
    trace: Trace | None


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


@dataclass
class _Visit:
    index: int
    backward: bool
    content: SlotContent
    stage: Stage
    slot: DeviceSlot | None = None
    region: GradientRegion | None = None

    @property
    def is_resident(self) -> bool:
        """Whether the segment has a slot of its own."""
        return isinstance(self.slot, ResidentSlot)

    def program_of(self, stage: Stage) -> StageProgram:
        """The program that the visit runs, of the stage for one micro-batch."""
        program = stage.backward if self.backward else stage.forward
        assert program is not None
        return program

    def changes_buffer_of(self, other: _Visit) -> bool:
        """Whether the visit changes a buffer that another segment holds too."""
        updates = self.program_of(self.stage).updates
        return any(self.stage.buffers[index] in other.stage.buffers for index in updates) if updates else False


class Scheduler:
    """Submits passes over the model: training steps and forward passes."""

    def __init__(self, device: Device, host: Host, store: LayerStore, server: ParameterServer, slots: Slots) -> None:
        self._device = device
        self._host = host
        self._store = store
        self._server = server
        self.slots = slots
        self._compute: Queue = device.queue("compute")
        self.load_queue: Queue = device.queue("load")
        self._refresh_queue: Queue = device.queue("refresh")  # what waits for updates must not hold up other loads
        self.drain_queue: Queue = device.queue("drain")

    def train(self, step: TrainingStep, submitted: SubmittedStep) -> None:
        """Submit one training step, and note its events in `submitted`."""
        prepared, trace = step.prepared, step.trace
        stages, contents = prepared.compiled[0].stages, prepared.contents
        last = len(stages) - 1
        visits = [_Visit(index, False, contents[index], stages[index]) for index in range(last)]
        visits.append(_Visit(last, True, contents[last], stages[last]))
        # The backward ends at the first segment that has anything to differentiate.
        visits += [
            _Visit(index, True, contents[index], stages[index])
            for index in reversed(range(last))
            if stages[index].backward is not None
        ]
        scalars = prepared.scalars

        def at_the_turn(microbatch: int) -> tuple[list[View], list[View], list[Event]]:
            return [scalars.seeds[microbatch]], [scalars.losses[microbatch]], [step.seeds_ready]

        for visit in self._visits(visits, submitted, trace):
            assert visit.slot is not None
            turning = visit.index == last
            self._visit(visit, step, submitted, at_the_turn if turning else None)
            if turning:
                submitted.verdict = step.submit_verdict(submitted)
            plan = prepared.gradient_plans[visit.index]
            if visit.backward and plan.names:
                self._server.collect(plan, visit.slot, self.drain_queue, step.groups, step.unscale, submitted)
                if visit is not visits[-1]:
                    self._refresh(visit, submitted, trace)
        gradients = [content.kept_gradients or content.gradient_tensors for content in contents]
        self._server.conclude(prepared.gradient_plans, gradients, step.groups, step.unscale, submitted)
        if trace is not None:
            for event in submitted.drains:
                trace.mark("drain", "gradients", event)
            for segment, event in zip(submitted.updated_segments, submitted.updates, strict=True):
                trace.mark("update", segment, event)

    def forward(self, step: ForwardPass, submitted: SubmittedStep) -> None:
        """Submit a forward pass alone, and note its events in `submitted`."""
        prepared = step.prepared
        last = len(prepared.contents) - 1
        losses = prepared.scalars.losses if prepared.compiled[0].partition.has_loss else None

        def at_the_end(microbatch: int) -> tuple[list[View], list[View], list[Event]]:
            return [], [losses[microbatch]] if losses is not None else [], []

        stages = prepared.compiled[0].stages
        visits = [_Visit(index, False, content, stages[index]) for index, content in enumerate(prepared.contents)]
        for visit in self._visits(visits, submitted, step.trace):
            self._visit(visit, step, submitted, at_the_end if visit.index == last else None)

    def _visits(self, visits: list[_Visit], submitted: SubmittedStep, trace: Trace | None) -> Iterator[_Visit]:
        """Yield the visits in order, each with its slot loading, and the loads of the next ones submitted."""
        for visit, slot in zip(visits, self.slots.assign([visit.content for visit in visits]), strict=True):
            visit.slot = slot
        writes = [visit.backward and bool(visit.program_of(visit.stage).parameter_gradients) for visit in visits]
        slots = [visit.slot for visit in visits if visit.slot is not None]
        for visit, region in zip(visits, self.slots.regions(slots, writes), strict=True):
            visit.region = region
        # A resident layer is sent once a pass at most, even if an update in the pass changes what no later visit reads.
        versions = {visit.content: self._store.versions(visit.content) for visit in visits if visit.is_resident}
        submitted.resident_layers = len(versions)
        coming: deque[_Visit] = deque()  # those whose loads are submitted
        loaded = 0
        for visit in visits:
            while loaded < len(visits) and self._may_load(visits[loaded], coming):
                following = visits[loaded]
                self._submit_load(following, versions.get(following.content, ()), submitted, trace)
                coming.append(following)
                loaded += 1
            if visit.slot is not None and visit.slot.content is not visit.content:
                visit.slot.exchange(visit.content)
            if visit.slot is not None and visit.region is not None:
                visit.slot.borrow(visit.region)
            yield visit
            coming.popleft()

    def _may_load(self, following: _Visit, coming: Sequence[_Visit]) -> bool:
        """Whether the load of the next visit may be submitted: as far ahead as there are slots in the ring."""
        if not following.is_resident and sum(not visit.is_resident for visit in coming) >= len(self.slots.ring.slots):
            return False
        # Never into a slot that an earlier visit still needs for another content, nor before a buffer that two segments
        # share has come home from the one that changes it first.
        return not any(
            (earlier.slot is following.slot and earlier.content is not following.content)
            or earlier.changes_buffer_of(following)
            for earlier in coming
        )

    def _submit_load(
        self,
        visit: _Visit,
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
        queue = self._refresh_queue if refresh else self.load_queue
        ready = self._store.ready(content)
        if isinstance(slot, ResidentSlot):
            submitted.loads += slot.reload(content, stale, queue, ready)
        else:
            submitted.loads += slot.load(content, self._store.version, queue, ready)
        submitted.weight_bytes += content.size if stale is None else sum(content.fields[index].size for index in stale)
        if trace is not None:
            for event in slot.loaded:
                trace.mark("load", content.name, event)

    def _refresh(self, visit: _Visit, submitted: SubmittedStep, trace: Trace | None) -> None:
        """After the last visit of a resident segment: send its new weights as soon as they are updated.

        Deferred updates come when the backward has ended; their weights are sent in the next step, in forward order.
        """
        if visit.is_resident and not self._server.deferred:
            self._submit_load(visit, self._store.versions(visit.content), submitted, trace, refresh=True)

    def _visit(
        self,
        visit: _Visit,
        step: ForwardPass,
        submitted: SubmittedStep,
        special: Callable[[int], tuple[list[View], list[View], list[Event]]] | None,
    ) -> None:
        """Run every micro-batch through one segment; a head over the whole batch runs once, for all of them.

        `special` gives, for a micro-batch at the last segment, the inputs and outputs that are not in the stash and
        the events that they wait for.
        """
        models = step.prepared.compiled
        if models[0].head is not None and visit.index == len(models[0].stages) - 1:
            parts = [visit.program_of(model.stages[-1]) for model in step.prepared.rows]
            self._run(visit, step, submitted, 0, list(enumerate(parts)), special)
        else:
            for microbatch, compiled in enumerate(models):
                program = visit.program_of(compiled.stages[visit.index])
                self._run(visit, step, submitted, microbatch, [(microbatch, program)], special)
        self._send_buffers(visit, models[0].stages[visit.index], submitted)

    def _run(
        self,
        visit: _Visit,
        step: ForwardPass,
        submitted: SubmittedStep,
        microbatch: int,
        parts: Sequence[tuple[int, StageProgram]],
        special: Callable[[int], tuple[list[View], list[View], list[Event]]] | None,
    ) -> None:
        """Run one kernel, for a micro-batch.

        `parts` are what its program takes and makes in each row of the stash; those of one program, in its order.
        """
        slot, stash = visit.slot, step.prepared.stash
        assert slot is not None
        program, stage = parts[0][1], visit.stage
        assert program.kernel is not None
        accesses = [stash.access(Key(value, False), row, False) for row, part in parts for value in part.reads]
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
                    access = stash.access(Key(value, True), row, False)
                    accesses.append(access)
                    inputs += access.views
        written = [(row, value) for row, part in parts for value in part.writes]
        for row, value in written[len(outputs) :]:
            access = stash.access(Key(value, False), row, True)
            accesses.append(access)
            outputs += access.views
        outputs += [slot.parameters[len(stage.parameters) + index] for index in program.updates]
        if program.parameter_gradients:
            outputs += slot.gradients
        for row, part in parts:
            for value, added in zip(part.value_gradients, part.added, strict=True):
                access = stash.access(Key(value, True), row, True, added)
                accesses.append(access)
                outputs += access.views
        for access in accesses:
            waits += access.waits
        key = None
        if program.program.draws:
            key = RandomKey(step.seed, step.number, stage.segment.layer_index, microbatch)
        call = KernelCall(program.kernel, inputs, outputs, program.first if microbatch == 0 else program.later, key)
        calls = [call] if program.chunks is None else chunk_calls(program, call, accesses, microbatch == 0)
        for call in calls:
            event = slot.run(self._compute, call, waits, bool(program.parameter_gradients))
            submitted.compute.append(event)
            if step.trace is not None:
                # Layers built alike share a program, which has the first one's name.
                kind = program.program.name.rpartition(" ")[2]
                step.trace.mark("compute", f"{visit.content.name} {kind} {microbatch}", event)
        for access in accesses:
            access.finish(event)

    def _send_buffers(self, visit: _Visit, stage: Stage, submitted: SubmittedStep) -> None:
        """Send the buffers that a forward changed to the host. On a unified device they are there already."""
        updates = visit.program_of(visit.stage).updates
        if not updates or self._device.info.unified:
            return
        slot = visit.slot
        assert slot is not None
        targets: list[tuple[torch.Tensor, View]] = [
            (self._store[stage.buffers[index]], slot.parameters[len(stage.parameters) + index]) for index in updates
        ]
        sent = slot.send(self.drain_queue, targets)
        submitted.reads += sent
        self._store.changed(stage.buffers[index] for index in updates)
        for index in updates:
            self._store.updated[stage.buffers[index]] = sent[-1]
