"""A session: what one model has allocated on its devices, and what a pass over the model is prepared from.

It turns compiled models into slots, stash and kernels, and checks beforehand that they fit. It knows no batches and no
hyperparameters (the trainer's), no order of visits (`relay.runtime.schedule`), and does not run or guard a pass
(`relay.runtime.run_step`, `relay.runtime.step_guard`). Invariant: memory is taken only after the whole requirement is
known to fit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from hal.device import NATIVE, Device
from hal.errors import HalError, OutOfMemory
from hal.host import Host
from hal.slot.layout import SlotContent
from relay.eps.gradient_plan import GradientPlan
from relay.eps.regions import GRADIENTS, Wanted
from relay.eps.server import ParameterServer
from relay.eps.store import LayerStore
from relay.errors import PartitionError
from relay.runtime.gradient_layout import gradient_plans, narrow_gradients
from relay.runtime.host_memory_check import Build, CountingHost, refuse_beyond, rehearse
from relay.runtime.lanes.grouping import Grouping
from relay.runtime.lanes.lane import Lane, LaneOptions
from relay.runtime.lanes.visit_plan import VisitPlan
from relay.runtime.memory_plan import plans_for, programs_of, scalar_bytes, with_advice
from relay.runtime.on_host.calls import STATE as VALUES_ON_HOST
from relay.runtime.on_host.calls import HostKernel, runs_on_host
from relay.runtime.residency.choice import refuse_more_than
from relay.runtime.scalars import Scalars, scalars_in
from relay.runtime.schedule import PreparedStep, Scheduler
from relay.runtime.sparse_rows.sparse_rows import SparseRows
from relay.runtime.stages import CompiledModel, changing_buffers, gradient_fields, wanted_of, whole_tensors
from relay.runtime.stash.memory import Stash
from relay.runtime.stash.plan import STASH_STATE, TIED_STATE, StashPlan, device_bytes, host_bytes
from relay.runtime.step_guard import StepGuard
from relay.runtime.ties.exact_ties import Decision, ExactTies
from relay.runtime.trace import Trace

logger = logging.getLogger("relay")

SAVED_BUFFERS = "buffers before the step"


class Session:
    """The side of the devices of a trainer. Sizes are in bytes.

    Args:
        model: the model, whose tensors move into the store when the first pass is prepared.
        devices: where the model runs.
        host: where memory of the host is accounted, and its tasks run.
        store: the parameters and buffers.
        server: takes in gradients and updates the store.
        slot_count: how many slots each device has.
        stash_location: "device" or "host".
        capacity: the device memory that may be used, or None.
        build: makes another store and server, to find out what the host must hold; None to skip that check.
        precision, state_dtype: the trainer's options, for advice in errors.
        resident_layers: how many segments stay on the device between visits, or "auto".
        resident_limit: the device memory that "auto" fills, where no `capacity` is given.
        exact_ties: whether gradients of tied weights are added in PyTorch's order: True, False, or "auto".
        sparse_rows, layers_per_visit: the trainer's options.
        device_speeds: how fast the devices are beside each other; None for alike.
        caution: takes sentences on what keeps devices idle; the log by default.
    """

    def __init__(
        self,
        model: nn.Module,
        devices: Sequence[Device],
        host: Host,
        store: LayerStore,
        server: ParameterServer,
        slot_count: int,
        stash_location: str,
        capacity: int | None,
        build: Build | None = None,
        precision: str = "fp32",
        state_dtype: str = "fp32",
        resident_layers: int | str = 0,
        resident_limit: int | None = None,
        exact_ties: str | bool = "auto",
        sparse_rows: bool | str = False,
        layers_per_visit: int | str | Sequence[int] = "auto",
        device_speeds: Sequence[float] | None = None,
        caution: Callable[[str], object] = logger.warning,
    ) -> None:
        infos = [device.info for device in devices]
        self._native = all(NATIVE in info.tags for info in infos)
        self._options = LaneOptions(slot_count, stash_location, capacity, resident_layers, resident_limit)
        self.lanes = self._lanes_on(devices)
        self.host = host
        self.store = store
        self.server = server
        self.guard = StepGuard(host, store, server)
        self.scheduler: Scheduler | None = None
        self.trace: Trace | None = None
        self.capacity = capacity
        self.knows_every_layer = False
        self.rows = SparseRows(min(infos, key=lambda info: NATIVE in info.tags), host, store, sparse_rows)
        self._model = model
        self._slot_count, self._stash_location = slot_count, stash_location
        self._build = build
        self._precision, self._state_dtype = precision, state_dtype
        known = [info.memory for info in infos if info.memory is not None]
        limit = min(known, default=None) if capacity is None else capacity
        room = limit if resident_limit is None else resident_limit
        self._grouping = Grouping(
            slot_count, stash_location, room, resident_layers, layers_per_visit, device_speeds, caution
        )
        self._ties = ExactTies(exact_ties, slot_count, stash_location, limit, self._native, logger.warning)
        self._checked: set[tuple[int, bool]] = set()
        self._saved_buffers: dict[str, torch.Tensor] = {}
        self._stash: Stash | None = None
        self._stash_key: object = None
        self._scalars: Scalars | None = None

    def prepare(
        self, compiled: Sequence[CompiledModel], groups: Sequence[Mapping[str, Any]], training: bool
    ) -> PreparedStep:
        """Compile and allocate what a pass over micro-batches of these shapes needs.

        `compiled[j]` is the compiled model for micro-batch j. What is there already from earlier passes is used again.
        Raises OutOfMemory, with what would reduce it, and ValueError, before any memory is taken.
        """
        refuse_more_than(len(compiled[0].stages), self._options.resident_layers if training else 0)
        compiled = self._over_rows(compiled, training)
        contents = self.take_over(compiled, groups, training)
        ties = self._ties.decide(compiled) if training else Decision(list(compiled), frozenset())
        compiled = ties.compiled
        gradient_plans = self._gradient_plans(compiled[0]) if training else []
        visits = self._plan_visits(compiled, training)
        stash_plans = plans_for(compiled, self._stash_location, training, visits)
        updater = self.server.updater
        parts = updater.programs(gradient_plans, contents, groups)
        needs = [
            lane.need(compiled, contents, stash_plans, visits, training, self._held(lane), parts)
            for lane in self.lanes
        ]
        advice = ""
        for lane, need in reversed(list(zip(self.lanes, needs, strict=True))):
            own = [contents[index] for index in visits.segments(lane.number)]
            largest = max(own, key=lambda content: content.size).name if own else "none"
            location, count = self._stash_location, len(compiled)
            need.requirement.check(lane.device.info.name, self.capacity, location, count, largest)
            advice = need.requirement.advice(location, count, largest)
        try:
            saved_buffers = self._memory_for_buffers(compiled[0]) if training else {}
            for model in dict.fromkeys(compiled):
                self._compile(model, visits)
            for lane in self.lanes:
                updater.compile(gradient_plans, contents, groups, lane.device)
            self.server.allocate(gradient_plans, groups, contents)
            for lane, need in zip(self.lanes, needs, strict=True):
                if not lane.has_slots(need):
                    self._free_stash()
                    updater.submit_deferred()  # these use the slots
                    lane.allocate(need)
            if self._stash_key != (training, tuple(compiled), visits):
                self._free_stash()  # before residents take its room
            for lane, need in zip(self.lanes, needs, strict=True):
                if not lane.has_residents(need):
                    updater.submit_deferred()
                lane.keep_residents(need, training)
            stash, scalars = self._stash_for(compiled, stash_plans, visits, training)
        except OutOfMemory as failure:
            # The requirement is within the capacity, so something else holds memory too.
            self._free_stash()
            raise with_advice(failure, advice) from failure
        self.scheduler = self.scheduler or Scheduler(self.lanes, self.store, self.server)
        return PreparedStep(
            compiled, contents, gradient_plans, self.scheduler, self.lanes, visits, stash, scalars, saved_buffers,
            advice, ties.loose, [need.requirement.workspace for need in needs],
        )  # fmt: skip

    @property
    def device(self) -> Device:
        """The first device."""
        return self.lanes[0].device

    def _lanes_on(self, devices: Sequence[Device]) -> list[Lane]:
        return [Lane(device, number, self._options, len(devices) > 1) for number, device in enumerate(devices)]

    def _plan_visits(self, compiled: Sequence[CompiledModel], training: bool) -> VisitPlan:
        """Which lane runs which segment: the fastest plan whose slots fit."""
        return self._grouping.plan(compiled, training, len(self.lanes))

    def _compile(self, model: CompiledModel, visits: VisitPlan) -> None:
        """Make the kernels of the pass, each on its lane's device, or on the host what that cannot run."""
        for group in visits.groups:
            device = self.lanes[group.lane].device
            for program in (program for visit in group.visits for program in programs_of(model, visit)):
                if not runs_on_host(program.program, device.info):
                    program.kernel = device.compile(program.program)
                elif program.kernel is None:
                    program.kernel = HostKernel(program.program, self.host)

    def _held(self, lane: Lane) -> int:
        """Bytes that stash and scalars take on a lane's device."""
        held = device_bytes(self._stash.plans, lane.number) if self._stash is not None else 0
        return held + (self._scalars.memory[lane.number].size if self._scalars is not None else 0)

    def take_over(
        self, compiled: Sequence[CompiledModel], groups: Sequence[Mapping[str, Any]], training: bool
    ) -> list[SlotContent]:
        """Move the model into the store, if it is not there, and lay out what the slots hold, segment by segment.

        Raises OutOfMemory, with the ledger and advice, before anything moves, where the host may not hold it all.
        """
        compiled = self._over_rows(compiled, training)
        compiled = self._checked_ties(compiled, groups) if training else compiled
        self._check_host(compiled, groups, training)
        wanted = wanted_of(compiled[0])
        whole = whole_tensors(compiled[0], wanted)
        if not all(self.store.holds(tensor) for group in whole for tensor in group):
            self.store.take_over(self._model, whole)
        for name in changing_buffers(compiled[0]) if training else ():
            if name in self.store.aliases or any(name == alias.owner for alias in self.store.aliases.values()):
                raise PartitionError(
                    f"The buffer {name!r} is changed by the forward and shares memory with another tensor of the "
                    "model, so a step would change both. Give it memory of its own with .clone()."
                )
        self.store.take_edits()
        return self._lay_out(self.store, compiled[0], wanted, len(compiled))

    def reopen(self, devices: Sequence[Device], kept: Sequence[int]) -> None:
        """Continue on other devices in place of those that are lost. What lives on the host is kept.

        `kept` are the numbers of the devices that they replace, among those that the session began with.
        """
        with suppress(HalError):  # a lost device may still take some of its memory back
            self._free_stash()
        for lane in self.lanes:
            with suppress(HalError):
                lane.device.close()
        self._stash = self._scalars = self.scheduler = None
        self.lanes = self._lanes_on(devices)
        self._grouping.keep(kept)
        self.host.follow(self.device.host())
        self.server.follow(self.device)
        self.reset()

    def reset(self) -> None:
        """Before a checkpoint is loaded: end what runs, discard what slots hold, and trust the state again."""
        self.guard.reset()
        for lane in self.lanes:
            lane.settle()
        self.forget_slots()

    def forget_slots(self) -> None:
        """Discard what slots hold, so that all weights are sent again."""
        for lane in self.lanes:
            if lane.slots is not None:
                lane.slots.forget()

    def change_model(self, model: nn.Module, names: Mapping[str, str | None]) -> None:
        """The model has other layers: `names` maps former names of its tensors to new ones, None if removed.

        Slots and stash are allocated anew at the next step. Nothing may be running.
        """
        self._model = model
        self._checked.clear()
        for lane in self.lanes:
            lane.forget_choice()
        self._ties.clear()
        self._grouping.forget()
        self.knows_every_layer = False
        self._free_device_memory()
        self.rows.clear()
        self.store.rename(names)
        self.store.adopt(model)
        for saved in self._saved_buffers.values():
            self.host.free(saved.view(-1), SAVED_BUFFERS)
        self._saved_buffers.clear()

    def close(self) -> None:
        """Free all memory, and close the host and the devices."""
        self._free_device_memory()
        self.host.close()
        for lane in self.lanes:
            lane.device.close()

    def _over_rows(self, compiled: Sequence[CompiledModel], training: bool) -> list[CompiledModel]:
        """The compiled models, over rows of the tables for which that pays."""
        self.store.find_aliases(self._model)
        return self.rows.over_rows(compiled, training)

    def _checked_ties(
        self, compiled: Sequence[CompiledModel], groups: Sequence[Mapping[str, Any]]
    ) -> list[CompiledModel]:
        """The compiled models with the gradients of tied weights in PyTorch's order, as far as there is room."""
        decided = self._ties.decide(compiled)
        try:
            self._check_host(decided.compiled, groups, True)
        except OutOfMemory:
            other = self._ties.give_up(compiled, "the host has no room to keep them for each micro-batch")
            if other is None:
                raise
            return other.compiled
        return decided.compiled

    def _check_host(
        self, compiled: Sequence[CompiledModel], groups: Sequence[Mapping[str, Any]], training: bool
    ) -> None:
        capacity = self.host.memory().capacity
        first = compiled[0]
        kind = id(first), len(compiled) > 1
        if capacity is None or self._build is None or kind in self._checked:
            return
        counting = CountingHost(self.host.worker)
        wanted = wanted_of(first)
        plans = self._gradient_plans(first) if training else []

        def lay_out(store: LayerStore) -> list[SlotContent]:
            return self._lay_out(store, first, wanted, len(compiled))

        rehearsed = whole_tensors(first, wanted)
        store = rehearse(self._model, self.store, counting, self._build, rehearsed, lay_out, plans, groups)
        beyond = self.store.gradients.beyond(store.gradients)
        if beyond:
            counting.ledger.add(GRADIENTS, torch.uint8, beyond)
        for name in changing_buffers(first) if training else ():
            counting.alloc(store[name].numel(), store[name].dtype, SAVED_BUFFERS)
        stash_plans = plans_for(compiled, self._stash_location, training, self._plan_visits(compiled, training))
        counting.ledger.add(STASH_STATE, torch.uint8, host_bytes(stash_plans))
        if tied := host_bytes(stash_plans, tied=True):
            counting.ledger.add(TIED_STATE, torch.uint8, tied)
        if run_here := sum(model.bytes_on_host(self.device.info) for model in dict.fromkeys(compiled)):
            counting.ledger.add(VALUES_ON_HOST, torch.uint8, run_here)
        refuse_beyond(
            capacity, counting.ledger, self._precision, self._state_dtype, self._stash_location, self.server.deferred,
            any(value.parts and not value.tied for value in first.partition.values), self.store.splits,
        )  # fmt: skip
        self._checked.add(kind)

    def _gradient_plans(self, compiled: CompiledModel) -> list[GradientPlan]:
        """What is done with each segment's gradients."""
        return gradient_plans(compiled, self.store.owner, self.rows.rows_of, self.server.deferred)

    def _lay_out(
        self, store: LayerStore, compiled: CompiledModel, wanted: Sequence[Sequence[Wanted]], microbatches: int
    ) -> list[SlotContent]:
        fields = gradient_fields(compiled)
        for table in compiled.tables:
            store.add_rows(self.rows.rows_of(table))
        narrow: Sequence[Sequence[torch.dtype | None]] = [()] * len(compiled.stages)
        if microbatches == 1 and self._native and self.server.keeps_narrow_gradients:
            narrow = narrow_gradients(compiled, self._gradient_plans(compiled))
        return [
            store.content(stage.segment.name, group, gradients, self.server.keeps_gradients, of_stage)
            for stage, group, gradients, of_stage in zip(compiled.stages, wanted, fields, narrow, strict=True)
        ]

    def _memory_for_buffers(self, compiled: CompiledModel) -> dict[str, torch.Tensor]:
        """Host memory for a copy of each buffer that a step's forward changes, by name."""
        names = changing_buffers(compiled)
        for name in names:
            buffer = self.store[name]
            if name not in self._saved_buffers:
                flat = self.host.alloc(buffer.numel(), buffer.dtype, SAVED_BUFFERS)
                self._saved_buffers[name] = flat.view(buffer.shape)
        return {name: self._saved_buffers[name] for name in names}

    def _stash_for(
        self, compiled: Sequence[CompiledModel], plans: Sequence[StashPlan], visits: VisitPlan, training: bool
    ) -> tuple[Stash, Scalars]:
        """The stash and the scalars for these shapes. There is one stash at a time."""
        key = (training, tuple(compiled), visits)
        if self._stash is None or self._scalars is None or self._stash_key != key:
            self._free_stash()
            values = [model.partition.values for model in compiled[0].rows(compiled)]
            losses = len(compiled) if compiled[0].head is None else 1
            size = scalar_bytes(len(compiled))
            memory = [lane.device.alloc(size, "losses and seeds") for lane in self.lanes]
            self._scalars = scalars_in(memory, memory[visits.turn], compiled[0], losses)
            self._stash = Stash(plans, [lane.stash for lane in self.lanes], self.host, values, visits.groups_several)
            self._stash_key = key
        return self._stash, self._scalars

    def _free_device_memory(self) -> None:
        self._free_stash()
        for lane in self.lanes:
            lane.free()
        self.scheduler = None

    def _free_stash(self) -> None:
        if self._stash is not None:
            self._stash.free()
            self._stash = None
        if self._scalars is not None:
            for memory in self._scalars.memory:
                memory.free()
            self._scalars = None
