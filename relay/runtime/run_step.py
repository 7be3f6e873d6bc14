"""One pass over a model, from micro-batches to a loss: a training step, an evaluation, a prediction.

It combines what the session has prepared with what the scheduler submits, and reads back the results. It keeps nothing
from one pass to the next: step counts, loss scales and hyperparameters are the trainer's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from hal.event import Event
from relay.capture.memory_order import as_written, stored, stored_shape
from relay.data.join_outputs import AVERAGED, join_output
from relay.data.microbatches import Batch, Piece, count_tokens
from relay.eps.step_record import SubmittedStep
from relay.errors import NonFiniteLoss
from relay.metrics import Metrics, total_elapsed
from relay.runtime.schedule import ForwardPass, PreparedStep, TrainingStep
from relay.runtime.session import Session
from relay.runtime.stash.plan import Key
from relay.runtime.ties.find_rows import with_touched_rows

logger = logging.getLogger("relay")


def train_step(
    session: Session,
    prepared: PreparedStep,
    inputs: Sequence[Sequence[torch.Tensor]],
    weights: Sequence[float],
    groups: Sequence[Mapping[str, Any]],
    seed: int,
    number: int,
    scale: float,
    on_nonfinite: str,
    read_back: Callable[[SubmittedStep], None] | None = None,
    first_microbatch: int = 0,
) -> SubmittedStep:
    """Run a training step.

    Args:
        session: what `prepared` was prepared by.
        prepared: the pass.
        inputs: the tensors of each micro-batch, in the order of the partition's inputs; with a head over the whole
            batch, then those of the batch.
        weights: what each loss counts in the mean loss: one for each micro-batch, or one for the whole batch.
        groups: the optimizer's parameter groups without their parameters.
        seed: of all random numbers.
        number: of the step.
        scale: the loss scale; 1 for none.
        on_nonfinite: what a loss that is NaN or infinite does. "stop" applies nothing and raises NonFiniteLoss, "skip"
            applies nothing and logs a warning, "log" applies the step and logs a warning, "apply" applies it.
        read_back: called when the kernels are submitted; it submits reads of further results.
        first_microbatch: the number of the first micro-batch in the whole batch.

    Returns:
        The submitted step, which has ended except for deferred updates.
    """
    count = len(weights)
    if not count:
        return _step_without_work(session, prepared, groups, number, 1.0 / scale, on_nonfinite)
    _check_indices(prepared, inputs)
    turn, scalars = prepared.turn, prepared.scalars
    _reset_peaks(prepared)
    dtype = prepared.compiled[0].loss_dtype
    weights_on_host = torch.tensor(weights, dtype=dtype)
    losses_on_host = torch.zeros(count, dtype=dtype)
    seeds_on_host = weights_on_host * scale

    def submit_verdict(submitted: SubmittedStep) -> Event:
        read = turn.drain.read(losses_on_host, scalars.loss_row, submitted.compute[-count:])
        submitted.reads.append(read)

        def check() -> None:
            if on_nonfinite in ("stop", "skip") and not bool(torch.isfinite(losses_on_host).all()):
                total = float((losses_on_host * weights_on_host).sum())
                raise NonFiniteLoss(total, number, losses_on_host.tolist())

        checked = session.host.run(check, [read], "check of the loss")
        return session.server.agree_on_loss(checked, lambda: weighted(losses_on_host, weights), number, submitted)

    first: list[Event] = []
    inputs, touched = with_touched_rows(prepared.compiled, session.rows.choose(prepared.compiled, inputs))
    try:
        with session.guard.running(prepared, first) as submitted:
            first.append(turn.load.write(scalars.seed_row, seeds_on_host))
            first += session.rows.gather(prepared.compiled[0])
            submitted.touched_rows = touched
            _write_inputs(prepared, inputs)
            step = TrainingStep(
                prepared, seed, number, session.trace, first[0], submit_verdict, groups, 1.0 / scale,
                first=first_microbatch,
            )  # fmt: skip
            prepared.scheduler.train(step, submitted)
            if read_back is not None:
                read_back(submitted)
    except NonFiniteLoss as problem:
        return _skipped(problem, submitted, on_nonfinite)
    session.guard.note_updates(submitted)
    submitted.result.loss = session.server.whole_loss(weighted(losses_on_host, weights))
    if on_nonfinite == "log" and not math.isfinite(submitted.result.loss):
        logger.warning("The loss of step %d is %s; the step is applied all the same.", number, submitted.result.loss)
    return submitted


def _step_without_work(
    session: Session,
    prepared: PreparedStep,
    groups: Sequence[Mapping[str, Any]],
    number: int,
    unscale: float,
    on_nonfinite: str,
) -> SubmittedStep:
    """A training step in which this process has no micro-batch: others have, and it updates what it owns."""
    server = session.server
    try:
        with session.guard.running(prepared, []) as submitted:
            submitted.verdict = server.agree_on_loss(None, list, number, submitted)
            for plan in reversed(prepared.gradient_plans):
                if plan.names:
                    server.collect_nothing(plan, groups, unscale, submitted)
            server.conclude(prepared.gradient_plans, prepared.contents, [], groups, unscale, submitted)
    except NonFiniteLoss as problem:
        return _skipped(problem, submitted, on_nonfinite)
    session.guard.note_updates(submitted)
    submitted.result.loss = server.whole_loss([])
    return submitted


def _skipped(problem: NonFiniteLoss, submitted: SubmittedStep, on_nonfinite: str) -> SubmittedStep:
    """A step whose loss is not finite, with nothing applied. Raises the problem unless such steps are skipped."""
    if on_nonfinite == "stop":
        raise problem
    logger.warning("%s The batch is skipped.", problem)
    submitted.result.loss, submitted.result.skipped = problem.loss, True
    return submitted


def read(prepared: PreparedStep, submitted: SubmittedStep, microbatch: int, key: Key) -> torch.Tensor:
    """Submit the read of a value or of its gradient. The tensor holds it once the pass has ended.

    With a head over the whole batch its values are those of one micro-batch more.
    """
    value = prepared.rows[microbatch].partition.values[key.value]
    order = value.gradient_order if key.gradient else value.order
    target = torch.empty(stored_shape(value.shape, order), dtype=value.dtype)
    lane = prepared.lanes[prepared.stash.last_written(key, microbatch)]
    access = prepared.stash.access(key, microbatch, lane.number, False)
    submitted.reads.append(lane.drain.read(target, access.view, access.waits))
    return as_written(target, order)


class TrainingReads:
    """What a caller gets of a training step besides its loss: outputs of the model, gradients of the batch's tensors.

    What is read lives in the stash until the end of the pass (`relay.runtime.memory_plan`).
    """

    def __init__(self, prepared: PreparedStep, pieces: Sequence[Piece]) -> None:
        self._prepared = prepared
        self._pieces = pieces
        self._results: list[dict[int, torch.Tensor]] = []
        self._gradients: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def submit(self, submitted: SubmittedStep) -> None:
        """Submit the reads, once the kernels are submitted."""
        for microbatch, (model, piece) in enumerate(zip(self._prepared.rows, self._pieces, strict=True)):
            partition = model.partition
            numbers = {number for output in partition.named_outputs.values() for number in output.numbers}
            self._results.append(
                {
                    number: read(self._prepared, submitted, microbatch, Key(partition.results[number], False))
                    for number in sorted(numbers)
                }
            )
            reached = {value for stage in model.stages if stage.backward for value in stage.backward.value_gradients}
            self._gradients.append(
                [
                    (source, read(self._prepared, submitted, microbatch, Key(partition.inputs[number], True)))
                    for number, source in piece.sources.items()
                    if partition.inputs[number] in reached
                ]
            )

    def outputs(self) -> list[dict[str, Any]]:
        """For each micro-batch the outputs that were asked for, by name, once the step has ended.

        With a head over the whole batch these are those of the batch, and the only ones.
        """
        head = self._prepared.compiled[0].head
        return [
            {
                name: output.tree.fill([tensors[number] for number in output.numbers])
                for name, output in model.partition.named_outputs.items()
            }
            for model, tensors in zip(self._prepared.rows, self._results, strict=False)  # none if nothing ran
            if head is None or model is head
        ]

    def pass_gradients_on(self, unscale: float, were_cut: bool) -> None:
        """Let autograd take the gradients of the batch's tensors to where these come from, as `backward` would.

        Micro-batches that `were_cut` from one batch have one backward: that of the batch. Others have one each.
        """
        passes = [[pair for row in self._gradients for pair in row]] if were_cut else self._gradients
        passes = [row for row in passes if row]
        for number, row in enumerate(passes):
            gradients = [gradient if unscale == 1 else gradient * unscale for _, gradient in row]
            sources = [source for source, _ in row]
            torch.autograd.backward(sources, gradients, retain_graph=number < len(passes) - 1)


def forward(
    session: Session,
    prepared: PreparedStep,
    inputs: Sequence[Sequence[torch.Tensor]],
    weights: Sequence[float],
    seed: int,
    number: int,
    read_back: Callable[[SubmittedStep], None] | None = None,
) -> SubmittedStep:
    """Run a forward pass alone, if there are micro-batches. The loss is the batch's mean, or 0 where there is none.

    `read_back` is called when the kernels are submitted; it submits reads of further results.
    """
    if not weights:
        return SubmittedStep()  # this process has no micro-batch
    _check_indices(prepared, inputs)
    compiled = prepared.compiled
    _reset_peaks(prepared)
    has_loss = compiled[0].partition.has_loss
    losses_on_host = torch.zeros(len(weights), dtype=compiled[0].loss_dtype)
    inputs = session.rows.choose(compiled, inputs)
    gathered: list[Event] = []
    with session.guard.running(prepared, gathered) as submitted:
        gathered += session.rows.gather(compiled[0])
        _write_inputs(prepared, inputs)
        prepared.scheduler.forward(ForwardPass(prepared, seed, number, session.trace), submitted)
        if has_loss:
            row, computed = prepared.scalars.loss_row, submitted.compute[-len(weights) :]
            submitted.reads.append(prepared.turn.drain.read(losses_on_host, row, computed))
        if read_back is not None:
            read_back(submitted)
    session.guard.deliver_interrupts()
    if has_loss:
        submitted.result.loss = sum(weighted(losses_on_host, weights))
    return submitted


def outputs(
    session: Session,
    prepared: PreparedStep,
    batch: Batch,
    inputs: Sequence[Sequence[torch.Tensor]],
    weights: Sequence[float],
    seed: int,
    number: int,
) -> Any:
    """Run a forward pass on `inputs` (as `train_step` takes them) and return the outputs in the model's own structure.

    Those of a head over the whole batch are returned as they are. Others are joined (`relay.data.join_outputs`). Raises
    PartitionError for an output that micro-batches do not give.
    """
    compiled = prepared.compiled
    rows: list[list[torch.Tensor]] = []

    def read_back(submitted: SubmittedStep) -> None:
        for row, model in enumerate(prepared.rows):
            rows.append([read(prepared, submitted, row, Key(value, False)) for value in model.partition.results])

    forward(session, prepared, inputs, weights, seed, number, read_back)
    head = compiled[0].head
    if head is not None:
        return head.partition.result_tree.fill(rows[-1])
    partition = compiled[0].partition
    plan = partition.loss_plan
    by_samples = [size / sum(batch.sizes) for size in batch.sizes]
    together = [
        join_output(
            column,
            batch.sizes,
            weights if number in plan.summed else by_samples,
            AVERAGED if number in plan.summed or (plan.unknown and not column[0].dim()) else plan.joins.get(number),
            f"output {number} of the model",
        )
        for number, column in enumerate(zip(*rows, strict=True))
    ]
    return partition.result_tree.fill(together)


def metrics_of(
    session: Session,
    submitted: SubmittedStep,
    batch: Batch,
    start: float,
    outputs: Sequence[dict[str, Any] | None] = (),
) -> Metrics:
    """The figures of a pass that began at `start` (of `perf_counter`), with the outputs that were asked for."""
    transfers = [*submitted.loads, *submitted.reads, *submitted.drains, *session.guard.transfers]
    return Metrics(
        loss=submitted.result.loss,
        grad_norm=submitted.result.grad_norm,
        seconds=perf_counter() - start,
        tokens=count_tokens(batch),
        device_peak_bytes=max(lane.device.memory().peak for lane in session.lanes),
        host_bytes=session.host.ledger.total,
        compute_seconds=total_elapsed(submitted.compute),
        transfer_seconds=total_elapsed(transfers),
        optimizer_seconds=total_elapsed(submitted.ended_updates),
        weight_bytes=submitted.weight_bytes,
        skipped=submitted.result.skipped,
        resident_layers=submitted.resident_layers,
        optimizer_bytes=submitted.optimizer_bytes,
        outputs=list(outputs),
    )


def _reset_peaks(prepared: PreparedStep) -> None:
    for lane in prepared.lanes:
        lane.device.reset_peak()


def _check_indices(prepared: PreparedStep, inputs: Sequence[Sequence[torch.Tensor]]) -> None:
    """Refuse indices in the batch that are outside of what they index."""
    for microbatch, (model, tensors) in enumerate(zip(prepared.rows, inputs, strict=True)):
        partition, checks = (model.whole or model).partition, model.index_checks
        used = [
            stored(tensors[position], partition.values[partition.inputs[position]].order) for position in checks.used
        ]
        checks.check(used, microbatch)


def _write_inputs(prepared: PreparedStep, inputs: Sequence[Sequence[torch.Tensor]]) -> None:
    """Write the tensors of the batch that a segment uses into the stash."""
    for row, (model, tensors) in enumerate(zip(prepared.rows, inputs, strict=True)):
        partition = model.partition
        for value, tensor in zip(partition.inputs, tensors, strict=True):
            if partition.values[value].consumers:
                prepared.stash.write_input(Key(value, False), row, stored(tensor, partition.values[value].order))


def weighted(losses: torch.Tensor, weights: Sequence[float]) -> list[float]:
    """The parts of the batch's loss: each micro-batch's, rounded to its own dtype as plain training would have it."""
    return [float(loss * weight) for loss, weight in zip(losses, weights, strict=True)]
