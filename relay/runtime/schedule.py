"""The relay itself: every micro-batch of a step passes through a layer before the next layer takes its place.

Loop order is for layer: for micro-batch, forward to the last segment, which runs once with its backward, and back.
Weights cross the link once for each direction; a layer still in its slot at the turn is not sent again. The next
layers load while one computes; gradients drain and updates run behind. Everything is submitted from here and
ordered by events alone; nothing waits in here but the caller, at the end.

Invariant: which event orders which access is decided by the slot, the stash and the server, where the memory is;
this file only decides the order of visits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hal.device import Device, KernelCall, Queue, View
from hal.event import Event
from hal.host import Host
from hal.random import RandomKey
from hal.slot import DeviceSlot, SlotContent
from relay.eps.server import GradientPlan, ParameterServer, StepRecord
from relay.eps.store import LayerStore
from relay.runtime.stages import CompiledModel, Stage, StageProgram
from relay.runtime.stash import Key, Stash
from relay.runtime.trace import Trace


@dataclass
class Ran:
    """What a pass over the model submitted: events by kind, and the bytes of weights sent."""

    compute: list[Event] = field(default_factory=list)
    loads: list[Event] = field(default_factory=list)
    reads: list[Event] = field(default_factory=list)
    host: StepRecord = field(default_factory=StepRecord)
    weight_bytes: int = 0
    verdict: Event | None = None
    trace: Trace | None = None

    def mark(self, track: str, label: str, event: Event) -> None:
        """Note a call in the trace, if one is kept."""
        if self.trace is not None:
            self.trace.mark(track, label, event)

    def needed(self) -> list[Event]:
        """What must have ended before the step is known to be good, the verdict first; held updates may still run."""
        host = self.host
        first = [event for event in (self.verdict, host.decision) if event is not None]
        return [*first, *self.loads, *self.compute, *self.reads, *host.drains, *host.arrivals]


@dataclass(eq=False)
class ForwardPass:
    """What a pass over the model works on. `pieces[j]` are the stations for the shape of micro-batch j.

    `seed` and `number` (of the step) go into every random key; `losses[j]` is where micro-batch j's loss goes.
    """

    pieces: Sequence[CompiledModel]
    contents: Sequence[SlotContent]
    stash: Stash
    seed: int
    number: int
    losses: Sequence[View]


@dataclass(eq=False)
class TrainingStep(ForwardPass):
    """And what training needs besides: the gradients' seeds, and what is to happen with the gradients.

    `verdict` submits the judgement on the losses; `groups` are the optimizer's parameter groups as they stand, and
    `unscale` takes the loss scale out of a gradient.
    """

    plans: Sequence[GradientPlan]
    seeds: Sequence[View]
    seeds_ready: Event
    verdict: Callable[[Ran], Event]
    groups: Sequence[Mapping[str, Any]]
    unscale: float


class SlotRing:
    """The slots, and which segment goes to which: the least recently visited one makes room."""

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
        """A slot for each visit in order. A content keeps its slot for as long as nothing takes its place."""
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
        """After a failure: what the slots hold is not to be trusted."""
        for slot in self.slots:
            slot.content = None

    def settle(self) -> None:
        """Everything submitted has ended."""
        for slot in self.slots:
            slot.settle()

    def free(self) -> None:
        """Give the memory back."""
        for slot in self.slots:
            slot.free()


@dataclass
class _Visit:
    number: int
    one_pass: str
    content: SlotContent
    stage: Stage
    slot: DeviceSlot | None = None

    @property
    def visited(self) -> StageProgram:
        """What it runs."""
        one = self.stage.backward if self.one_pass == "backward" else self.stage.forward
        assert one is not None
        return one

    def changes_what_is_in(self, other: _Visit) -> bool:
        """Whether it changes a buffer that another segment holds too."""
        updates = self.visited.updates
        return any(self.stage.buffers[index] in other.stage.buffers for index in updates) if updates else False


class Relay:
    """Runs passes over the model: training steps and forward passes."""

    def __init__(self, device: Device, host: Host, store: LayerStore, server: ParameterServer, slots: SlotRing) -> None:
        self._device = device
        self._host = host
        self._store = store
        self._server = server
        self.slots = slots
        self._compute: Queue = device.queue("compute")
        self.load_queue: Queue = device.queue("load")
        self.drain_queue: Queue = device.queue("drain")

    def train(self, step: TrainingStep, ran: Ran) -> None:
        """Submit one training step, and note in `ran` what was."""
        compiled = step.pieces[0].stages
        last = len(compiled) - 1
        # Below the first segment with anything to differentiate there is nothing to go back for.
        visits = [_Visit(index, "forward", step.contents[index], compiled[index]) for index in range(last)]
        visits.append(_Visit(last, "backward", step.contents[last], compiled[last]))
        visits += [
            _Visit(index, "backward", step.contents[index], compiled[index])
            for index in reversed(range(last))
            if compiled[index].backward is not None
        ]

        def at_the_turn(microbatch: int) -> tuple[list[View], list[View], list[Event]]:
            return [step.seeds[microbatch]], [step.losses[microbatch]], [step.seeds_ready]

        for visit in self._relay(visits, ran):
            assert visit.slot is not None
            turning = visit.number == last
            self._visit(visit, step, ran, at_the_turn if turning else None)
            if turning:
                ran.verdict = step.verdict(ran)
            plan = step.plans[visit.number]
            if visit.one_pass == "backward" and plan.names:
                assert ran.verdict is not None
                self._server.collect(
                    plan, visit.slot, self.drain_queue, ran.verdict, step.groups, step.unscale, ran.host
                )
        gradients = [content.gradient_tensors for content in step.contents]
        self._server.conclude(step.plans, gradients, step.groups, step.unscale, ran.host)
        for event in ran.host.drains:
            ran.mark("drain", "gradients", event)
        for plan, event in zip(ran.host.updated, ran.host.updates, strict=True):
            ran.mark("update", plan, event)

    def forward(self, step: ForwardPass, ran: Ran) -> None:
        """Submit a forward pass alone, and note in `ran` what was."""
        last = len(step.contents) - 1

        def at_the_end(microbatch: int) -> tuple[list[View], list[View], list[Event]]:
            return [], [step.losses[microbatch]] if step.losses else [], []

        compiled = step.pieces[0].stages
        visits = [_Visit(index, "forward", content, compiled[index]) for index, content in enumerate(step.contents)]
        for visit in self._relay(visits, ran):
            self._visit(visit, step, ran, at_the_end if visit.number == last else None)

    def _relay(self, visits: list[_Visit], ran: Ran) -> Any:
        """Yield the visits in order, each with its slot loading, and the loads of the next ones submitted."""
        for visit, slot in zip(visits, self.slots.assign([visit.content for visit in visits]), strict=True):
            visit.slot = slot
        submitted = 0
        for position, visit in enumerate(visits):
            # As far ahead as there are slots, but never into a slot that a visit before it still needs.
            while submitted < min(len(visits), position + len(self.slots.slots)):
                coming = visits[submitted]
                assert coming.slot is not None
                before = [earlier for earlier in visits[position:submitted] if earlier.slot is coming.slot]
                if any(earlier.content is not coming.content for earlier in before):
                    break
                # Nor before a buffer that two segments share has come home from the one that changes it first.
                if any(earlier.changes_what_is_in(coming) for earlier in visits[position:submitted]):
                    break
                self._submit_load(coming.slot, coming.content, ran)
                submitted += 1
            yield visit

    def _submit_load(self, slot: DeviceSlot, content: SlotContent, ran: Ran) -> None:
        if slot.content is content and slot.version == self._store.version:
            return
        ran.loads += slot.load(content, self._store.version, self.load_queue, self._store.ready(content))
        ran.weight_bytes += content.size
        for event in slot.loaded:
            ran.mark("load", content.name, event)

    def _visit(
        self,
        visit: _Visit,
        step: ForwardPass,
        ran: Ran,
        special: Callable[[int], tuple[list[View], list[View], list[Event]]] | None,
    ) -> None:
        """Run every micro-batch through one segment."""
        slot = visit.slot
        assert slot is not None
        stash = step.stash
        for microbatch, compiled in enumerate(step.pieces):
            stage = compiled.stages[visit.number]
            one: StageProgram | None = stage.backward if visit.one_pass == "backward" else stage.forward
            assert one is not None
            assert one.kernel is not None
            accesses = [stash.access(Key(value, False), microbatch, False) for value in one.reads]
            inputs = [*slot.parameters, *[view for access in accesses for view in access.views]]
            waits: list[Event] = []
            outputs: list[View] = []
            if special is not None:
                more_inputs, more_outputs, waits = special(microbatch)
                inputs += more_inputs
                outputs += more_outputs
                waits = list(waits)
            else:
                for value in one.seeds:
                    access = stash.access(Key(value, True), microbatch, False)
                    accesses.append(access)
                    inputs.append(access.view)
            for value in one.writes[len(outputs) :]:
                access = stash.access(Key(value, False), microbatch, True)
                accesses.append(access)
                outputs += access.views
            outputs += [slot.parameters[len(stage.parameters) + index] for index in one.updates]
            if one.parameter_gradients:
                outputs += slot.gradients
            for value, added in zip(one.value_gradients, one.added, strict=True):
                access = stash.access(Key(value, True), microbatch, True, added)
                accesses.append(access)
                outputs.append(access.view)
            for access in accesses:
                waits += access.waits
            event = slot.run(
                self._compute,
                KernelCall(
                    one.kernel,
                    inputs,
                    outputs,
                    one.first if microbatch == 0 else one.later,
                    RandomKey(step.seed, step.number, stage.segment.layer_index, microbatch)
                    if one.program.draws
                    else None,
                ),
                waits,
                bool(one.parameter_gradients),
            )
            for access in accesses:
                access.finish(event)
            ran.compute.append(event)
            if ran.trace is not None:
                # Layers built alike share a program, which bears the first one's name.
                kind = one.program.name.rpartition(" ")[2]
                ran.mark("compute", f"{visit.content.name} {kind} {microbatch}", event)
        self._send_buffers(visit, step.pieces[0].stages[visit.number], ran)

    def _send_buffers(self, visit: _Visit, stage: Stage, ran: Ran) -> None:
        """Buffers that a forward changed go home; on a unified device they never left."""
        one = visit.visited
        if not one.updates or self._device.info.unified:
            return
        slot = visit.slot
        assert slot is not None
        targets: list[tuple[torch.Tensor, View]] = [
            (self._store[stage.buffers[index]], slot.parameters[len(stage.parameters) + index]) for index in one.updates
        ]
        sent = slot.send(self.drain_queue, targets)
        ran.reads += sent
        for index in one.updates:
            self._store.updated[stage.buffers[index]] = sent[-1]
