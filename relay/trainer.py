"""The trainer: the public face of the relay.

It keeps what belongs to a run (step count, seed, hyperparameters, loss scale) and turns batches into passes over
the model. It holds no scheduling and no arithmetic. Invariant: a call that raises has either changed nothing, or
the trainer says that it can no longer be trusted (`InconsistentState`).
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from hal import registry
from hal.device import NATIVE, PORTABLE, DeviceInfo
from hal.errors import DeviceLost
from hal.event import Event
from hal.host import Host, Ledger
from hal.memory import parse_size
from relay.architecture import (
    chosen_layers,
    edit_blocks,
    inserted,
    layer_names,
    names_by_tensor,
    removed,
    renames,
    reordered,
    replaced,
)
from relay.batches import Batch, count_tokens, take_apart, weigh, without_empty
from relay.blocks import plain_attributes, undisturbed
from relay.buckets import Buckets
from relay.capture import Lowering, Presence
from relay.eps.bound import STATE_DTYPES, as_spec, bind
from relay.eps.checkpoint import SHARD_BYTES, Checkpoint, Progress
from relay.eps.groups import split_into_groups
from relay.eps.optimizers import AdamW, RelayOptimizer
from relay.eps.scaling import LossScale
from relay.eps.server import Clipping, ParameterServer
from relay.eps.store import LayerStore
from relay.errors import InconsistentState, NonFiniteLoss, PartitionError
from relay.huggingface import save_pretrained
from relay.metrics import Metrics, total_elapsed
from relay.partition import list_as_model, partition_list, partition_model
from relay.saving import (
    Saving,
    check_fits,
    group_names,
    restore_optimizer,
    restore_user,
    restore_weights,
    start,
    states_of,
)
from relay.schedule import ForwardPass, Ran, Relay, TrainingStep
from relay.session import Session
from relay.stash import Key, Stash
from relay.stations import Captures, Stations, build_stations
from relay.trace import Trace

_RECORDING = threading.RLock()
logger = logging.getLogger("relay")

_COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """Trains a model by relaying its layers through a device.

    `model` is an `nn.Module` whose output has `.loss`, called as `model(**batch)`; or a list of modules, each called
    with the output of the one before, with `loss(output, targets)` giving the mean over the samples. The trainer
    takes the model's parameters over: they become views of its store, and always show the current weights.

    `device` is a device string (`relay devices` lists them), `capacity` a limit in bytes (or `"256MB"`) on the
    device memory used, `host_memory` one on the host's, and `pinned_memory` one on the page-locked part of that
    (what crosses the link, on devices with a link). `microbatches` is how many pieces a batch is cut into,
    `slots` how many layers the device holds at once, `stash` whether boundary activations stay on the `device` or
    stream to the `host`. `seed` decides every dropout mask.

    `precision` `"bf16"` or `"fp16"` computes as PyTorch's autocast does, with master weights and optimizer state on
    the host in fp32. fp16 has a loss scale: `"dynamic"` keeps all gradients of a step on the host until they are known
    to be finite, and skips the step if not; a number (a power of two) is fixed, updates each layer as soon as it may
    be, and an overflow is an error (`GradientOverflow`).
    `state_dtype` is what the optimizer's moments are kept in:
    `"fp32"`, `"bf16"` or `"int8"`. `clip_grad_norm` and `clip_grad_value` are exact, as torch.nn.utils' are.
    `parameter_groups` are mappings with `params` (name patterns such as `"*.bias"`, or the parameters themselves)
    and hyperparameters that differ from the optimizer's own. `shared_inputs` names inputs of a whole model that
    every micro-batch gets whole, should their length be the batch's by chance.

    Each shape of batch is captured once; `programs` is for how many shapes (and modes) that is kept, the least recently
    used going first. `buckets` pads sequences to a few lengths (`relay.Buckets`), for steps and evaluation.

    `on_nonfinite` says what a NaN or infinite loss does: `"stop"` raises NonFiniteLoss with nothing applied, `"skip"`
    applies nothing and goes on (`metrics.skipped`), `"log"` applies it as plain PyTorch would; both say so in the
    log. `on_device_lost="repeat"` opens a lost device again and repeats the step, once. `stall_seconds` is after how
    long a step that does not end has what it waits for written to the log.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        loss: Callable[..., torch.Tensor] | None = None,
        device: str | torch.device = "cpu",
        optimizer: Any = None,
        microbatches: int = 4,
        precision: str = "fp32",
        stash: str = "device",
        clip_grad_norm: float | None = None,
        slots: int = 2,
        state_dtype: str = "fp32",
        capacity: int | str | None = None,
        seed: int = 0,
        clip_grad_value: float | None = None,
        parameter_groups: Sequence[Mapping[str, Any]] = (),
        host_memory: int | str | None = None,
        pinned_memory: int | str | None = None,
        shared_inputs: Sequence[str] = (),
        programs: int = 32,
        buckets: Buckets | None = None,
        on_nonfinite: str = "stop",
        on_device_lost: str = "raise",
        stall_seconds: float | None = None,
        loss_scale: str | float = "dynamic",
    ) -> None:
        self._whole = isinstance(model, nn.Module)
        if isinstance(model, (nn.Sequential, nn.ModuleList)) and loss is not None:
            model = list(model)
            self._whole = False
        self._modules: list[nn.Module] = [] if isinstance(model, nn.Module) else list(model)
        if self._whole and loss is not None:
            raise ValueError("loss= goes with a list of modules; a whole model gives its loss in output.loss")
        if not self._whole and (not self._modules or loss is None):
            raise ValueError("a list of modules needs at least one module, and loss=callable(output, targets)")
        if not all(isinstance(module, nn.Module) for module in self._modules):
            raise TypeError("model must be an nn.Module or a list of nn.Module")
        _check_choice("precision", precision, _COMPUTE)
        _check_choice("state_dtype", state_dtype, STATE_DTYPES)
        _check_choice("stash", stash, ("device", "host"))
        _check_choice("on_nonfinite", on_nonfinite, ("stop", "skip", "log"))
        _check_choice("on_device_lost", on_device_lost, ("raise", "repeat"))
        _check_positive("stall_seconds", stall_seconds)
        _check_positive("clip_grad_norm", clip_grad_norm)
        _check_positive("clip_grad_value", clip_grad_value)
        for name, value in (("microbatches", microbatches), ("slots", slots), ("programs", programs)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        if not isinstance(seed, int) or not 0 <= seed < 2**64:
            raise ValueError(f"seed={seed!r} must be a whole number from 0 to 2**64 - 1")

        self._model: nn.Module = model if isinstance(model, nn.Module) else list_as_model(self._modules, loss)
        if not any(parameter.requires_grad for parameter in self._model.parameters()):
            raise PartitionError("The model has no parameter that requires a gradient: there is nothing to train.")
        self._loss = loss
        self._shared_inputs = tuple(shared_inputs)
        self._microbatches = microbatches
        self._compute = _COMPUTE[precision]
        self._seed = seed
        self._step = 0
        self._scale = LossScale() if precision == "fp16" and loss_scale == "dynamic" else None
        self._fixed_scale = _fixed_scale(loss_scale) if precision == "fp16" else 1.0
        self._cache: OrderedDict[Any, Stations] = OrderedDict()
        self._programs = programs
        self._buckets = buckets
        self._presences: dict[str, Presence] = {}
        self._saving: Saving | None = None
        self._on_nonfinite = on_nonfinite
        self._on_device_lost = on_device_lost
        self._last_saved = ""
        self._options = {
            "device": str(device), "microbatches": microbatches, "precision": precision, "stash": stash, "slots": slots,
            "state_dtype": state_dtype, "clip_grad_norm": clip_grad_norm, "clip_grad_value": clip_grad_value,
        }  # fmt: skip
        self._captures = Captures()
        self.plain_bytes = 0

        spec = as_spec(AdamW() if optimizer is None else optimizer)
        defaults = spec.defaults()
        self._grouping = functools.partial(split_into_groups, groups=parameter_groups, defaults=defaults)
        groups, group_of = split_into_groups(self._model, parameter_groups, defaults)
        self.optimizer = RelayOptimizer(groups, defaults)
        limit = _size_or_none(capacity)
        opened = registry.open(str(device), limit)
        host = opened.host(_size_or_none(host_memory), _size_or_none(pinned_memory))
        order = [name for name, _ in self._model.named_parameters()]
        # Edits of the architecture change it, and whatever is built afterwards must see that.
        self._grouped = grouped = {"group_of": group_of, "order": order}
        clipping = Clipping(clip_grad_norm, clip_grad_value)

        def build(on: Host) -> tuple[LayerStore, ParameterServer]:
            store = LayerStore(on)
            bound = bind(spec, on, store, state_dtype)
            scaled = self._scale is not None
            return store, ParameterServer(opened, on, store, bound, clipping=clipping, scaled=scaled, **grouped)

        store, server = build(host)
        self._session = Session(
            self._model, opened, host, store, server, slots, stash, limit, build, precision, state_dtype
        )
        self._session.stall_seconds = stall_seconds
        self._lowering = _lowering_for(opened.info)

    # -- training ---------------------------------------------------------------------------------------------

    def step(self, batch: Any, active: Sequence[int | str] | None = None) -> Metrics:
        """One optimizer step on a batch: `(inputs, targets)` for a list of modules, a mapping for a whole model.

        With `active` only those layers take part (repeated blocks of a whole model, modules of a list; by place or
        by name): the others hand on what they are given, and have no gradient.

        Raises BatchError, PartitionError, CaptureError, OutOfMemory before anything runs; NonFiniteLoss after the
        forward, with nothing applied. Any other error of a step leaves it all applied or not at all, or the next
        call raises InconsistentState. Ctrl-C takes effect when the step has ended.
        """
        try:
            return self._one_step(batch, active)
        except DeviceLost:
            if self._on_device_lost != "repeat" or self._session.broken is not None:
                raise
            self.reopen()
            return self._one_step(batch, active)

    def _one_step(self, batch: Any, active: Sequence[int | str] | None) -> Metrics:
        self._check_usable()
        start = perf_counter()
        session = self._session
        if active is not None and session.store.is_empty:
            session.contents(self._ready(batch)[2][0])  # every layer gets its place, as it will be used
        batch_pieces, weights, stations = self._ready(batch, active=active)
        contents, plans = session.contents(stations[0]), session.gradient_plans(stations[0])
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        relay, stash = session.make_ready(stations, contents, plans, groups, "train")
        session.device.reset_peak()
        dtype = _loss_dtype(stations[0])
        loss_row, losses, seed_row, seeds = session.scalars(len(weights), dtype)
        weights_on_host = torch.tensor(weights, dtype=dtype)
        losses_on_host = torch.zeros(len(weights), dtype=dtype)
        scale = self.loss_scale
        seeds_on_host = weights_on_host * scale

        def verdict(ran: Ran) -> Event:
            read = relay.drain_queue.read(losses_on_host, loss_row, ran.compute[-len(weights) :])
            ran.reads.append(read)

            def check() -> None:
                # With a loss scale an infinite loss is an overflow like any other: the step is skipped.
                if self._scale is None and not bool(torch.isfinite(losses_on_host).all()):
                    problem = NonFiniteLoss(float((losses_on_host * weights_on_host).sum()), self._step)
                    if self._on_nonfinite != "log":
                        raise problem
                    logger.warning("The loss of step %d is %s; it is applied all the same.", self._step, problem.loss)

            return session.host.run(check, [read], "verdict on the loss")

        first: list[Event] = []
        buffers = session.keep_buffers(stations[0])
        try:
            with session.running(stash, first, buffers) as ran:
                first.append(relay.load_queue.write(seed_row, seeds_on_host))
                self._bring(stash, stations, batch_pieces)
                step = TrainingStep(
                    stations, contents, stash, self._seed, self._step, losses, plans, seeds, first[0], verdict, groups,
                    1.0 / scale,
                )  # fmt: skip
                relay.train(step, ran)
        except NonFiniteLoss as problem:
            if self._on_nonfinite != "skip":
                raise
            logger.warning("%s The batch is skipped.", problem)
            self._step += 1
            session.store.version += 1
            session.take_interrupt()
            return replace(self._metrics(ran, batch_pieces, problem.loss, start, []), skipped=True)
        behind, session.pending = session.pending, list(ran.host.updates) if session.server.held else []
        skipped = ran.host.skipped
        self._step += 1
        session.store.version += 1
        if not skipped:
            self.optimizer.count_step()
        if self._scale is not None:
            (self._scale.overflowed if skipped else self._scale.succeeded)()
        session.take_interrupt()
        loss = _weighted(losses_on_host, weights)
        updates = behind if session.server.held else ran.host.updates
        return self._metrics(ran, batch_pieces, loss, start, updates)

    def evaluate(self, batch: Any, active: Sequence[int | str] | None = None) -> Metrics:
        """The loss of a batch, forward only, in eval mode; of the `active` layers alone, if given. Nothing changes."""
        with self._eval_mode():
            start = perf_counter()
            pieces, weights, stations = self._ready(batch, training=False, active=active)
            ran, losses = self._forward(pieces, stations)
            assert losses is not None
            loss = _weighted(losses, weights)
            return self._metrics(ran, pieces, loss, start, [])

    def predict(self, batch: Any) -> Any:
        """The model's output for a batch (for a list of modules: for its inputs), forward only, in eval mode.

        Tensors with the batch's length along dimension 0 are put together again, and scalars (a loss) averaged over
        the batch; of others the first piece's are given.
        """
        with self._eval_mode():
            pieces = self._take_apart(batch, training=False, needs_targets=False)
            stations = [self._stations(pieces, number, False, True) for number in range(len(pieces.pieces))]
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
            partition = stations[0].partition
            weights = weigh(pieces, partition.loss_weight if partition.has_loss else None)
            together = [_join(rows, pieces.sizes, weights) for rows in zip(*outputs, strict=True)]
            return partition.result_tree.fill(together)

    def prepare(self, batch: Any) -> None:
        """Partition, capture, compile and allocate for batches like this one, and change nothing else.

        `ledger` and `plain_bytes` are known after it.
        """
        self._check_usable()
        _, _, stations = self._ready(batch)
        contents = self._session.contents(stations[0])
        plans = self._session.gradient_plans(stations[0])
        self._session.make_ready(stations, contents, plans, self.param_groups, "train")

    # -- changing the architecture ----------------------------------------------------------------------------

    def insert(self, index: int, layer: nn.Module, within: str | None = None) -> None:
        """Put a layer before place `index` of the model's layers; its optimizer state begins anew.

        `within` names the list of layers (such as `"encoder.layer"`) where a whole model has several. All four
        edits keep weights and optimizer state of the layers that stay, whatever their names become; learning-rate
        schedulers go on. Raises IndexError, ValueError or PartitionError with nothing changed.
        """
        self._edit(within, lambda layers: inserted(layers, index, layer))

    def remove(self, index: int, within: str | None = None) -> None:
        """Take a layer out, with its optimizer state. The module keeps its weights."""
        self._edit(within, lambda layers: removed(layers, index))

    def replace(self, index: int, layer: nn.Module, within: str | None = None) -> None:
        """Put another layer in the place of one: `remove`, then `insert`."""
        self._edit(within, lambda layers: replaced(layers, index, layer))

    def reorder(self, order: Sequence[int], within: str | None = None) -> None:
        """Bring the layers into another order: `order[i]` is the one that comes i-th."""
        self._edit(within, lambda layers: reordered(layers, order))

    def _edit(self, within: str | None, change: Callable[[list[nn.Module]], list[nn.Module]]) -> None:
        self._check_usable()
        self.synchronize()
        before = names_by_tensor(self._model)
        old_modules, old_model = self._modules, self._model
        if self._whole:
            undo = edit_blocks(self._model, within, change)
        else:
            self._modules = change(self._modules)
            self._model = list_as_model(self._modules, self._loss)

            def undo() -> None:
                self._modules, self._model = old_modules, old_model

        try:
            groups, group_of = self._grouping(self._model)
        except ValueError:
            undo()
            raise
        names = renames(before, self._model)
        self._session.change_model(self._model, names)
        self._grouped.update(group_of=group_of, order=[name for name, _ in self._model.named_parameters()])
        self._session.server.rename(names, **self._grouped)
        for ours, new in zip(self.optimizer.param_groups, groups, strict=True):
            ours["params"] = new["params"]
        self._cache.clear()
        self._presences.clear()
        self._captures.clear()
        self.plain_bytes = 0

    # -- weights and figures ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's parameters and buffers under its own names (a list's: those of `nn.Sequential(*list)`).

        The tensors are the store's own, as in PyTorch: the next step changes them.
        """
        self.synchronize()
        return (self._model if self._whole else nn.Sequential(*self._modules)).state_dict()

    def sync_to(self, model: nn.Module) -> None:
        """Copy the weights into another model with the same names."""
        model.load_state_dict(self.state_dict())

    def save_pretrained(self, folder: str | Path, shard_size: str = "5GB") -> None:
        """Save a Hugging Face model as a folder that `from_pretrained` loads, weights as safetensors in shards."""
        save_pretrained(self._model, self.state_dict(), folder, shard_size)

    def synchronize(self) -> None:
        """Wait for updates that still run behind (with clipping or fp16, the last step's). Raises their error."""
        self._session.synchronize()

    # -- checkpoints ------------------------------------------------------------------------------------------

    def save(
        self,
        path: str | Path,
        *,
        background: bool = False,
        memory: int | str = "1GB",
        shard_bytes: int | str = SHARD_BYTES,
        **user: Any,
    ) -> Saving:
        """Write a checkpoint: a folder at `path`, in place of a checkpoint that is there.

        Further keywords are what else belongs to the run, such as `scheduler=` and `data=`: objects with
        `state_dict()`, or plain values. With `background` training may go on while it is written, and takes at most
        `memory` bytes of copies for it; errors then come with the next `save`, or `wait` of what is returned.

        Raises CheckpointError, with what was there before untouched, and InconsistentState.
        """
        self._check_usable()
        self.wait_saved()
        session = self._session
        progress = Progress(
            step=self._step,
            seed=self._seed,
            loss_scale=self._scale.state() if self._scale is not None else None,
            optimizer=session.server.optimizer.kind,
            groups=group_names(self._model, self.param_groups),
            options=dict(self._options),
            user=states_of(user),
        )
        # Before the first step states may still have to find their place.
        behind = background and session.relay is not None
        self._saving = start(
            Path(path), self._model, session.server, session.host, session.pending, progress, parse_size(memory),
            parse_size(shard_bytes), behind,
        )  # fmt: skip
        self._last_saved = str(path)
        return self._saving

    def load(self, path: str | Path, *, weights_only: bool = False, verify: bool = True, **user: Any) -> int:
        """Take over the state that a checkpoint holds; the number of steps it had made.

        Further keywords are what was given to `save` and has a `load_state_dict`. `weights_only` takes parameters
        and buffers alone, into a run that begins. `verify` reads everything once, against its checksums.

        Raises CheckpointError where the checkpoint is damaged or does not belong here; nothing has changed then.
        """
        self.wait_saved(quietly=True)
        session = self._session
        checkpoint = Checkpoint(Path(path))
        optimizer = session.server.optimizer
        check_fits(checkpoint, self._model, optimizer, self.param_groups, weights_only, user)
        if verify:
            checkpoint.verify()
        else:
            checkpoint.check_layout()
        session.recover()
        try:
            restore_weights(checkpoint, self._model)
            manifest = checkpoint.manifest
            if not weights_only:
                restore_optimizer(checkpoint, self._model, optimizer, self.param_groups)
                self._step, self._seed = manifest.step, manifest.seed
                if self._scale is not None and manifest.loss_scale is not None:
                    self._scale.restore(manifest.loss_scale)
        except BaseException as failure:
            session.broken = failure
            raise
        restore_user(checkpoint, user)
        self._last_saved = str(path)
        return self._step

    def wait_saved(self, quietly: bool = False) -> None:
        """Wait for a checkpoint that is being written. Raises its error, once, unless `quietly`."""
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                saving.wait()
            except Exception:
                if not quietly:
                    raise

    @property
    def steps(self) -> int:
        """How many steps have been made, skipped ones included: the number of the next one."""
        return self._step

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @property
    def loss_scale(self) -> float:
        """The fp16 loss scale; 1 in other precisions."""
        return self._scale.value if self._scale is not None else self._fixed_scale

    @property
    def ledger(self) -> Ledger:
        """What the host holds, in bytes by state and dtype."""
        return self._session.host.ledger

    @property
    def device_name(self) -> str:
        """The device's string."""
        return self._session.device.info.name

    def start_trace(self) -> Trace:
        """Record what runs when, from the next step on. `stop_trace` ends it."""
        self._session.trace = Trace()
        return self._session.trace

    def stop_trace(self) -> None:
        """Stop recording."""
        self._session.trace = None

    def reopen(self) -> None:
        """Open the device anew, after DeviceLost: what the host holds is whole, and is sent again as it is needed.

        Raises InconsistentState where the step that was lost had been applied in part: load a checkpoint then.
        """
        session = self._session
        broken = session.broken
        device = registry.open(str(self._options["device"]), session.capacity)
        session.reopen(device)
        session.broken = broken
        self._check_usable()

    def close(self) -> None:
        """Finish what runs, stop the device's queues and give its memory back. The weights stay."""
        try:
            self.wait_saved()
            self.synchronize()
        finally:
            self._session.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        # A trainer that is dropped unclosed would leave its queues' threads behind.
        session = getattr(self, "_session", None)
        if session is not None:
            with suppress(Exception):
                session.close()

    # -- making ready -----------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        broken = self._session.broken
        if broken is not None:
            raise InconsistentState(
                f"An earlier step failed while layers were being updated ({broken}), so some layers have taken that "
                f"step and others have not. {self._what_to_load()}"
            ) from broken

    def _what_to_load(self) -> str:
        if self._last_saved:
            return f"Go on with trainer.load({self._last_saved!r}), the last checkpoint that this trainer knows."
        return "Load a checkpoint, or build a new trainer; this one has saved none."


    def _ready(
        self, batch: Any, training: bool = True, active: Sequence[int | str] | None = None
    ) -> tuple[Batch, list[float], list[Stations]]:
        """The batch in pieces with their weights, and the stations for each piece."""
        if self._buckets is not None and isinstance(batch, Mapping):
            batch = self._buckets.pad(batch)
        chosen = None if active is None else chosen_layers(layer_names(self._model, self._modules), active)
        pieces = self._take_apart(batch, training, needs_targets=True)
        first = self._stations(pieces, 0, training, False, chosen)
        if not first.partition.has_loss:
            raise PartitionError(
                f"The output of {type(self._model).__name__} has no loss for this batch. A whole model must return "
                "an object with .loss: does the batch hold labels?"
            )
        pieces, weights = without_empty(pieces, weigh(pieces, first.partition.loss_weight))
        stations = [self._stations(pieces, number, training, False, chosen) for number in range(len(pieces.pieces))]
        for other in stations[1:]:
            if other is not stations[0] and other.signature() != stations[0].signature():
                raise PartitionError(
                    "The model takes another path for the last, smaller micro-batch than for the others, so they "
                    "cannot share a step. Make the batch a multiple of microbatches."
                )
        self._session.check_host(stations, self.param_groups, training)
        if training and not self.plain_bytes:
            self.plain_bytes = self._plain_bytes(stations[0])
        return pieces, weights, stations

    def _take_apart(self, batch: Any, training: bool, needs_targets: bool) -> Batch:
        """The batch in pieces. Outside of training a batch may be smaller than the number of micro-batches."""
        pieces = self._microbatches
        if not training:
            whole = take_apart(batch, self._whole, 1, needs_targets, self._shared_inputs)
            pieces = min(pieces, whole.sizes[0])
        return take_apart(batch, self._whole, pieces, needs_targets, self._shared_inputs)

    def _stations(
        self, batch: Batch, number: int, training: bool, results: bool, active: tuple[str, ...] | None = None
    ) -> Stations:
        trainable = tuple(parameter.requires_grad for parameter in self._model.parameters())
        key = (batch.signature(number), training, results, trainable, active, plain_attributes(self._model))
        stations = self._cache.get(key)
        if stations is None:
            stations = self._cache[key] = self._record(batch, batch.pieces[number], training, results, active)
        self._cache.move_to_end(key)
        while len(self._cache) > self._programs:
            self._cache.popitem(last=False)
        return stations

    def _record(
        self,
        batch: Batch,
        tensors: list[torch.Tensor],
        training: bool,
        results: bool,
        active: tuple[str, ...] | None,
    ) -> Stations:
        """Partition and capture for the shapes of one piece. Tracing is not made for several threads at once."""
        with _RECORDING, undisturbed(self._model):
            if self._whole:
                partition = partition_model(self._model, tensors, batch.tree, self._compute, active)
            else:
                inputs, targets = tensors[: batch.input_count], tensors[batch.input_count :]
                partition = partition_list(
                    self._modules, self._loss, inputs, batch.tree, targets, batch.target_tree, self._compute, active
                )
            return build_stations(
                partition, training, results, self._compute, self._presences, self._lowering, self._captures
            )

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
    ) -> tuple[Ran, torch.Tensor | None]:
        session = self._session
        contents = session.contents(stations[0])
        relay, stash = session.make_ready(stations, contents, [], [], "forward")
        session.store.version += 1  # the user may have written to the weights since: what slots still hold may be old
        session.device.reset_peak()
        dtype = _loss_dtype(stations[0])
        loss_row, losses, _, _ = session.scalars(len(stations), dtype)
        has_loss = stations[0].partition.has_loss
        losses_on_host = torch.zeros(len(stations), dtype=dtype) if has_loss else None
        step = ForwardPass(stations, contents, stash, self._seed, self._step, losses if has_loss else [])
        with session.running(stash, []) as ran:
            self._bring(stash, stations, pieces)
            relay.forward(step, ran)
            if losses_on_host is not None:
                ran.reads.append(relay.drain_queue.read(losses_on_host, loss_row, ran.compute[-len(stations) :]))
            if read_back is not None:
                read_back(stash, relay, ran)
        session.take_interrupt()
        return ran, losses_on_host

    def _metrics(self, ran: Ran, pieces: Batch, loss: float, start: float, updates: Sequence[Event]) -> Metrics:
        session = self._session
        return Metrics(
            loss=loss,
            grad_norm=ran.host.total_norm,
            seconds=perf_counter() - start,
            tokens=count_tokens(pieces),
            device_peak_bytes=session.device.memory().peak,
            host_bytes=session.host.ledger.total,
            compute_seconds=total_elapsed(ran.compute),
            transfer_seconds=total_elapsed([*ran.loads, *ran.reads, *ran.host.drains, *session.transfers]),
            optimizer_seconds=total_elapsed(updates),
            weight_bytes=ran.weight_bytes,
            skipped=ran.host.skipped,
        )

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        self._check_usable()
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def _join(rows: Sequence[torch.Tensor], sizes: Sequence[int], weights: Sequence[float]) -> torch.Tensor:
    """One output of the model, from those of the pieces."""
    if rows[0].dim() and [len(row) for row in rows] == list(sizes):
        return torch.cat(list(rows))
    if rows[0].dim() == 0 and rows[0].dtype.is_floating_point:
        return torch.stack([row * weight for row, weight in zip(rows, weights, strict=True)]).sum()
    return rows[0]


def _weighted(losses: torch.Tensor, weights: Sequence[float]) -> float:
    """The mean loss of the batch: each piece's rounded to its own dtype, as plain training would see it."""
    return sum(float(loss * weight) for loss, weight in zip(losses, weights, strict=True))


def _lowering_for(info: DeviceInfo) -> Lowering:
    """Which graphs a device is given."""
    if NATIVE not in info.tags:
        return Lowering.CORE
    return Lowering.PORTABLE if PORTABLE in info.tags else Lowering.NATIVE


def _loss_dtype(stations: Stations) -> torch.dtype:
    return torch.float32 if stations.loss is None else stations.partition.values[stations.loss].dtype


def _size_or_none(size: int | str | None) -> int | None:
    return None if size is None else parse_size(size)


def _check_choice(name: str, value: Any, choices: Any) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}")


def _fixed_scale(scale: str | float) -> float:
    if scale == "dynamic":
        return 1.0
    if isinstance(scale, str) or not scale > 0 or math.frexp(scale)[0] != 0.5:
        raise ValueError(f"loss_scale={scale!r} must be 'dynamic' or a power of two, so that unscaling is exact")
    return float(scale)


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ValueError(f"{name}={value!r} must be above 0, or None")
