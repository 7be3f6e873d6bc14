"""One training step of a described model on a described machine: the real session, schedule and parameter server.

A session is opened on a simulated device with numerics off, `relay.runtime.schedule` submits the step, and the virtual
clock and the ledgers give the result. Nothing of the relay is imitated here. The figures that follow from the result
are worked out in `relay.simulation.figures`.

Invariant: memory is measured without a limit and compared afterwards, so that a run that does not fit has a complete
ledger.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hal import registry
from hal.errors import Unavailable
from hal.spec import Machine
from hal.spec.timeline import Timeline, VirtualBackend, joined
from relay.eps.bind_optimizer import bind
from relay.eps.server import Clipping, ParameterServer
from relay.eps.step_record import SubmittedStep
from relay.eps.store import LayerStore
from relay.optim.optimizers import AdamW
from relay.optim.param_groups import split_into_groups
from relay.options import OPTIONS, STEP_OPTIONS, check_master_weights
from relay.precision import COMPUTE
from relay.runtime import run_step
from relay.runtime.compiling.capture_segments import recomputing
from relay.runtime.head.choose_chunks import HeadChunks, alike
from relay.runtime.lanes.lane import Lane
from relay.runtime.lanes.open_devices import refuse_unified
from relay.runtime.session import Session
from relay.runtime.sparse_rows.sparse_rows import row_counts
from relay.runtime.stages import CompiledModel
from relay.runtime.stash.plan import TIED_STATE, device_bytes, saved_bytes, tied_bytes
from relay.runtime.ties.exact_ties import ExactTies
from relay.simulation.described.master_weights import as_trained
from relay.simulation.described.meta_model import MetaModel
from relay.simulation.described.transformer_shape import ModelShape, ShapeError
from relay.simulation.host_cache import HostCache, HostState
from relay.simulation.whole_batch import compiled_models

UNLIMITED = 10**18
WORKSPACE = "workspace of kernels"


_ALLOWED = {**OPTIONS, **STEP_OPTIONS}


@dataclass(frozen=True)
class RunShape:
    """The options of a training run, with the names and the limits that `relay.Trainer` has.

    With `loss_scale="dynamic"` all gradients of a step in fp16 wait on the host until they are known to be finite; with
    a power of two, or "fixed" for 65536, each layer is updated at once. `sequence` is the number of tokens in a
    sequence, `batch` the number of sequences in a step. Raises ValueError where the trainer would.
    """

    seq: int = 1024
    batch: int = 8
    microbatches: int = 4
    precision: str = "bf16"
    state_dtype: str = "fp32"
    stash: str = "device"
    slots: int = 2
    clip_grad_norm: float | None = None
    loss_scale: str | float = "dynamic"
    exact_ties: bool | str = "auto"
    layers_per_slot: int = 1
    recompute: bool | int = True
    resident_layers: int | str = 0
    layers_per_visit: Any = "auto"
    master_weights: str = "fp32"
    head_chunk_tokens: int | str | None = None
    mlp_chunk_tokens: int | None = None
    sparse_rows: bool | str = "auto"
    loss_over: str = "auto"
    optimizer: Any = field(default_factory=AdamW)

    def __post_init__(self) -> None:
        """Check each value against the trainer's option of that name; ValueError for one that is not allowed."""
        for name, value in vars(self).items():
            _ALLOWED[name].check(value)
        check_master_weights(self.master_weights, self.precision)

    @property
    def tokens(self) -> int:
        """The number of tokens in a step."""
        return self.batch * self.seq

    @property
    def defers_updates(self) -> bool:
        """Whether updates wait for the last gradient of the step."""
        return self.clip_grad_norm is not None or (self.precision == "fp16" and self.loss_scale == "dynamic")

    def pieces(self) -> list[int]:
        """The number of sequences in each micro-batch, cut as the trainer cuts a batch."""
        if self.batch < self.microbatches:
            raise ShapeError(
                f"A batch of {self.batch} cannot be cut into {self.microbatches} micro-batches. Give a larger batch, "
                "or fewer micro-batches."
            )
        step = -(-self.batch // self.microbatches)
        return [min(step, self.batch - start) for start in range(0, self.batch, step)]


@dataclass(frozen=True)
class Memory:
    """Bytes on the device by purpose, with the allocator's rounding, and on the host by state and dtype.

    Of several devices they are those of the fullest one.

    `page_locked` is the part of the host memory that crosses the link, in whole pages. `parameters` is the number of
    elements in all parameters, `resident_layers` that of segments that stay on the device.
    """

    device: dict[str, int]
    host: list[tuple[str, str, int]]
    page_locked: int
    parameters: int
    resident_layers: int = 0

    @property
    def device_total(self) -> int:
        """The bytes on the device."""
        return sum(self.device.values())

    @property
    def slots(self) -> int:
        """The bytes of the slots on the device, those of resident layers among them."""
        return sum(size for what, size in self.device.items() if what.startswith(("slots", "resident")))

    @property
    def host_total(self) -> int:
        """The bytes on the host."""
        return sum(size for _, _, size in self.host)


@dataclass(frozen=True)
class Step:
    """A simulated step.

    `weight_bytes`, `gradient_bytes` and `optimizer_bytes` are what crossed the links of weights, of gradients, and,
    both ways together, of what devices compute of updates.

    Of several devices `timelines` has each one's, and `timeline` is that of all: see `joined`.
    """

    timelines: tuple[Timeline, ...]
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int = 0

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The step in virtual time."""
        return joined(self.timelines)


class SimulatedRun:
    """A model on a simulated machine, ready to run steps."""

    def __init__(
        self,
        shape: ModelShape | MetaModel,
        run: RunShape,
        machine: Machine,
        host_cache: HostCache | None = None,
        capacity: int | None = None,
    ) -> None:
        """`host_cache` holds host states of earlier runs of this shape; `close` puts this run's into it.

        `capacity` is the device memory that `resident_layers="auto"` fills, and by which `exact_ties="auto"` and
        `head_chunk_tokens="auto"` decide; that of the machine if not given. The attribute `notes` has the message of
        `exact_ties`, and `run` the options as they take effect: as many micro-batches as the batch is cut into, no more
        layers a slot than the model has, True for `recompute` where the number covers all segments (the last segment,
        the head, never repeats its forward), the positions of a chunk of the head, or None where it is whole, and for
        `loss_over` "batch" where the head runs over the whole batch.
        """
        compute = COMPUTE[run.precision]
        shape = as_trained(shape, run.master_weights, compute)
        sizes = run.pieces()
        self._machines = machine.each
        if capacity is None and not machine.device.unified:
            capacity = min(int(one.device["memory"] - one.device["reserved"]) for one in self._machines)
        self.notes: list[str] = []
        head = HeadChunks(run.head_chunk_tokens, layers=run.mlp_chunk_tokens, required=True)
        if run.head_chunk_tokens == "auto":
            head = HeadChunks("auto", capacity, run.slots, run.stash, len(sizes), run.mlp_chunk_tokens)
        options = run.seq, compute, run.layers_per_slot, run.recompute, run.loss_over

        def compiled(head: HeadChunks) -> list[CompiledModel]:
            return compiled_models(shape, sizes, *options, head)

        ties = ExactTies(run.exact_ties, run.slots, run.stash, capacity, True, self.notes.append)
        self._compiled = ties.decide(alike(compiled(head), lambda size: compiled(replace(head, tokens=size)))).compiled
        partition = self._compiled[0].partition
        segments = len(partition.segments) - partition.leading
        chunks = partition.segments[-1].chunks
        most = max(1, segments - 1)
        count = recomputing(run.recompute, most)
        repeats = True if count >= most else count or False
        layers = min(run.layers_per_slot, max(1, shape.layers))
        whole = self._compiled[0].head is not None
        over = "batch" if whole else run.loss_over
        run = self.run = replace(
            run, microbatches=len(sizes), layers_per_slot=layers, recompute=repeats, loss_over=over
        )
        run = self.run = replace(run, head_chunk_tokens=None if chunks is None else chunks.size)
        unlimited = [replace(one, device=one.device.with_values(memory=float(UNLIMITED))) for one in self._machines]
        self._devices = _simulator().open_machines(unlimited, False, machine.one_link)
        refuse_unified([one.device.name for one in self._machines], [device.info for device in self._devices])
        self._host_cache = HostCache() if host_cache is None else host_cache
        self._state_key, self._state = self._host_state(shape)
        state = self._state
        parts = state.model, self._devices, state.host, state.store, state.server
        self._session = Session(
            *parts, run.slots, run.stash, None, resident_layers=run.resident_layers, resident_limit=capacity,
            exact_ties=False,  # decided above
            sparse_rows=run.sparse_rows, layers_per_visit=run.layers_per_visit,
            device_speeds=[one.device.sustained(run.precision) for one in self._machines],
            caution=self.notes.append,
        )  # fmt: skip
        self._session.guard.defer_updates = True
        self._prepared = self._session.prepare(self._compiled, state.groups, training=True)
        if len(self._devices) > 1:
            visits = self._prepared.visits
            self.run = replace(run, layers_per_visit=visits.sizes)
        self._inputs = [_inputs(row) for row in self._prepared.rows]
        self._weights = [1.0] if whole else [size / sum(sizes) for size in sizes]
        self._number = 0
        self._keeps_calls = False

    def _host_state(self, shape: ModelShape | MetaModel) -> tuple[Hashable, HostState]:
        """The host state of this run and its key in the cache."""
        run, device = self.run, self._devices[0]
        scaled = run.precision == "fp16" and run.loss_scale == "dynamic"
        decides = (
            shape, run.seq, run.state_dtype, run.master_weights, run.clip_grad_norm, scaled, device.info.unified
        )  # fmt: skip
        rows = tuple(sorted(row_counts(self._compiled, device.info, run.sparse_rows).items()))
        key = (*decides, self._host_cache.layout(self._compiled[0]), rows)
        state = self._host_cache.take(key, run.optimizer)
        if state is not None:
            state.follow(device)
            return key, state
        host = device.host(UNLIMITED)
        model = shape.model(run.seq)
        order = [name for name, _ in model.named_parameters()]
        defaults = run.optimizer.defaults()
        groups, group_of = split_into_groups(model, run.optimizer.param_groups(model, ()), defaults)
        store = LayerStore(host, splits=run.master_weights == "split")
        server = ParameterServer(
            device,
            host,
            store,
            bind(run.optimizer, host, store, run.state_dtype, computes=False),
            group_of,
            order,
            Clipping(run.clip_grad_norm),
            scaled,
        )
        return key, HostState(model, run.optimizer, host, store, server, [{**defaults, **group} for group in groups])

    def memory(self) -> Memory:
        """The memory that the run needs, which is known before any step."""
        rows, resident = max((self._memory_of(lane) for lane in self._prepared.lanes), key=lambda found: found[2])[:2]
        ledger = self._session.host.ledger.rows()
        host = [(state, str(dtype).removeprefix("torch."), size) for state, dtype, size in ledger]
        locked = self._session.host.page_locked
        return Memory(rows, host, locked, self._state.parameters, resident)

    def _memory_of(self, lane: Lane) -> tuple[dict[str, int], int, int]:
        """The bytes on a lane's device by purpose, how many segments are resident there, and all bytes."""
        plans, number, slots = self._prepared.stash.plans, lane.number, lane.slots
        assert slots is not None
        count = len(slots.ring.slots)
        rows = {
            "slots: weights": count * slots.ring.parameter_size,
            "slots: gradients": count * slots.ring.gradient_size,
            **({"resident layers: weights": slots.resident_weights} if self.run.resident_layers else {}),
            **({"resident layers: gradients": slots.resident_gradients} if self.run.resident_layers else {}),
            "stash of activations": device_bytes(plans, number)
            - saved_bytes(plans, number)
            - tied_bytes(plans, number),
            "saved tensors for backward": saved_bytes(plans, number),
            TIED_STATE: tied_bytes(plans, number),
            WORKSPACE: self._prepared.workspaces[number],
        }
        peak = lane.device.memory().peak
        rows["scalars and rounding"] = peak - sum(rows.values())
        return rows, len(slots.held), peak

    def record(self) -> None:
        """Record a span of every call from now on."""
        for device in self._devices:
            device.record()

    def keep_calls(self) -> None:
        """Keep all calls of the steps to come, so that a step can be timed again. Before the first."""
        self._devices[0].keep_calls()
        self._keeps_calls = True

    def retimed(self, machine: Machine) -> float:
        """Seconds of the step that was made, if the same calls ran on a machine with other rates."""
        before, after = self._devices[0].retimed(machine.each, machine.one_link)
        return after - before

    def step(self) -> Step:
        """A step in the steady state. Where updates are deferred that is the third step, else the first.

        Where layers are resident, their first transfer belongs to no step, so one more is made before.
        """
        resident = any(lane.slots is not None and lane.slots.held for lane in self._prepared.lanes)
        for _ in range(2 if self.run.defers_updates else 1 if resident else 0):
            self._step()
        before = [device.timeline() for device in self._devices]
        if self._keeps_calls:
            self._devices[0].mark()
        submitted = self._step()
        if self._keeps_calls:
            self._devices[0].mark()
        timelines = tuple(device.timeline().since(then) for device, then in zip(self._devices, before, strict=True))
        visited = zip(self._prepared.contents, self._prepared.gradient_plans, strict=True)
        gradients = sum(content.gradient_size for content, plan in visited if plan.names)
        return Step(timelines, submitted.weight_bytes, gradients, submitted.optimizer_bytes)

    def close(self) -> None:
        """Close the simulated devices and put the host state into the cache."""
        self._session.guard.synchronize()
        self._session.close()
        self._host_cache.give(self._state_key, self._state)

    def _step(self) -> SubmittedStep:
        submitted = run_step.train_step(
            self._session, self._prepared, self._inputs, self._weights, self._state.groups, 0, self._number, 1.0,
            "apply",
        )  # fmt: skip
        self._session.guard.deliver_interrupts()
        self._number += 1
        return submitted


def _inputs(compiled: CompiledModel) -> list[torch.Tensor]:
    """The tensors of a micro-batch, without memory."""
    partition = (compiled.whole or compiled).partition
    values = [partition.values[value] for value in partition.inputs]
    return [torch.empty(value.shape, dtype=value.dtype, device="meta") for value in values]


@functools.cache
def _simulator() -> VirtualBackend:
    backend = registry.backend("sim")
    if not isinstance(backend, VirtualBackend):
        raise Unavailable("The backend registered as 'sim' is not a simulator. Install the distribution again.")
    return backend
