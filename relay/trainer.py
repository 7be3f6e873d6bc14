"""The trainer, the main public class: it builds what a run consists of, and turns batches into steps.

Scheduling and arithmetic are not here (`relay.runtime`, `relay.eps`); what may be done between steps (edits,
checkpoints) is in `relay.run_state`. Invariant: a call that raises has changed nothing, or later calls raise
`InconsistentState`.
"""

from __future__ import annotations

import functools
import logging
import os
import textwrap
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import nn

from hal.errors import DeviceLost, OutOfMemory
from relay.build_run import build_run
from relay.data.batch_gradients import refuse_own_parameters
from relay.data.microbatches import Piece
from relay.distributed.ranks import ranks_of_this_run
from relay.distributed.shares import is_empty, stand_in
from relay.distributed.together import agree_on_construction
from relay.eps.master_weights import refuse_unfrozen_half
from relay.errors import RankFailed, RankLost, RanksDiffer
from relay.metrics import Metrics
from relay.options import documentation, refuse_renamed, takes_train_options
from relay.processes import refuse_in_child
from relay.run_state import RunState
from relay.runtime import run_step
from relay.runtime.compiling.prepared_batch import PreparedBatch
from relay.runtime.grad_mode import as_if_alone, in_eval_mode
from relay.runtime.head.largest_batch import with_largest_batch
from relay.runtime.lanes.open_devices import open_again
from relay.runtime.schedule import PreparedStep
from relay.runtime.session import Session
from relay.runtime.trace import Trace
from relay.trainer_arguments import refuse_standing_gradients, step_arguments
from relay.verification.comparison import verify
from relay.verification.report import Verification

logger = logging.getLogger("relay")


class Trainer(RunState):
    """Trains a model by relaying its layers through a device.

    The trainer takes over the model's parameters: they become views of its store, and always show the current weights.

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
        ranks = ranks_of_this_run()
        try:
            run = build_run(model, loss, options, ranks)
            super().__init__(run)
            self._frozen_half = run.frozen_half
            run.begin(functools.partial(_make_ready, weakref.ref(self)))  # the optimizer may outlive the trainer
        except (RankFailed, RankLost, RanksDiffer):
            raise  # all ranks know it
        except Exception as failure:
            if ranks is not None:
                agree_on_construction(ranks, None, failure)
            raise
        # The threads of a trainer's queues outlive a trainer that is dropped without close(). At the end of the
        # process they end by themselves (`hal.worker`).
        weakref.finalize(self, _close_quietly, run.session, os.getpid()).atexit = False

    # -- training ---------------------------------------------------------------------------------------------

    @refuse_renamed("Trainer.step")
    @as_if_alone()
    def step(
        self,
        batch: Any = None,
        active_layers: Sequence[int | str] | None = None,
        *,
        pieces: Sequence[Any] | None = None,
        weights: Sequence[float] | None = None,
        outputs: Sequence[str] | None = None,
    ) -> Metrics:
        """One optimizer step on a batch: `(inputs, targets)` for a list of modules, a mapping for a whole model.

        Tensors of the batch that require a gradient get it, as from `loss.backward()` in plain PyTorch.

        Args:
            batch: what is cut into micro-batches.
            active_layers: indices or names of the layers that take part: repeated blocks of a whole model, or modules
                of a list. Each of the others returns its input unchanged and has no gradient.
            pieces: batches that are the micro-batches, instead of `batch`: each may have shapes of its own.
            weights: what each piece's loss is multiplied by. Without it the pieces count as if they were cut from one
                batch: by their samples or targets, or fully if the loss is a sum.
            outputs: names of outputs (attributes or keys of what the model returns, such as "logits") that
                `metrics.outputs` gives for each micro-batch, as the training forward computed them, detached; once,
                for the whole batch, if the head runs over it. For a list of modules "output" is all that the last one
                returns.

        Raises BatchError, PartitionError, CaptureError or OutOfMemory before anything runs, and NonFiniteLoss after the
        forward, with nothing applied. After any other error the step is applied completely or not at all, or else the
        next call raises InconsistentState. Ctrl-C takes effect when the step has ended.
        """
        asked = step_arguments(batch, pieces, weights, outputs)
        if active_layers is not None:
            self._refuse_among_ranks("step with active_layers", "Leave it out.")
        self.optimizer.begin_step()
        try:
            return self._one_step(batch, active_layers, asked)
        except DeviceLost as lost:
            if self.options.on_device_lost != "retry" or self._session.guard.broken is not None:
                raise self._with_what_is_left(lost) from lost
            self.reopen()
            return self._one_step(batch, active_layers, asked)

    def _one_step(self, batch: Any, active_layers: Sequence[int | str] | None, asked: Mapping[str, Any]) -> Metrics:
        self._check_usable()
        refuse_unfrozen_half(self._frozen_half)
        refuse_standing_gradients(self._model)
        self._warn_of_eval_mode()
        start = perf_counter()
        session = self._session
        if active_layers is not None and not session.knows_every_layer:
            # Every layer gets its memory in the store, laid out as it is without `active_layers`.
            session.take_over(self._prepare_batch(batch, **asked).compiled, self.param_groups, training=True)
        self.optimizer.refuse_moved_parameters()
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]

        def prepare(given: Any, whole: Piece | None = None) -> tuple[PreparedBatch, PreparedStep | None]:
            batch = self._prepare_batch(given, active_layers=active_layers, whole=whole, **asked)
            refuse_own_parameters(batch.pieces.pieces, self._model)
            session.knows_every_layer = True
            return batch, None if batch.needs_whole else self._allocated(batch, groups, training=True)

        shared = None
        if self._together is None:
            prepared_batch, prepared = prepare(batch)
            assert prepared is not None  # only the share of one process needs the whole batch
        else:
            facts = {"step's number": self._step, "hyperparameters": repr(groups), "loss scale": self.loss_scale}
            shared = self._together.agree_on_step(prepare, batch, facts)
            prepared_batch, prepared = shared.batch, shared.prepared
        # With a dynamic loss scale a loss that is not finite is an overflow like any other, and the step is skipped.
        on_nonfinite = self.options.on_nonfinite if self._scale is None else "apply"
        reads = run_step.TrainingReads(prepared, prepared_batch.rows)
        scale = self.loss_scale
        with session.server.agreed_step(prepared.gradient_plans):
            submitted = run_step.train_step(
                session, prepared, prepared_batch.inputs, prepared_batch.weights, groups, self._seed, self._step,
                scale, on_nonfinite, reads.submit, 0 if shared is None else shared.first,
            )  # fmt: skip
        skipped = submitted.result.skipped
        if shared is not None and not skipped:
            shared.share_buffers(session.store)
        self._step += 1
        if not skipped:
            self.optimizer.count_step()
        if self._scale is not None:
            (self._scale.overflowed if skipped else self._scale.succeeded)()
        if not skipped:
            reads.pass_gradients_on(1.0 / scale, were_cut=asked["pieces"] is None)
        outputs = prepared_batch.by_number(reads.outputs()) if asked["outputs"] else []
        session.guard.deliver_interrupts()
        metrics = run_step.metrics_of(session, submitted, prepared_batch.pieces, start, outputs)
        return metrics if shared is None else replace(metrics, tokens=shared.tokens)

    @refuse_renamed("Trainer.evaluate")
    @as_if_alone()
    def evaluate(self, batch: Any, active_layers: Sequence[int | str] | None = None) -> Metrics:
        """The loss of a batch, forward only, in eval mode; of the `active_layers` alone, if given. Nothing changes."""
        self._check_usable()
        if active_layers is not None:
            self._refuse_among_ranks("evaluate with active_layers", "Leave it out.")
        with in_eval_mode(self._model):
            start = perf_counter()

            def prepare(given: Any, whole: Piece | None = None) -> tuple[PreparedBatch, PreparedStep | None]:
                batch = self._prepare_batch(given, training=False, active_layers=active_layers, whole=whole)
                return batch, None if batch.needs_whole else self._allocated(batch, self.param_groups, training=False)

            def forward(batch: PreparedBatch, prepared: PreparedStep | None) -> Metrics:
                assert prepared is not None  # only the share of one process needs the whole batch
                inputs, weights = batch.inputs, batch.weights
                submitted = run_step.forward(self._session, prepared, inputs, weights, self._seed, self._step)
                return run_step.metrics_of(self._session, submitted, batch.pieces, start)

            return (
                forward(*prepare(batch)) if self._together is None else self._together.evaluate(prepare, forward, batch)
            )

    @as_if_alone()
    def predict(self, batch: Any) -> Any:
        """The model's output for a batch (for a list of modules: for its inputs), forward only, in eval mode.

        Tensors with the batch's length along dimension 0 are concatenated, and scalars (a loss) averaged over the
        batch; of other outputs the first micro-batch's are returned.
        """
        self._check_usable()
        with in_eval_mode(self._model):
            prepared_batch = self._compiler.prepare_outputs(batch)
            prepared = self._allocated(prepared_batch, self.param_groups, training=False)
            pieces, inputs, weights = prepared_batch.pieces, prepared_batch.inputs, prepared_batch.weights
            return run_step.outputs(self._session, prepared, pieces, inputs, weights, self._seed, self._step)

    @as_if_alone()
    def verify(
        self,
        batches: Iterable[Any],
        steps: int | None = None,
        learning_rate: Callable[[int], float] | None = None,
        *,
        as_pieces: bool = False,
        weights: Sequence[float] | None = None,
        active_layers: Sequence[int | str] | Callable[[int], Sequence[int | str]] | None = None,
    ) -> Verification:
        """Compare the next steps with plain PyTorch on this machine, tensor by tensor. The run stays as it is.

        Plain PyTorch holds the whole model, in a copy: on the trainer's device if it runs PyTorch and has the room,
        else on the CPU. It is given the relay's dropout masks. Each step's loss, gradients, updated parameters and
        buffers are compared by `torch.equal`; what README, "Exactness", lists as equal to rounding, and devices that do
        not run PyTorch, to `Verification.tolerance`. Afterwards weights, optimizer states, step count, loss scale and
        random generators are as before, and the position of batches that have `state_dict` and `load_state_dict`.

        Args:
            batches: a batch for each step, as `step` takes them. A generator is used up.
            steps: how many batches to take; all if not given.
            learning_rate: the learning rate of a step by its number; the present one if not given.
            as_pieces: whether each of `batches` is a list of pieces, as `step(pieces=...)` takes them.
            weights: what the pieces of each step count, as `step(pieces=..., weights=...)` takes it.
            active_layers: the layers that take part in each step, as `step` takes them, or a function that gives them
                by the number of the step.

        Returns a `relay.Verification`, which prints as a sentence. Raises VerificationError for a model that cannot be
        compared, and OutOfMemory, with the bytes that are needed, if the host has too little.
        """
        self._check_usable()
        self._refuse_among_ranks("verify", "Verify the run in one process.")
        if weights is not None and not as_pieces:
            raise TypeError("weights= are the weights of pieces: set as_pieces=True. A batch that is cut has none.")
        return verify(self, self.step, batches, steps, learning_rate, as_pieces, weights, active_layers)

    @as_if_alone()
    def prepare(self, batch: Any) -> None:
        """Partition, capture, compile and allocate for batches like this one, and change nothing else.

        `ledger` and `baseline_device_bytes` are known after it.
        """
        self._check_usable()
        given = batch if self._together is None or not is_empty(batch) else stand_in(batch, self.options.microbatches)
        self._allocated(self._prepare_batch(given), self.param_groups, training=True)

    def _prepare_batch(
        self,
        batch: Any,
        training: bool = True,
        active_layers: Sequence[int | str] | None = None,
        **asked: Any,
    ) -> PreparedBatch:
        """The batch cut into micro-batches, with the compiled model for each. `asked` is what else a step is given."""
        prepared_batch = self._compiler.prepare(batch, training, active_layers, **asked)
        if training and not self.baseline_device_bytes:
            self.baseline_device_bytes = self._compiler.baseline_device_bytes(prepared_batch.compiled[0])
        return prepared_batch

    def _allocated(
        self, batch: PreparedBatch, groups: Sequence[Mapping[str, Any]], training: bool
    ) -> PreparedStep:
        """What a pass over the batch runs on. Raises OutOfMemory, with what would fit."""
        try:
            return self._session.prepare(batch.compiled, groups, training)
        except OutOfMemory as failure:
            if batch.compiled[0].head is None or failure.what.startswith("This run on the host"):
                raise
            of_first = functools.partial(self._compiler.first_over_batch, batch.pieces, training=training)
            raise with_largest_batch(
                failure, batch.compiled, batch.pieces.sizes, of_first, self.options.stash, self.options.slots
            ) from failure

    def _warn_of_eval_mode(self) -> None:
        """Warn, before the first step, of a model that is in eval mode."""
        if self._begun:
            return
        self._begun = True
        if not any(module.training for module in self._compiler.modules or [self._model]):
            warnings.warn(
                "The model is in eval mode, so it trains without dropout and with the running statistics of its norms, "
                "as in plain PyTorch. Call model.train() before the step if that is not what you want "
                "(from_pretrained gives models in eval mode).",
                stacklevel=6,
            )

    # -- looking at runs, and ending them ----------------------------------------------------------------------

    def start_trace(self) -> Trace:
        """Record when each call runs, from the next step on, until `stop_trace`."""
        self._session.trace = Trace()
        return self._session.trace

    def stop_trace(self) -> None:
        """Stop recording."""
        self._session.trace = None

    def reopen(self) -> None:
        """Open the devices again after DeviceLost. The host's memory is intact, and is sent again as it is needed.

        Raises InconsistentState if the step that was lost had been applied in part; then load a checkpoint.
        """
        refuse_in_child(self._process)
        self._refuse_among_ranks("reopen", "Start all ranks again, and load the newest checkpoint.")
        session = self._session
        session.guard.end_on_host()
        broken = session.guard.broken
        session.reopen(*open_again(self.options.device, session.capacity))
        session.guard.broken = broken
        self._check_usable()

    def close(self) -> None:
        """Finish what runs, stop the device's queues and free its memory.

        The weights stay in the model: each of its tensors has memory of its own again. They are moved layer by layer,
        so the host holds one layer more than while training. In a forked child, which has none of these, it does
        nothing.
        """
        if os.getpid() != self._process:
            return
        try:
            self.wait_saved()
            self.synchronize()
        finally:
            together, store = self._together, self._session.store
            ended = self._closed or self._failed or self._session.guard.broken is not None
            if together is not None and not ended and together.join_end():
                together.join_weights(store)
            self._session.close()
            store.give_back()
            if together is not None:
                together.close()
            self._closed = True

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._failed = self._failed or kind is not None
        self.close()


Trainer.__doc__ = (Trainer.__doc__ or "").replace("{options}", textwrap.indent(documentation(), "    "))


def _make_ready(held: weakref.ref[Trainer]) -> None:
    """Wait for deferred updates of a trainer that is open."""
    if (trainer := held()) is not None and not trainer._closed:
        trainer._check_usable()
        trainer.synchronize()


def _close_quietly(session: Session, process: int) -> None:
    """Free what a trainer that was garbage-collected held. Errors are ignored, since no caller is left.

    A forked child of the trainer's `process` has nothing to free: the threads and the device are not its own.
    """
    if os.getpid() == process:
        with suppress(Exception):
            session.close()
            session.store.give_back()
