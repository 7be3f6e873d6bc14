"""A session: one model's stay on one device. What is allocated, prepared and waited for, in one place.

It turns stations into slots, stash and kernels, checks beforehand that they fit, and settles what became of what
was submitted. It knows no batches and no hyperparameters (the trainer's), and no order of visits (the schedule's).
Invariant: memory is taken only after the whole requirement is known to fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from hal.device import Buffer, Device, View
from hal.errors import HalError, OutOfMemory
from hal.event import Event
from hal.host import Host
from hal.slot import DeviceSlot, SlotContent
from relay.eps.server import GradientPlan, ParameterServer, plan_gradients
from relay.eps.store import GRADIENTS, LayerStore, Wanted
from relay.errors import RelayError
from relay.runtime.host_memory_check import Build, CountingHost, refuse_beyond, rehearse
from relay.runtime.interrupts import DeferredInterrupt
from relay.runtime.memory_plan import Requirement, kernel_workspace, plans_for, scalar_bytes, slot_sizes
from relay.runtime.schedule import Ran, Relay, SlotRing
from relay.runtime.stages import CompiledModel, changing_buffers, gradient_fields, wanted_of
from relay.runtime.stash import STASH_STATE, Stash, device_bytes, host_bytes, kept_bytes
from relay.runtime.trace import Trace
from relay.runtime.watchdog import Watchdog, waited_for

KEPT_BUFFERS = "buffers before the step"
QUEUES = ("compute", "load", "drain", "stash in", "stash out")


class Session:
    """The device side of a trainer. Sizes in bytes."""

    def __init__(
        self,
        model: nn.Module,
        device: Device,
        host: Host,
        store: LayerStore,
        server: ParameterServer,
        slot_count: int,
        stash_place: str,
        capacity: int | None,
        build: Build | None = None,
        precision: str = "fp32",
        state_dtype: str = "fp32",
    ) -> None:
        self.device = device
        self.host = host
        self.store = store
        self.server = server
        self.relay: Relay | None = None
        self.trace: Trace | None = None
        self.broken: BaseException | None = None
        self.stall_timeout: float | None = None
        self.knows_every_layer = False
        self.pending: list[Event] = []
        self.transfers: list[Event] = []
        self._kept_buffers: dict[str, torch.Tensor] = {}
        self._interrupts: list[DeferredInterrupt] = []
        self._advice = ""
        self._model = model
        self._slot_count = slot_count
        self._stash_place = stash_place
        self.capacity = capacity
        self._build = build
        self._precision = precision
        self._state_dtype = state_dtype
        self._rehearsed: set[int] = set()
        self._stash: Stash | None = None
        self._stash_key: object = None
        self._scalars: Buffer | None = None

    # -- making ready -----------------------------------------------------------------------------------------

    def check_host(self, pieces: Sequence[CompiledModel], groups: Sequence[Mapping[str, Any]], training: bool) -> None:
        """Raise OutOfMemory, with the ledger and advice, where a pass needs more of the host than it may have."""
        capacity = self.host.memory().capacity
        compiled = pieces[0]
        if capacity is None or self._build is None or id(compiled) in self._rehearsed:
            return
        counting = CountingHost(self.host.worker)
        wanted = wanted_of(compiled)
        plans = self.gradient_plans(compiled) if training else []

        def lay_out(store: LayerStore) -> list[SlotContent]:
            return self._lay_out(store, compiled, wanted)

        store = rehearse(self._model, counting, self._build, wanted, lay_out, plans, groups)
        if self.store.homes_beyond(store):
            counting.ledger.add(GRADIENTS, torch.uint8, self.store.homes_beyond(store))
        for name in changing_buffers(compiled) if training else ():
            counting.alloc(store[name].numel(), store[name].dtype, KEPT_BUFFERS)
        stash = host_bytes(plans_for(pieces, self._stash_place, training))
        counting.ledger.add(STASH_STATE, torch.uint8, stash)
        refuse_beyond(
            capacity, counting.ledger, self._precision, self._state_dtype, self._stash_place, self.server.held,
            any(value.parts for value in compiled.partition.values),
        )  # fmt: skip
        self._rehearsed.add(id(compiled))

    def contents(self, compiled: CompiledModel) -> list[SlotContent]:
        """What the slots will hold, segment by segment; on first use the model moves into the store."""
        wanted = wanted_of(compiled)
        self.store.check(self._model)
        if not all(self.store.holds(item) for group in wanted for item in group):
            self.store.take_over(self._model, wanted)
        self.store.take_edits()
        return self._lay_out(self.store, compiled, wanted)

    def _lay_out(
        self, store: LayerStore, compiled: CompiledModel, wanted: Sequence[Sequence[Wanted]]
    ) -> list[SlotContent]:
        fields = gradient_fields(compiled)
        return [
            store.content(stage.segment.name, group, gradients, self.server.held)
            for stage, group, gradients in zip(compiled.stages, wanted, fields, strict=True)
        ]

    def gradient_plans(self, compiled: CompiledModel) -> list[GradientPlan]:
        """What happens to each segment's gradients."""
        segments = [(stage.segment.name, stage.gradients) for stage in compiled.stages]
        plans = plan_gradients(segments)
        for stage in compiled.stages:
            plans[stage.segment.name].presence = stage.gradient_presence
        return [plans[name] for name, _ in segments]

    def make_ready(
        self,
        pieces: Sequence[CompiledModel],
        contents: Sequence[SlotContent],
        plans: Sequence[GradientPlan],
        groups: Sequence[Mapping[str, Any]],
        purpose: str,
    ) -> tuple[Relay, Stash]:
        """Compile and allocate for these shapes. Raises OutOfMemory, with what would help, before taking anything."""
        distinct = list(dict.fromkeys(pieces))
        parameter_size, gradient_size = slot_sizes(contents)
        ring = self.relay.slots if self.relay is not None else None
        if ring is not None:
            parameter_size = max(parameter_size, ring.parameter_size)
            gradient_size = max(gradient_size, ring.gradient_size)
        grows = ring is None or (parameter_size, gradient_size) != (ring.parameter_size, ring.gradient_size)
        stash_plans = plans_for(pieces, self._stash_place, purpose == "train")
        largest = max(contents, key=lambda content: content.size)
        requirement = Requirement(
            slots=self._slot_count * (parameter_size + gradient_size),
            slot_count=self._slot_count,
            stash=device_bytes(stash_plans),
            workspace=max(kernel_workspace(one) for one in distinct),
            scalars=scalar_bytes(len(pieces)),
            kept=kept_bytes(stash_plans),
            layers=max(stage.segment.layers for stage in pieces[0].stages),
        )
        requirement.check(self.device.info.name, self.capacity, self._stash_place, len(pieces), largest.name)
        self._advice = requirement.advice(self._stash_place, len(pieces), largest.name)
        try:
            for one in distinct:
                one.compile(self.device)
            self.server.allocate(plans, groups, gradient_size)
            if grows:
                self._free_stash()
                if ring is not None:
                    ring.free()
                self.relay = None
                slots = SlotRing(self.device, self._slot_count, parameter_size, gradient_size)
                self.relay = Relay(self.device, self.host, self.store, self.server, slots)
            assert self.relay is not None
            return self.relay, self._stash_for(pieces, purpose)
        except OutOfMemory as failure:
            # Somebody else holds memory too: the capacity was enough by itself.
            self._free_stash()
            raise self._advised(failure) from failure

    def scalars(self, count: int, dtype: torch.dtype) -> tuple[View, list[View], View, list[View]]:
        """Places for the losses and for the gradient seeds: each as one row, and one by one."""
        assert self._scalars is not None
        memory, size = self._scalars, dtype.itemsize

        def row(start: int) -> tuple[View, list[View]]:
            singles = [memory.view(start + number * size, (), dtype) for number in range(count)]
            return memory.view(start, (count,), dtype), singles

        losses, seeds = row(0), row(memory.size // 2)
        return losses[0], losses[1], seeds[0], seeds[1]

    # -- running ----------------------------------------------------------------------------------------------

    @contextmanager
    def running(self, stash: Stash, first: Sequence[Event], buffers: Sequence[str] = ()) -> Iterator[Ran]:
        """Around the submission of a pass: waits for all that it needs, whatever happens, and raises the first error.

        If the step failed or was skipped, `buffers` are put back as `keep_buffers` found them; if updates of a failed
        step were applied, or held ones of the step before failed, `broken` says so from then on. An interrupt is left
        for `take_interrupt`.
        """
        ran = Ran(trace=self.trace)
        error: BaseException | None = None
        with (
            DeferredInterrupt() as interrupt,
            Watchdog(self.stall_timeout, lambda: waited_for(ran, stash, self.pending, self._slots(), self.device)),
        ):
            try:
                yield ran
            except BaseException as failure:
                error = failure
            try:
                error = error or _wait_all([*first, *ran.needed(), *stash.transfers])
                if error is not None:
                    # What was submitted when submitting failed may have been noted nowhere.
                    self._settle_queues()
                    _wait_all(ran.host.updates)
            except KeyboardInterrupt as given_up:  # asked for again and again: what still runs is left to itself
                self.broken = given_up
                raise
        if interrupt.count:
            self._interrupts.append(interrupt)
        assert self.relay is not None
        self.relay.slots.settle()
        self.server.settle()
        self.transfers = list(stash.transfers)
        stash.settle()
        if error is not None or ran.host.skipped:
            for name in buffers:
                self.store[name].copy_(self._kept_buffers[name])
        if error is not None:
            self.relay.slots.forget()
            # Updates of the step before may still have been behind, and may be what failed.
            pending, self.pending = self.pending, []
            behind = _wait_all(pending)
            if behind is not None or ran.host.touched:
                self.broken = behind or error
        if error is not None or not self.server.held:
            # All updates have ended; one that failed must not fail the next step too.
            self.store.updated.clear()
        if error is not None:
            if isinstance(error, OutOfMemory):
                raise self._advised(error) from error
            # A task's error comes wrapped by its queue; ours says by itself what to do.
            raise error.__cause__ if isinstance(error.__cause__, RelayError) else error

    def keep_buffers(self, compiled: CompiledModel) -> list[str]:
        """Keep a copy of the buffers that a step's forward changes, should the step not be applied. Their names."""
        names = changing_buffers(compiled)
        for name in names:
            buffer = self.store[name]
            if name not in self._kept_buffers:
                flat = self.host.alloc(buffer.numel(), buffer.dtype, KEPT_BUFFERS)
                self._kept_buffers[name] = flat.view(buffer.shape)
            self._kept_buffers[name].copy_(buffer)
        return names

    def take_interrupt(self) -> None:
        """Let an interrupt of the last pass happen, once what belongs to that pass is settled."""
        interrupts, self._interrupts = self._interrupts, []
        for interrupt in interrupts:
            interrupt.deliver()

    def synchronize(self) -> None:
        """Wait for the updates that still run behind. Raises their first error."""
        pending, self.pending = self.pending, []
        error = _wait_all(pending)
        if error is not None:
            self.broken = error
            raise error

    def reopen(self, device: Device) -> None:
        """Go on with another device in place of one that is lost. What lives on the host stays where it is."""
        with suppress(HalError):  # what a lost device still takes back
            self._free_stash()
            self.device.close()
        self._stash = self._scalars = self.relay = None
        self.device = device
        self.host.follow(device.host())
        self.server.follow(device)
        self.recover()

    def _settle_queues(self) -> None:
        """Wait for everything that any queue was given; calls on a queue run in order."""
        if self._scalars is not None:
            place = self._scalars.view(0, (1,), torch.uint8)
            for name in QUEUES:
                try:
                    self.device.queue(name).fill(place, 0.0).wait()
                except Exception:
                    continue  # a device that is lost has nothing left to wait for
        _wait_all([self.host.run(_nothing, (), "end of a failed step")])

    def _slots(self) -> list[DeviceSlot]:
        return self.relay.slots.slots if self.relay is not None else []

    def _advised(self, failure: OutOfMemory) -> OutOfMemory:
        """The same refusal, with what would reduce the need."""
        if failure.advice or not self._advice:
            return failure
        return OutOfMemory(failure.what, failure.requested, failure.in_use, failure.capacity, self._advice)

    def recover(self) -> None:
        """Before a checkpoint is loaded: nothing runs, nothing that slots hold is trusted, and what broke is past."""
        pending, self.pending = self.pending, []
        _wait_all(pending)
        self.store.updated.clear()
        self.store.version += 1
        if self.relay is not None:
            self.relay.slots.forget()
        self.broken = None

    def change_model(self, model: nn.Module, names: Mapping[str, str | None]) -> None:
        """The model has other layers: its tensors are called otherwise, None for those that are gone.

        Slots and stash are taken anew at the next step. Nothing may be under way.
        """
        self._model = model
        self._rehearsed.clear()
        self.knows_every_layer = False
        self._free_device_memory()
        self.store.rename(names)
        for kept in self._kept_buffers.values():
            self.host.free(kept.view(-1), KEPT_BUFFERS)
        self._kept_buffers.clear()

    def close(self) -> None:
        """Give everything back."""
        self._free_device_memory()
        self.host.close()
        self.device.close()

    def _stash_for(self, pieces: Sequence[CompiledModel], purpose: str) -> Stash:
        """The stash for these shapes; one lives at a time."""
        key = (purpose, tuple(pieces))
        if self._stash is None or self._stash_key != key:
            self._free_stash()
            stash_plans = plans_for(pieces, self._stash_place, purpose == "train")
            values = [one.partition.values for one in pieces]
            self._scalars = self.device.alloc(scalar_bytes(len(pieces)), "losses and seeds")
            queues = self.device.queue("stash in"), self.device.queue("stash out")
            self._stash = Stash(stash_plans, self.device, self.host, *queues, values)
            self._stash_key = key
        return self._stash

    def _free_device_memory(self) -> None:
        self._free_stash()
        if self.relay is not None:
            self.relay.slots.free()
            self.relay = None

    def _free_stash(self) -> None:
        if self._stash is not None:
            self._stash.free()
            self._stash = None
        if self._scalars is not None:
            self._scalars.free()
            self._scalars = None


def _wait_all(events: Sequence[Event]) -> BaseException | None:
    """Wait for all; the first error."""
    error: BaseException | None = None
    for event in events:
        try:
            event.wait()
        except Exception as failure:
            error = error or failure
    return error


def _nothing() -> None:
    """The task that ends when all before it have."""
