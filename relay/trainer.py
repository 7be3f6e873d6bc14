"""The trainer: the public face of the relay.

It brings the parts together (partition, stations, store, server, schedule) and keeps what belongs to a run: the
step count, the seed, the optimizer's hyperparameters. It holds no scheduling and no arithmetic. Invariant: a call
that raises has either changed nothing, or the trainer says that it can no longer be trusted (`InconsistentState`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import nn

from hal import registry
from hal.device import Buffer, View
from hal.event import Event
from hal.host import Ledger
from hal.memory import parse_size
from hal.slot import SlotContent
from relay.batches import Batch, count_tokens, take_apart, weigh, without_empty
from relay.eps.optimizers import AdamW, RelayOptimizer, optimizer_spec
from relay.eps.server import GradientPlan, ParameterServer, plan_gradients
from relay.eps.store import LayerStore
from relay.errors import InconsistentState, NonFiniteLoss, PartitionError, RelayError
from relay.metrics import Metrics, total_elapsed
from relay.partition import partition_list, partition_model
from relay.schedule import Ran, Relay, SlotRing
from relay.stash import Key, Stash
from relay.stations import Stations, build_stations
from relay.workspace import Requirement, kernel_workspace, plan_for, slot_sizes


class Trainer:
    """Trains a model by relaying its layers through a device.

    `model` is an `nn.Module` whose output has `.loss`, called as `model(**batch)`; or a list of modules, each called
    with the output of the one before, with `loss(output, targets)` giving the mean over the samples. The trainer
    takes the model's parameters over: they become views of its store, and always show the current weights.

    `device` is a device string (`relay devices` lists them), `capacity` a limit in bytes (or `"256MB"`) on the
    device memory used. `microbatches` is how many pieces a batch is cut into, `slots` how many layers the device
    holds at once, `stash` whether boundary activations stay on the `device` or stream to the `host`. `seed` decides
    every dropout mask.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        loss: Callable[..., torch.Tensor] | None = None,
        device: str = "cpu",
        optimizer: Any = None,
        microbatches: int = 4,
        precision: str = "fp32",
        stash: str = "device",
        clip_grad_norm: float | None = None,
        slots: int = 2,
        state_dtype: str = "fp32",
        capacity: int | str | None = None,
        seed: int = 0,
    ) -> None:
        self._whole = isinstance(model, nn.Module)
        self._modules: list[nn.Module] = [] if isinstance(model, nn.Module) else list(model)
        self._check_arguments(loss, microbatches, precision, stash, clip_grad_norm, slots, state_dtype, seed)
        self._model: nn.Module = model if isinstance(model, nn.Module) else nn.Sequential(*self._modules)
        if not any(parameter.requires_grad for parameter in self._model.parameters()):
            raise PartitionError("The model has no parameter that requires a gradient: there is nothing to train.")
        self._loss = loss
        self._microbatches = microbatches
        self._stash_place = stash
        self._slot_count = slots
        self._seed = seed
        self._step = 0
        self._broken: BaseException | None = None
        self._capacity = parse_size(capacity) if capacity is not None else None
        spec = optimizer_spec(AdamW() if optimizer is None else optimizer)
        trainable = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self.optimizer = RelayOptimizer(trainable, spec.defaults())
        self._device = registry.open(device, self._capacity)
        self._host = self._device.host()
        self._store = LayerStore(self._host)
        bound = spec.bind(self._host, self._store)
        self._server = ParameterServer(self._device, self._host, self._store, bound)
        self._relay: Relay | None = None
        self._cache: dict[Any, Stations] = {}
        self._stash: Stash | None = None
        self._stash_key: Any = None
        self._scalars: Buffer | None = None
        self._kept_buffers: dict[str, torch.Tensor] = {}
        self._transfers: list[Event] = []
        self.plain_bytes = 0

    def _check_arguments(
        self,
        loss: Any,
        microbatches: int,
        precision: str,
        stash: str,
        clip_grad_norm: float | None,
        slots: int,
        state_dtype: str,
        seed: int,
    ) -> None:
        if self._whole and loss is not None:
            raise ValueError("loss= goes with a list of modules; a whole model gives its loss in output.loss")
        if not self._whole and (not self._modules or loss is None):
            raise ValueError("a list of modules needs at least one module, and loss=callable(output, targets)")
        if not all(isinstance(module, nn.Module) for module in self._modules):
            raise TypeError("model must be an nn.Module or a list of nn.Module")
        if precision != "fp32" or state_dtype != "fp32" or clip_grad_norm is not None:
            raise ValueError(
                f"precision={precision!r}, state_dtype={state_dtype!r}, clip_grad_norm={clip_grad_norm!r}: this "
                "version trains in fp32 with fp32 state and without clipping"
            )
        if stash not in ("device", "host"):
            raise ValueError(f"stash={stash!r} is not 'device' or 'host'")
        for name, value in (("microbatches", microbatches), ("slots", slots)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        if not isinstance(seed, int) or not 0 <= seed < 2**64:
            raise ValueError(f"seed={seed!r} must be a whole number from 0 to 2**64 - 1")

    # -- training ---------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> Metrics:
        """One optimizer step on a batch: `(inputs, targets)` for a list of modules, a mapping for a whole model.

        Raises BatchError, PartitionError, CaptureError, OutOfMemory before anything runs; NonFiniteLoss after the
        forward, with nothing applied.
        """
        self._check_usable()
        start = perf_counter()
        pieces, weights, stations = self._ready(batch)
        contents, plans = self._contents(stations[0]), self._gradient_plans(stations[0])
        relay = self._prepare_device(stations, contents, plans)
        stash = self._stash_for(stations, "train")
        self._device.reset_peak()
        loss_dtype = stations[0].partition.values[stations[0].loss or 0].dtype
        loss_row, loss_views, seed_row, seed_views = self._scalar_views(len(weights), loss_dtype)
        seeds_on_host = torch.tensor(weights, dtype=loss_dtype)
        losses_on_host = torch.zeros(len(weights), dtype=loss_dtype)
        seeds_ready = relay.load_queue.write(seed_row, seeds_on_host)
        self._bring(stash, stations, pieces)

        def verdict(ran: Ran) -> Event:
            read = relay.drain_queue.read(losses_on_host, loss_row, ran.compute[-len(weights) :])
            ran.reads.append(read)

            def check() -> None:
                if not bool(torch.isfinite(losses_on_host).all()):
                    raise NonFiniteLoss(float((losses_on_host * seeds_on_host).sum()), self._step)

            return self._host.run(check, [read], "verdict on the loss")

        group = {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}
        buffers = self._keep_buffers(stations[0])
        with self._finishing(stash, [seeds_ready], buffers) as ran:
            relay.train(
                ran,
                stations,
                contents,
                plans,
                stash,
                self._seed,
                self._step,
                seed_views,
                loss_views,
                verdict,
                group,
                seeds_ready,
            )
        loss = sum((losses_on_host * seeds_on_host).tolist())
        return self._metrics(ran, stash, pieces, loss, start)

    def evaluate(self, batch: Any) -> Metrics:
        """The loss of a batch, forward only, in eval mode. Nothing changes."""
        with self._eval_mode():
            start = perf_counter()
            pieces, weights, stations = self._ready(batch, training=False)
            ran, stash, losses = self._forward(pieces, stations)
            assert losses is not None
            loss = sum((losses * torch.tensor(weights, dtype=losses.dtype)).tolist())
            return self._metrics(ran, stash, pieces, loss, start)

    def predict(self, batch: Any) -> Any:
        """The model's output for a batch (for a list of modules: for its inputs), forward only, in eval mode.

        Tensors with the batch's length along dimension 0 are put together again; of others the first piece's.
        """
        with self._eval_mode():
            pieces = take_apart(batch, self._whole, 1, needs_targets=False)
            size = pieces.sizes[0]
            pieces = take_apart(batch, self._whole, min(self._microbatches, size), needs_targets=False)
            stations = [self._stations(pieces, number, False, True) for number in range(len(pieces.pieces))]
            partition = stations[0].partition
            outputs: list[list[torch.Tensor]] = []

            def read_back(stash: Stash, relay: Relay, ran: Ran) -> None:
                for microbatch, one in enumerate(stations):
                    values = [one.partition.values[value] for value in one.partition.results]
                    row = [torch.empty(value.shape, dtype=value.dtype) for value in values]
                    outputs.append(row)
                    for value, target in zip(values, row, strict=True):
                        access = stash.access(Key(value.index, False), microbatch, False)
                        ran.reads.append(relay.drain_queue.read(target, access.view, access.waits))

            self._forward(pieces, stations, read_back)
            together = [
                torch.cat(rows) if rows[0].dim() and [len(row) for row in rows] == pieces.sizes else rows[0]
                for rows in zip(*outputs, strict=True)
            ]
            return partition.result_tree.fill(together)

    def prepare(self, batch: Any) -> None:
        """Partition, capture, compile and allocate for batches like this one, and change nothing else.

        `ledger` and `plain_bytes` are known after it.
        """
        self._check_usable()
        _, _, stations = self._ready(batch)
        self._prepare_device(stations, self._contents(stations[0]), self._gradient_plans(stations[0]))
        self._stash_for(stations, "train")

    # -- weights and figures ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's parameters and buffers under its own names (a list's: those of `nn.Sequential(*list)`).

        The tensors are the store's own, as in PyTorch: the next step changes them.
        """
        return self._model.state_dict()

    def sync_to(self, model: nn.Module) -> None:
        """Copy the weights into another model with the same names."""
        model.load_state_dict(self.state_dict())

    @property
    def ledger(self) -> Ledger:
        """What the host holds, in bytes by state and dtype."""
        return self._host.ledger

    @property
    def device_name(self) -> str:
        """The device's string."""
        return self._device.info.name

    def close(self) -> None:
        """Stop the device's queues and give its memory back. The weights stay."""
        self._free_stash()
        if self._relay is not None:
            self._relay.slots.free()
            self._relay = None
        self._host.close()
        self._device.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # -- making ready -----------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise InconsistentState(
                f"An earlier step failed while layers were being updated ({self._broken}), so some layers have taken "
                "that step and others have not. Load a checkpoint, or build a new trainer."
            ) from self._broken

    def _ready(self, batch: Any, training: bool = True) -> tuple[Batch, list[float], list[Stations]]:
        """The batch in pieces with their weights, and the stations for each piece."""
        pieces = take_apart(batch, self._whole, self._microbatches, needs_targets=True)
        first = self._stations(pieces, 0, training, False)
        if not first.partition.has_loss:
            raise PartitionError(
                f"The output of {type(self._model).__name__} has no loss for this batch. A whole model must return "
                "an object with .loss: does the batch hold labels?"
            )
        pieces, weights = without_empty(pieces, weigh(pieces, first.partition.loss_weight))
        stations = [self._stations(pieces, number, training, False) for number in range(len(pieces.pieces))]
        for other in stations[1:]:
            if other is not stations[0] and other.signature() != stations[0].signature():
                raise PartitionError(
                    "The model takes another path for the last, smaller micro-batch than for the others, so they "
                    "cannot share a step. Make the batch a multiple of microbatches."
                )
        return pieces, weights, stations

    def _stations(self, batch: Batch, number: int, training: bool, results: bool) -> Stations:
        modes = tuple(module.training for module in self._model.modules())
        trainable = tuple(parameter.requires_grad for parameter in self._model.parameters())
        key = (batch.signature(number), training, results, modes, trainable)
        stations = self._cache.get(key)
        if stations is None:
            tensors = batch.pieces[number]
            if self._whole:
                partition = partition_model(self._model, tensors, batch.tree)
            else:
                inputs, targets = tensors[: batch.input_count], tensors[batch.input_count :]
                partition = partition_list(
                    self._modules, self._loss, inputs, batch.tree, targets, batch.target_tree
                )
            stations = self._cache[key] = build_stations(partition, training, results)
        return stations

    def _contents(self, stations: Stations) -> list[SlotContent]:
        names = [[*station.parameters, *station.buffers] for station in stations.stations]
        if any(name not in self._store for group in names for name in group):
            self._store.take_over(self._model, names)
        return [
            self._store.content(station.segment.name, [*station.parameters, *station.buffers], station.gradients)
            for station in stations.stations
        ]

    def _gradient_plans(self, stations: Stations) -> list[GradientPlan]:
        segments = [(station.segment.name, station.gradients) for station in stations.stations]
        plans = plan_gradients(segments)
        return [plans[name] for name, _ in segments]

    def _prepare_device(
        self, stations: Sequence[Stations], contents: Sequence[SlotContent], plans: Sequence[GradientPlan]
    ) -> Relay:
        parameter_size, gradient_size = slot_sizes(contents)
        distinct = list(dict.fromkeys(stations))
        ring = self._relay.slots if self._relay is not None else None
        grows = ring is None or parameter_size > ring.parameter_size or gradient_size > ring.gradient_size
        if ring is not None:
            parameter_size = max(parameter_size, ring.parameter_size)
            gradient_size = max(gradient_size, ring.gradient_size)
        if not self.plain_bytes:
            self.plain_bytes = self._plain_bytes(stations[0])
        plan = plan_for(distinct[0], self._stash_place, training=stations[0].stations[-1].backward is not None)
        largest = max(contents, key=lambda content: content.size)
        Requirement(
            slots=self._slot_count * (parameter_size + gradient_size),
            slot_count=self._slot_count,
            stash=plan.device_bytes(len(stations)),
            workspace=max(kernel_workspace(one) for one in distinct),
            scalars=_scalar_bytes(len(stations)),
        ).check(self._device.info.name, self._capacity, self._stash_place, self._microbatches, largest.name)
        for one in distinct:
            one.compile(self._device)
        self._server.allocate(plans, gradient_size)
        if grows:
            if ring is not None:
                ring.free()
            self._relay = None
            slots = SlotRing(self._device, self._slot_count, parameter_size, gradient_size)
            self._relay = Relay(self._device, self._host, self._store, self._server, slots)
        assert self._relay is not None
        return self._relay

    def _stash_for(self, stations: Sequence[Stations], purpose: str) -> Stash:
        """The stash for these shapes; one lives at a time."""
        key = (purpose, tuple(id(one) for one in stations))
        if self._stash is None or self._stash_key != key:
            self._free_stash()
            training = purpose == "train"
            plan = plan_for(stations[0], self._stash_place, training)
            shapes = [[(value.shape, value.dtype) for value in one.partition.values] for one in stations]
            relay = self._relay
            assert relay is not None
            self._scalars = self._device.alloc(_scalar_bytes(len(stations)), "losses and seeds")
            self._stash = Stash(
                plan,
                self._device,
                self._host,
                self._device.queue("stash in"),
                self._device.queue("stash out"),
                shapes,
            )
            self._stash_key = key
            for value in stations[0].unfed if training else ():
                for microbatch in range(len(stations)):
                    view = self._stash.access(Key(value, True), microbatch, True).view
                    self._device.queue("stash in").fill(view, 0.0).wait()
        return self._stash

    def _free_stash(self) -> None:
        if self._stash is not None:
            self._stash.free()
            self._stash = None
        if self._scalars is not None:
            self._scalars.free()
            self._scalars = None

    def _scalar_views(self, count: int, dtype: torch.dtype) -> tuple[View, list[View], View, list[View]]:
        assert self._scalars is not None
        half = self._scalars.size // 2
        size = dtype.itemsize

        def row(start: int) -> tuple[View, list[View]]:
            assert self._scalars is not None
            singles = [self._scalars.view(start + number * size, (), dtype) for number in range(count)]
            return self._scalars.view(start, (count,), dtype), singles

        losses, seeds = row(0), row(half)
        return losses[0], losses[1], seeds[0], seeds[1]

    def _plain_bytes(self, stations: Stations) -> int:
        """Device bytes that plain training would need: weights, gradients, two moments, and what autograd keeps."""
        state = sum(
            parameter.numel() * parameter.element_size() * (4 if parameter.requires_grad else 1)
            for parameter in self._model.parameters()
        )
        state += sum(buffer.numel() * buffer.element_size() for buffer in self._model.buffers())
        return state + sum(station.captured.saved for station in stations.stations)

    # -- running ----------------------------------------------------------------------------------------------

    def _bring(self, stash: Stash, stations: Sequence[Stations], pieces: Batch) -> None:
        partition = stations[0].partition
        for microbatch, tensors in enumerate(pieces.pieces):
            for value, tensor in zip(partition.inputs, tensors, strict=True):
                if partition.values[value].consumers:
                    stash.bring(Key(value, False), microbatch, tensor.contiguous())

    def _forward(
        self,
        pieces: Batch,
        stations: Sequence[Stations],
        read_back: Callable[[Stash, Relay, Ran], None] | None = None,
    ) -> tuple[Ran, Stash, torch.Tensor | None]:
        contents = self._contents(stations[0])
        relay = self._prepare_device(stations, contents, [])
        stash = self._stash_for(stations, "forward")
        self._store.version += 1  # the user may have written to the weights since: what slots still hold may be old
        self._device.reset_peak()
        has_loss = stations[0].partition.has_loss
        losses_on_host: torch.Tensor | None = None
        loss_views: list[View] | None = None
        loss_row: View | None = None
        if has_loss:
            dtype = stations[0].partition.values[stations[0].loss or 0].dtype
            loss_row, loss_views, _, _ = self._scalar_views(len(stations), dtype)
            losses_on_host = torch.zeros(len(stations), dtype=dtype)
        self._bring(stash, stations, pieces)
        with self._finishing(stash, [], training=False) as ran:
            relay.forward(ran, stations, contents, stash, self._seed, self._step, loss_views)
            if losses_on_host is not None and loss_row is not None:
                ran.reads.append(relay.drain_queue.read(losses_on_host, loss_row, ran.compute[-len(stations) :]))
            if read_back is not None:
                read_back(stash, relay, ran)
        return ran, stash, losses_on_host

    def _keep_buffers(self, stations: Stations) -> list[str]:
        """Keep a copy of the buffers that a step's forward changes, should the step not be applied. Their names."""
        passes = [(one, each) for one in stations.stations for each in (one.forward, one.backward) if each is not None]
        names = [one.buffers[index] for one, each in passes for index in each.updates]
        for name in names:
            buffer = self._store[name]
            if name not in self._kept_buffers:
                flat = self._host.alloc(buffer.numel(), buffer.dtype, "buffers before the step")
                self._kept_buffers[name] = flat.view(buffer.shape)
            self._kept_buffers[name].copy_(buffer)
        return names

    @contextmanager
    def _finishing(
        self, stash: Stash, first: list[Event], buffers: Sequence[str] = (), training: bool = True
    ) -> Iterator[Ran]:
        """Around the submission of a pass: waits for all of it, whatever happens, and settles what became of it.

        Raises the first error, with `buffers` put back as `_keep_buffers` found them. A step that was applied counts,
        also when an interrupt came while it ran; one that was applied in part makes the trainer refuse to go on.
        """
        ran = Ran()
        error: BaseException | None = None
        try:
            yield ran
        except BaseException as failure:
            error = failure
        interrupt: BaseException | None = None
        for event in [*first, *ran.all_events(), *stash.transfers]:
            while True:
                try:
                    event.wait()
                except KeyboardInterrupt as failure:  # what is submitted runs on: wait for it, then stop
                    interrupt = failure
                    continue
                except Exception as failure:
                    error = error or failure
                break
        assert self._relay is not None
        self._relay.slots.settle()
        self._store.updated.clear()  # all updates have ended; a failed one must not fail the next step too
        self._server.settle()
        self._transfers = list(stash.transfers)
        stash.settle()
        if error is not None:
            self._relay.slots.forget()
            for name in buffers:
                self._store[name].copy_(self._kept_buffers[name])
            if any(_succeeded(event) for event in ran.host.updates):
                self._broken = error
            # A task's error comes wrapped by its queue; ours says by itself what to do.
            raise error.__cause__ if isinstance(error.__cause__, RelayError) else error
        if training:
            self._step += 1
            self._store.version += 1
            self.optimizer.count_step()
        if interrupt is not None:
            raise interrupt

    def _metrics(self, ran: Ran, stash: Stash, pieces: Batch, loss: float, start: float) -> Metrics:
        norms = [ran.host.norms[name] for name, _ in self._model.named_parameters() if name in ran.host.norms]
        norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
        transfers = [*ran.loads, *ran.reads, *ran.host.drains, *self._transfers]
        return Metrics(
            loss=loss,
            grad_norm=norm,
            seconds=perf_counter() - start,
            tokens=count_tokens(pieces),
            device_peak_bytes=self._device.memory().peak,
            host_bytes=self._host.ledger.total,
            compute_seconds=total_elapsed(ran.compute),
            transfer_seconds=total_elapsed(transfers),
            optimizer_seconds=total_elapsed(ran.host.updates),
            weight_bytes=ran.weight_bytes,
        )

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def _scalar_bytes(microbatches: int) -> int:
    """Two rows of one number of up to 8 bytes a micro-batch."""
    return 2 * max(64, 8 * microbatches)


def _succeeded(event: Event) -> bool:
    try:
        event.wait()
    except Exception:
        return False
    return True
