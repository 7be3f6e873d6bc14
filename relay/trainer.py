"""The trainer: the public face of the relay.

It builds what a run consists of and turns batches into passes over the model. It holds no scheduling and no
arithmetic; what may be done between steps (edits, checkpoints) is `relay.run_state`. Invariant: a call that raises
has either changed nothing, or the trainer says that it can no longer be trusted (`InconsistentState`).
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

import torch
from torch import nn

from hal import registry
from hal.errors import DeviceLost
from hal.host import Host
from relay import options
from relay.capture import graphs_for
from relay.data.buckets import Buckets
from relay.eps.optimizer_state import as_spec, bind
from relay.eps.server import Clipping, ParameterServer
from relay.eps.store import LayerStore
from relay.errors import NonFiniteLoss, PartitionError
from relay.metrics import Metrics
from relay.optim.loss_scale import LossScale
from relay.optim.optimizers import AdamW, RelayOptimizer
from relay.optim.param_groups import split_into_groups
from relay.run_state import RunState
from relay.runtime import run_step
from relay.runtime.compiler import ModelCompiler, Ready
from relay.runtime.grad_mode import as_if_alone
from relay.runtime.session import Session
from relay.runtime.trace import Trace

logger = logging.getLogger("relay")


class Trainer(RunState):
    """Trains a model by relaying its layers through a device.

    `model` is an `nn.Module` whose output has `.loss`, called as `model(**batch)`; or a list of modules, each called
    with the output of the one before, with `loss(output, targets)` giving the mean over the samples. The trainer
    takes the model's parameters over: they become views of its store, and always show the current weights.

    `device` is a device string (`relay devices` lists them), `capacity` a limit in bytes (or `"256MB"`) on the
    device memory used, `host_memory` one on the host's, and `pinned_memory` one on the page-locked part of that
    (what crosses the link, on devices with a link). `microbatches` is how many pieces a batch is cut into,
    `slots` how many layers the device holds at once, `stash` whether boundary activations stay on the `device` or
    stream to the `host`. `seed` decides every dropout mask.

    `layers_per_slot` consecutive layers (repeated blocks of a whole model, modules of a list) share a slot: fewer and
    larger transfers, and fewer values between them to stash. `recompute` True runs each segment's forward again in its
    backward; False keeps what the backward needs in the stash instead; a number has that many segments recompute,
    the first ones. Neither changes a bit of any result.

    `precision` `"bf16"` or `"fp16"` computes as PyTorch's autocast does, with master weights and optimizer state on
    the host in fp32. fp16 has a loss scale: `"dynamic"` keeps all gradients of a step on the host until they are known
    to be finite, and skips the step if not; a number (a power of two; `"fixed"` is 65536) is fixed, updates each layer
    as soon as it may be, and an overflow is an error (`GradientOverflow`).
    `state_dtype` is what the optimizer's moments are kept in:
    `"fp32"`, `"bf16"` or `"int8"`. `clip_grad_norm` and `clip_grad_value` are exact, as torch.nn.utils' are.
    `param_groups` are mappings with `params` (name patterns such as `"*.bias"`, or the parameters themselves)
    and hyperparameters that differ from the optimizer's own. `shared_inputs` names inputs of a whole model that
    every micro-batch gets whole, should their length be the batch's by chance.

    Each shape of batch is compiled once. At most `max_cached_programs` compiled models (one for each shape and mode)
    are kept, and the least recently used is dropped first. `buckets` pads sequences to a few lengths
    (`relay.Buckets`), for steps and for evaluation.

    `on_nonfinite` says what a NaN or infinite loss does: `"stop"` raises NonFiniteLoss with nothing applied, `"skip"`
    applies nothing and goes on (`metrics.skipped`), `"log"` applies it as plain PyTorch would; both say so in the
    log. `on_device_lost="retry"` opens a lost device again and repeats the step, once. `stall_timeout` is after how
    long a step that does not end has what it waits for written to the log.
    """

    @options.refuse_renamed("Trainer")
    @as_if_alone()
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
        param_groups: Sequence[Mapping[str, Any]] = (),
        host_memory: int | str | None = None,
        pinned_memory: int | str | None = None,
        shared_inputs: Sequence[str] = (),
        max_cached_programs: int = 32,
        buckets: Buckets | None = None,
        on_nonfinite: str = "stop",
        on_device_lost: str = "raise",
        stall_timeout: float | None = None,
        loss_scale: str | float = "dynamic",
        layers_per_slot: int = 1,
        recompute: bool | int = True,
    ) -> None:
        chosen: dict[str, Any] = {
            "device": str(device), "microbatches": microbatches, "precision": precision, "stash": stash, "slots": slots,
            "state_dtype": state_dtype, "clip_grad_norm": clip_grad_norm, "clip_grad_value": clip_grad_value,
            "layers_per_slot": layers_per_slot, "recompute": recompute,
        }  # fmt: skip
        further = {
            "seed": seed, "max_cached_programs": max_cached_programs, "on_nonfinite": on_nonfinite,
            "on_device_lost": on_device_lost, "stall_timeout": stall_timeout, "loss_scale": loss_scale,
        }  # fmt: skip
        modules = options.list_of_modules(model, loss)
        options.check(chosen | further)
        options.warn_of_unused(loss_scale, precision)
        compiler = ModelCompiler(
            model if isinstance(model, nn.Module) else None, modules, loss, microbatches, options.COMPUTE[precision],
            max_cached_programs, buckets, options.shared_inputs(shared_inputs, modules is None), layers_per_slot,
            recompute,
        )  # fmt: skip
        whole = compiler.model
        if not any(parameter.requires_grad for parameter in whole.parameters()):
            raise PartitionError("The model has no parameter that requires a gradient: there is nothing to train.")
        half = precision == "fp16"
        fixed_scale = options.fixed_scale(loss_scale) if half else 1.0
        scale = LossScale() if half and loss_scale == "dynamic" else None
        spec = as_spec(AdamW() if optimizer is None else optimizer)
        defaults = spec.defaults()
        grouping = functools.partial(split_into_groups, groups=param_groups, defaults=defaults)
        groups, _ = grouping(whole)
        limit = options.size_or_none(capacity)
        opened = registry.open(str(device), limit)
        host = opened.host(options.size_or_none(host_memory), options.size_or_none(pinned_memory))
        clipping = Clipping(clip_grad_norm, clip_grad_value)

        def build(on: Host) -> tuple[LayerStore, ParameterServer]:
            store = LayerStore(on)
            bound = bind(spec, on, store, state_dtype)
            _, group_of = grouping(compiler.model)  # which may be another by now
            order = [name for name, _ in compiler.model.named_parameters()]
            return store, ParameterServer(opened, on, store, bound, group_of, order, clipping, scale is not None)

        store, server = build(host)
        session = Session(whole, opened, host, store, server, slots, stash, limit, build, precision, state_dtype)
        session.stall_timeout = stall_timeout
        compiler.device, (compiler.lowering, compiler.traced_for) = opened.info.name, graphs_for(opened.info)
        scheduled = RelayOptimizer(groups, defaults)
        super().__init__(compiler, session, scheduled, grouping, scale, fixed_scale, seed, chosen)
        self._on_nonfinite = on_nonfinite
        self._on_device_lost = on_device_lost
        # A trainer that is dropped unclosed would leave its queues' threads behind. At the end of the process they end
        # by themselves (`hal.worker`).
        weakref.finalize(self, _close_quietly, session).atexit = False

    # -- training ---------------------------------------------------------------------------------------------

    @options.refuse_renamed("Trainer.step")
    @as_if_alone()
    def step(self, batch: Any, active_layers: Sequence[int | str] | None = None) -> Metrics:
        """One optimizer step on a batch: `(inputs, targets)` for a list of modules, a mapping for a whole model.

        With `active_layers` (indices or names) only those layers take part: repeated blocks of a whole model, or
        modules of a list. Each of the others returns its input unchanged and has no gradient.

        Raises BatchError, PartitionError, CaptureError, OutOfMemory before anything runs; NonFiniteLoss after the
        forward, with nothing applied. Any other error of a step leaves it all applied or not at all, or the next
        call raises InconsistentState. Ctrl-C takes effect when the step has ended.
        """
        try:
            return self._one_step(batch, active_layers)
        except DeviceLost:
            if self._on_device_lost != "retry" or self._session.broken is not None:
                raise
            self.reopen()
            return self._one_step(batch, active_layers)

    def _one_step(self, batch: Any, active_layers: Sequence[int | str] | None) -> Metrics:
        self._check_usable()
        start = perf_counter()
        session = self._session
        if active_layers is not None and not session.knows_every_layer:
            session.contents(self._ready(batch).compiled[0])  # every layer gets its place, as it will be used
        ready = self._ready(batch, active_layers=active_layers)
        session.knows_every_layer = True
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        # With a loss scale an infinite loss is an overflow like any other: the step is skipped.
        judge = self._judge if self._scale is None else None
        outcome = run_step.train_step(session, ready, groups, self._seed, self._step, self.loss_scale, judge)
        if outcome.problem is not None and self._on_nonfinite != "skip":
            raise outcome.problem
        self._step += 1
        session.store.version += 1
        if outcome.problem is not None:
            logger.warning("%s The batch is skipped.", outcome.problem)
            session.take_interrupt()
            return run_step.metrics_of(session, outcome, ready.pieces, start, [])
        host = outcome.ran.host
        behind, session.pending = session.pending, list(host.updates) if session.server.held else []
        if not host.skipped:
            self.optimizer.count_step()
        if self._scale is not None:
            (self._scale.overflowed if host.skipped else self._scale.succeeded)()
        session.take_interrupt()
        updates = behind if session.server.held else host.updates
        return run_step.metrics_of(session, outcome, ready.pieces, start, updates)

    def _judge(self, loss: float) -> None:
        problem = NonFiniteLoss(loss, self._step)
        if self._on_nonfinite != "log":
            raise problem
        logger.warning("The loss of step %d is %s; it is applied all the same.", self._step, loss)

    @options.refuse_renamed("Trainer.evaluate")
    @as_if_alone()
    def evaluate(self, batch: Any, active_layers: Sequence[int | str] | None = None) -> Metrics:
        """The loss of a batch, forward only, in eval mode; of the `active_layers` alone, if given. Nothing changes."""
        with self._eval_mode():
            start = perf_counter()
            ready = self._ready(batch, training=False, active_layers=active_layers)
            outcome = run_step.forward(self._session, ready, self._seed, self._step)
            return run_step.metrics_of(self._session, outcome, ready.pieces, start, [])

    @as_if_alone()
    def predict(self, batch: Any) -> Any:
        """The model's output for a batch (for a list of modules: for its inputs), forward only, in eval mode.

        Tensors with the batch's length along dimension 0 are put together again, and scalars (a loss) averaged over
        the batch; of others the first piece's are given.
        """
        with self._eval_mode():
            pieces = self._compiler.take_apart(batch, training=False, needs_targets=False)
            compiled = [self._compiler.compiled(pieces, number, False, True) for number in range(len(pieces.pieces))]
            return run_step.outputs(self._session, pieces, compiled, self._seed, self._step)

    @as_if_alone()
    def prepare(self, batch: Any) -> None:
        """Partition, capture, compile and allocate for batches like this one, and change nothing else.

        `ledger` and `baseline_device_bytes` are known after it.
        """
        self._check_usable()
        compiled = self._ready(batch).compiled
        contents = self._session.contents(compiled[0])
        plans = self._session.gradient_plans(compiled[0])
        self._session.make_ready(compiled, contents, plans, self.param_groups, "train")

    def _ready(self, batch: Any, training: bool = True, active_layers: Sequence[int | str] | None = None) -> Ready:
        """The batch in pieces, recorded, and known to fit on the host."""
        ready = self._compiler.ready(batch, training, active_layers)
        self._session.check_host(ready.compiled, self.param_groups, training)
        if training and not self.baseline_device_bytes:
            self.baseline_device_bytes = self._compiler.baseline_device_bytes(ready.compiled[0])
        return ready

    # -- looking at runs, and ending them ----------------------------------------------------------------------

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


def _close_quietly(session: Session) -> None:
    """Give back what a trainer held that nobody has any more. Nobody is left to be told of an error."""
    with suppress(Exception):
        session.close()
