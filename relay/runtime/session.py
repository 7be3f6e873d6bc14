"""A session: what one model has allocated on one device, and what a pass over the model is prepared from.

It turns compiled models into slots, stash and kernels, and checks beforehand that they fit. It knows no batches and no
hyperparameters (the trainer's), no order of visits (`relay.runtime.schedule`), and does not run or guard a pass
(`relay.runtime.run_step`, `relay.runtime.step_guard`). Invariant: memory is taken only after the whole requirement is
known to fit.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hal.device import NATIVE, Buffer, Device, View
from hal.errors import HalError, OutOfMemory
from hal.host import Host
from hal.slot import SlotContent
from relay.capture import Lowering, graphs_for
from relay.eps.gradient_plan import GradientPlan
from relay.eps.regions import GRADIENTS, Wanted
from relay.eps.server import ParameterServer
from relay.eps.store import LayerStore
from relay.errors import PartitionError
from relay.runtime.gradient_layout import gradient_plans, narrow_gradients
from relay.runtime.host_memory_check import Build, CountingHost, refuse_beyond, rehearse
from relay.runtime.memory_plan import plans_for, requirement_of, scalar_bytes, with_advice
from relay.runtime.residency.choice import Residents, SlotBytes, candidates, choose
from relay.runtime.residency.notice import note_residents
from relay.runtime.residency.slots import Slots
from relay.runtime.schedule import PreparedStep, Scalars, Scheduler
from relay.runtime.sparse_rows.sparse_rows import SparseRows
from relay.runtime.stages import CompiledModel, changing_buffers, gradient_fields, wanted_of, whole_tensors
from relay.runtime.stash import STASH_STATE, TIED_STATE, Stash, device_bytes, host_bytes
from relay.runtime.step_guard import StepGuard
from relay.runtime.ties.exact_ties import Decision, ExactTies
from relay.runtime.trace import Trace

logger = logging.getLogger("relay")

SAVED_BUFFERS = "buffers before the step"


class Session:
    """The device side of a trainer. Sizes are in bytes.

    Args:
        model: the model, whose tensors move into the store when the first pass is prepared.
        device: where the model runs.
        host: where memory of the host is accounted, and its tasks run.
        store: the parameters and buffers.
        server: takes in gradients and updates the store.
        slot_count: how many slots the device has.
        stash_location: "device" or "host".
        capacity: the device memory that may be used, or None.
        build: makes another store and server, to find out what the host must hold; None to skip that check.
        precision, state_dtype: the trainer's options, for advice in errors.
        resident_layers: how many segments stay on the device between visits, or "auto".
        resident_limit: the device memory that "auto" fills, where no `capacity` is given.
        exact_ties: whether gradients of tied weights are added in PyTorch's order: True, False, or "auto".
        sparse_rows: the trainer's option.
    """

    def __init__(
        self,
        model: nn.Module,
        device: Device,
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
    ) -> None:
        self.device = device
        self.host = host
        self.store = store
        self.server = server
        self.guard = StepGuard(host, store, server)
        self.scheduler: Scheduler | None = None
        self.trace: Trace | None = None
        self.capacity = capacity
        self.knows_every_layer = False
        self.rows = SparseRows(device.info, host, store, sparse_rows)
        self._model = model
        self._slot_count = slot_count
        self._stash_location = stash_location
        self._build = build
        self._precision = precision
        self._state_dtype = state_dtype
        self._resident_layers = resident_layers
        self._resident_limit = resident_limit
        self._noted: dict[bool, Residents] = {}
        self._chosen: weakref.WeakKeyDictionary[CompiledModel, Residents] = weakref.WeakKeyDictionary()
        limit = device.info.memory if capacity is None else capacity
        self._ties = ExactTies(
            exact_ties, slot_count, stash_location, limit, NATIVE in device.info.tags, logger.warning
        )
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
        Raises OutOfMemory, with what would reduce the need, before any memory is taken.
        """
        compiled = self._over_rows(compiled, training)
        contents = self.take_over(compiled, groups, training)
        ties = self._ties.decide(compiled) if training else Decision(list(compiled), frozenset())
        compiled = ties.compiled
        gradient_plans = self._gradient_plans(compiled[0]) if training else []
        distinct = list(dict.fromkeys(compiled))
        stash_plans = plans_for(compiled, self._stash_location, training)
        largest = max(contents, key=lambda content: content.size)
        requirement = requirement_of(compiled, stash_plans, self._slot_count, 0)
        slots = self.scheduler.slots if self.scheduler is not None else None
        ring = slots.ring if slots is not None else None
        slot_bytes = SlotBytes(
            contents, self._slot_count, (0, 0) if ring is None else (ring.parameter_size, ring.gradient_size),
            requirement.total + max(0, self._held_by_others() - requirement.workspace),
            slots.held if slots is not None else {},
        )  # fmt: skip
        residents = self._residents(compiled[0], slot_bytes, training)
        ring_sizes = slot_bytes.ring(residents)
        requirement = replace(
            requirement,
            slots=self._slot_count * sum(ring_sizes),
            resident=residents.weight_bytes + slot_bytes.gradients(residents),
            resident_count=len(residents.contents),
            most_resident=residents.most,
        )
        requirement.check(self.device.info.name, self.capacity, self._stash_location, len(compiled), largest.name)
        advice = requirement.advice(self._stash_location, len(compiled), largest.name)
        try:
            saved_buffers = self._memory_for_buffers(compiled[0]) if training else {}
            for model in distinct:
                model.compile(self.device)
            self.server.allocate(gradient_plans, groups, contents)
            scheduler = self._scheduler_with(*ring_sizes)
            if self._stash_key != (training, tuple(compiled)):
                self._free_stash()  # before residents take its room
            scheduler.slots.keep(residents.contents, residents.with_gradients)
            stash, scalars = self._stash_for(compiled, training)
        except OutOfMemory as failure:
            # The requirement is within the capacity, so something else holds memory too.
            self._free_stash()
            raise with_advice(failure, advice) from failure
        if self._resident_layers == "auto":
            self._noted[training] = note_residents(
                residents, self._noted.get(training), len(contents), requirement.resident, training
            )
        return PreparedStep(
            compiled, contents, gradient_plans, scheduler, stash, scalars, saved_buffers, advice, ties.loose
        )

    def _held_by_others(self) -> int:
        """Bytes of device memory in use beside slots, stash and scalars: workspace and constants of kernels."""
        own = self.scheduler.slots.size if self.scheduler is not None else 0
        own += device_bytes(self._stash.plans) if self._stash is not None else 0
        own += self._scalars.memory.size if self._scalars is not None else 0
        return self.device.memory().in_use - own

    def _residents(self, compiled: CompiledModel, slots: SlotBytes, training: bool) -> Residents:
        """The segments that stay on the device between visits: those of the last time, as long as they fit."""
        wanted = self._resident_layers
        limit = self._resident_limit if self.capacity is None else self.capacity
        if wanted == 0 or (wanted == "auto" and limit is None and self.device.info.unified):
            return Residents()  # a unified device works in host memory: nothing crosses a link
        if limit is None:
            limit = self.device.memory().capacity or self.device.info.memory
        known = self._chosen.get(compiled)
        if known is not None and slots.has(known) and (limit is None or slots.total(known) <= limit):
            return known
        order = candidates(compiled, slots.contents, training, slots.held)
        chosen = self._chosen[compiled] = choose(wanted, order, slots, limit)
        return chosen

    def take_over(
        self, compiled: Sequence[CompiledModel], groups: Sequence[Mapping[str, Any]], training: bool
    ) -> list[SlotContent]:
        """Move the model into the store, if it is not there, and lay out what the slots hold, segment by segment.

        Raises OutOfMemory, with the ledger and advice, where the host may not hold what the pass needs; nothing has
        moved then.
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

    def reopen(self, device: Device) -> None:
        """Continue on another device in place of one that is lost. What lives on the host is kept."""
        with suppress(HalError):  # a lost device may still take some of its memory back
            self._free_stash()
            self.device.close()
        self._stash = self._scalars = self.scheduler = None
        self.device = device
        self.host.follow(device.host())
        self.server.follow(device)
        self.reset()

    def reset(self) -> None:
        """Before a checkpoint is loaded: end what runs, discard what slots hold, and trust the state again."""
        self.guard.reset()
        if self.scheduler is not None:
            self.scheduler.slots.forget()

    def change_model(self, model: nn.Module, names: Mapping[str, str | None]) -> None:
        """The model has other layers: `names` maps former names of its tensors to new ones, None if removed.

        Slots and stash are allocated anew at the next step. Nothing may be running.
        """
        self._model = model
        self._checked.clear()
        self._chosen.clear()
        self._ties.clear()
        self.knows_every_layer = False
        self._free_device_memory()
        self.store.rename(names)
        self.rows.clear()
        self.store.adopt(model)
        for saved in self._saved_buffers.values():
            self.host.free(saved.view(-1), SAVED_BUFFERS)
        self._saved_buffers.clear()

    def close(self) -> None:
        """Free all memory, and close the host and the device."""
        self._free_device_memory()
        self.host.close()
        self.device.close()

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
        stash_plans = plans_for(compiled, self._stash_location, training)
        counting.ledger.add(STASH_STATE, torch.uint8, host_bytes(stash_plans))
        if tied := host_bytes(stash_plans, tied=True):
            counting.ledger.add(TIED_STATE, torch.uint8, tied)
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
        native = graphs_for(self.device.info)[0] is Lowering.NATIVE
        narrow: Sequence[Sequence[torch.dtype | None]] = [()] * len(compiled.stages)
        if microbatches == 1 and native and self.server.keeps_narrow_gradients:
            narrow = narrow_gradients(compiled, self._gradient_plans(compiled))
        return [
            store.content(stage.segment.name, group, gradients, self.server.deferred, of_stage)
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

    def _scheduler_with(self, parameter_size: int, gradient_size: int) -> Scheduler:
        """The scheduler, with slots of these sizes."""
        slots = self.scheduler.slots if self.scheduler is not None else None
        ring = slots.ring if slots is not None else None
        if ring is None or (parameter_size, gradient_size) != (ring.parameter_size, ring.gradient_size):
            self._free_stash()
            if slots is not None:
                slots.free()
            self.scheduler = None
            slots = Slots(self.device, self._slot_count, parameter_size, gradient_size)
            self.scheduler = Scheduler(self.device, self.host, self.store, self.server, slots)
        assert self.scheduler is not None
        return self.scheduler

    def _stash_for(self, compiled: Sequence[CompiledModel], training: bool) -> tuple[Stash, Scalars]:
        """The stash and the scalars for these shapes. There is one stash at a time."""
        key = (training, tuple(compiled))
        if self._stash is None or self._scalars is None or self._stash_key != key:
            self._free_stash()
            plans = plans_for(compiled, self._stash_location, training)
            values = [model.partition.values for model in compiled[0].rows(compiled)]
            losses = len(compiled) if compiled[0].head is None else 1
            self._scalars = _scalars(
                self.device.alloc(scalar_bytes(len(compiled)), "losses and seeds"), compiled[0], losses
            )
            queues = self.device.queue("stash in"), self.device.queue("stash out")
            self._stash = Stash(plans, self.device, self.host, *queues, values)
            self._stash_key = key
        return self._stash, self._scalars

    def _free_device_memory(self) -> None:
        self._free_stash()
        if self.scheduler is not None:
            self.scheduler.slots.free()
            self.scheduler = None

    def _free_stash(self) -> None:
        if self._stash is not None:
            self._stash.free()
            self._stash = None
        if self._scalars is not None:
            self._scalars.memory.free()
            self._scalars = None


def _scalars(memory: Buffer, compiled: CompiledModel, count: int) -> Scalars:
    """Views for `count` losses and as many gradient seeds, in the dtype of the loss."""
    dtype = compiled.loss_dtype

    def row(start: int) -> tuple[View, list[View]]:
        singles = [memory.view(start + number * dtype.itemsize, (), dtype) for number in range(count)]
        return memory.view(start, (count,), dtype), singles

    return Scalars(memory, *row(0), *row(memory.size // 2))
