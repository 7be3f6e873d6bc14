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
from dataclasses import dataclass
from typing import Any

import torch

from hal.device import Buffer, Device, KernelCall, Queue, View
from hal.event import Event
from hal.host import Host
from hal.random import RandomKey
from hal.slot import DeviceSlot, SlotContent
from relay.eps.server import GradientPlan, ParameterServer
from relay.eps.step_record import SubmittedStep
from relay.eps.store import LayerStore
from relay.runtime.head.chunk_calls import chunk_calls
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
        compiled: the compiled model for the shape of each micro-batch.
        contents: what the slots hold, segment by segment.
        gradient_plans: what is done with each segment's gradients; empty for a forward pass alone.
        scheduler: submits the pass.
        stash: the values between segments.
        scalars: the losses and the gradient seeds.
        saved_buffers: memory for the buffers that the pass changes, by name, in case the step is not applied.
        advice: what would reduce the need of device memory.
    """

    compiled: Sequence[CompiledModel]
    contents: Sequence[SlotContent]
    gradient_plans: Sequence[GradientPlan]
    scheduler: Scheduler
    stash: Stash
    scalars: Scalars
    saved_buffers: Mapping[str, torch.Tensor]
    advice: str


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


class SlotRing:
    """The slots, and which segment goes to which: the least recently visited slot is used next."""

    def __init__(self, device: Device, count: int, parameter_size: int, gradient_size: int) -> None:
        self.parameter_size = parameter_size
        self.gradient_size = gradient_size
        self.slots: list[DeviceSlot] = []
        try:
            for number in range(count):
                self.slots.append(DeviceSlot(device, number, parameter_size, gradient_size))
        except BaseException:
            self.free()
            raise

    def assign(self, visits: Sequence[SlotContent]) -> list[DeviceSlot]:
        """A slot for each visit in order. A content keeps its slot until another content needs it."""
        holds = {slot: slot.content for slot in self.slots}
        order = sorted(self.slots, key=lambda slot: slot.content is not None)
        assigned = []
        for content in visits:
            slot = next((slot for slot in self.slots if holds[slot] is content), order[0])
            holds[slot] = content
            order.remove(slot)
            order.append(slot)
            assigned.append(slot)
        return assigned

    def forget(self) -> None:
        """Discard what the slots hold, as after a failure."""
        for slot in self.slots:
            slot.content = None

    def settle(self) -> None:
        """Forget the events of the slots. Everything submitted must have ended."""
        for slot in self.slots:
            slot.settle()

    def free(self) -> None:
        """Free the device memory."""
        for slot in self.slots:
            slot.free()


@dataclass
class _Visit:
    index: int
    backward: bool
    content: SlotContent
    stage: Stage
    slot: DeviceSlot | None = None

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

    def __init__(self, device: Device, host: Host, store: LayerStore, server: ParameterServer, slots: SlotRing) -> None:
        self._device = device
        self._host = host
        self._store = store
        self._server = server
        self.slots = slots
        self._compute: Queue = device.queue("compute")
        self.load_queue: Queue = device.queue("load")
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
        gradients = [content.gradient_tensors for content in contents]
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
        loaded = 0
        for position, visit in enumerate(visits):
            # As far ahead as there are slots, but never into a slot that an earlier visit still needs.
            while loaded < min(len(visits), position + len(self.slots.slots)):
                coming = visits[loaded]
                assert coming.slot is not None
                before = [earlier for earlier in visits[position:loaded] if earlier.slot is coming.slot]
                if any(earlier.content is not coming.content for earlier in before):
                    break
                # Nor before a buffer that two segments share has come home from the one that changes it first.
                if any(earlier.changes_buffer_of(coming) for earlier in visits[position:loaded]):
                    break
                self._submit_load(coming.slot, coming.content, submitted, trace)
                loaded += 1
            yield visit

    def _submit_load(
        self, slot: DeviceSlot, content: SlotContent, submitted: SubmittedStep, trace: Trace | None
    ) -> None:
        if slot.content is content and slot.version == self._store.version:
            return
        submitted.loads += slot.load(content, self._store.version, self.load_queue, self._store.ready(content))
        submitted.weight_bytes += content.size
        if trace is not None:
            for event in slot.loaded:
                trace.mark("load", content.name, event)

    def _visit(
        self,
        visit: _Visit,
        step: ForwardPass,
        submitted: SubmittedStep,
        special: Callable[[int], tuple[list[View], list[View], list[Event]]] | None,
    ) -> None:
        """Run every micro-batch through one segment.

        `special` gives, for a micro-batch at the last segment, the inputs and outputs that are not in the stash and
        the events that they wait for.
        """
        slot = visit.slot
        assert slot is not None
        stash = step.prepared.stash
        for microbatch, compiled in enumerate(step.prepared.compiled):
            stage = compiled.stages[visit.index]
            program = visit.program_of(stage)
            assert program.kernel is not None
            accesses = [stash.access(Key(value, False), microbatch, False) for value in program.reads]
            inputs = [*slot.parameters, *[view for access in accesses for view in access.views]]
            waits: list[Event] = []
            outputs: list[View] = []
            if special is not None:
                more_inputs, more_outputs, waits = special(microbatch)
                inputs += more_inputs
                outputs += more_outputs
                waits = list(waits)
            else:
                for value in program.seeds:
                    access = stash.access(Key(value, True), microbatch, False)
                    accesses.append(access)
                    inputs.append(access.view)
            for value in program.writes[len(outputs) :]:
                access = stash.access(Key(value, False), microbatch, True)
                accesses.append(access)
                outputs += access.views
            outputs += [slot.parameters[len(stage.parameters) + index] for index in program.updates]
            if program.parameter_gradients:
                outputs += slot.gradients
            for value, added in zip(program.value_gradients, program.added, strict=True):
                access = stash.access(Key(value, True), microbatch, True, added)
                accesses.append(access)
                outputs.append(access.view)
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
        self._send_buffers(visit, step.prepared.compiled[0].stages[visit.index], submitted)

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
        for index in updates:
            self._store.updated[stage.buffers[index]] = sent[-1]
