"""The trainer: the public face of the relay.

It builds what a run consists of and turns batches into passes over the model. It holds no scheduling and no
arithmetic; what may be done between steps (edits, checkpoints) is `relay.run_state`. Invariant: a call that raises
has either changed nothing, or the trainer says that it can no longer be trusted (`InconsistentState`).
"""

from __future__ import annotations

import functools
import logging
import textwrap
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

import torch
from torch import nn

from hal import registry
from hal.errors import DeviceLost
from hal.host import Host
from relay.capture import graphs_for
from relay.eps.optimizer_state import as_spec, bind
from relay.eps.server import Clipping, ParameterServer
from relay.eps.store import LayerStore
from relay.errors import NonFiniteLoss, PartitionError
from relay.metrics import Metrics
from relay.optim.loss_scale import LossScale
from relay.optim.optimizers import AdamW, RelayOptimizer
from relay.optim.param_groups import split_into_groups
from relay.options import documentation, refuse_renamed, takes_train_options, train_options
from relay.precision import COMPUTE
from relay.run_state import RunState
from relay.runtime import run_step
from relay.runtime.compiler import ModelCompiler, Ready, list_of_modules
from relay.runtime.grad_mode import as_if_alone
from relay.runtime.session import Session
from relay.runtime.trace import Trace

logger = logging.getLogger("relay")


class Trainer(RunState):
    """Trains a model by relaying its layers through a device.

    The trainer takes the model's parameters over: they become views of its store, and always show the current weights.

    Example:
        >>> trainer = relay.Trainer(model, optimizer=relay.AdamW(lr=1e-3), microbatches=4)
        >>> trainer.step(batch).loss

    Args:
        model: An `nn.Module` whose output has `.loss`, called as `model(**batch)`; or a list of modules, each called
            with the output of the one before.
        loss: For a list: `loss(output, targets)`, the mean over the samples.

    Options, by keyword:
{options}

    Raises:
        TypeError, ValueError: An option that is not known or not allowed.
        PartitionError: A model without a parameter that requires a gradient.
        Unavailable: A device that is not here.
    """

    @as_if_alone()
    @takes_train_options
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        loss: Callable[..., torch.Tensor] | None = None,
        **options: Any,
    ) -> None:
        if isinstance(options.get("device"), torch.device):
            options["device"] = str(options["device"])
        chosen = train_options("Trainer", options)
        modules = list_of_modules(model, loss)
        if chosen.shared_inputs and modules is not None:
            raise ValueError(
                f"shared_inputs={list(chosen.shared_inputs)!r} names inputs of a whole model, and a list of modules "
                "has inputs without names. Leave shared_inputs out, or pass the whole model."
            )
        if chosen.precision != "fp16" and chosen.loss_scale != "dynamic":
            warnings.warn(
                f"loss_scale={chosen.loss_scale!r} has no effect with precision={chosen.precision!r}: only fp16 scales "
                "its loss.",
                stacklevel=3,
            )
        compiler = ModelCompiler(
            model if isinstance(model, nn.Module) else None, modules, loss, chosen.microbatches,
            COMPUTE[chosen.precision], chosen.max_cached_programs, chosen.buckets, chosen.shared_inputs,
            chosen.layers_per_slot, chosen.recompute,
        )  # fmt: skip
        whole = compiler.model
        if not any(parameter.requires_grad for parameter in whole.parameters()):
            raise PartitionError("The model has no parameter that requires a gradient: there is nothing to train.")
        half = chosen.precision == "fp16"
        scale = LossScale() if half and chosen.loss_scale == "dynamic" else None
        spec = as_spec(AdamW() if chosen.optimizer is None else chosen.optimizer)
        defaults = spec.defaults()
        grouping = functools.partial(split_into_groups, groups=chosen.param_groups, defaults=defaults)
        groups, _ = grouping(whole)
        opened = registry.open(chosen.device, chosen.capacity)  # type: ignore[arg-type]
        host = opened.host(chosen.host_memory, chosen.pinned_memory)  # type: ignore[arg-type]
        clipping = Clipping(chosen.clip_grad_norm, chosen.clip_grad_value)

        def build(on: Host) -> tuple[LayerStore, ParameterServer]:
            store = LayerStore(on)
            bound = bind(spec, on, store, chosen.state_dtype)
            _, group_of = grouping(compiler.model)  # which may be another by now
            order = [name for name, _ in compiler.model.named_parameters()]
            return store, ParameterServer(opened, on, store, bound, group_of, order, clipping, scale is not None)

        store, server = build(host)
        session = Session(
            whole, opened, host, store, server, chosen.slots, chosen.stash, chosen.capacity, build, chosen.precision,
            chosen.state_dtype,
        )  # fmt: skip
        session.stall_timeout = chosen.stall_timeout
        compiler.device, (compiler.lowering, compiler.traced_for) = opened.info.name, graphs_for(opened.info)
        scheduled = RelayOptimizer(groups, defaults)
        super().__init__(compiler, session, scheduled, grouping, scale, chosen)
        # A trainer that is dropped unclosed would leave its queues' threads behind. At the end of the process they end
        # by themselves (`hal.worker`).
        weakref.finalize(self, _close_quietly, session).atexit = False

    # -- training ---------------------------------------------------------------------------------------------

    @refuse_renamed("Trainer.step")
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
            if self.options.on_device_lost != "retry" or self._session.broken is not None:
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
        if outcome.problem is not None and self.options.on_nonfinite != "skip":
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
        if self.options.on_nonfinite != "log":
            raise problem
        logger.warning("The loss of step %d is %s; it is applied all the same.", self._step, loss)

    @refuse_renamed("Trainer.evaluate")
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
        device = registry.open(self.options.device, session.capacity)
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


Trainer.__doc__ = (Trainer.__doc__ or "").replace("{options}", textwrap.indent(documentation(), "    "))


def _close_quietly(session: Session) -> None:
    """Give back what a trainer held that nobody has any more. Nobody is left to be told of an error."""
    with suppress(Exception):
        session.close()
