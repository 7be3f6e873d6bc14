"""One pass over a model, from a batch in pieces to its losses: a training step, an evaluation, a prediction.

It puts together what the session has made ready and what the schedule runs, and reads back what a caller wants to
know. It keeps nothing from one pass to the next: step counts, scales and hyperparameters are the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from hal.event import Event
from relay.capture.memory_order import as_written, stored, stored_shape
from relay.data.microbatches import Batch, count_tokens, weigh
from relay.errors import NonFiniteLoss
from relay.metrics import Metrics, total_elapsed
from relay.runtime.compiler import Ready
from relay.runtime.schedule import ForwardPass, Ran, Relay, TrainingStep
from relay.runtime.session import Session
from relay.runtime.stages import CompiledModel
from relay.runtime.stash import Key, Stash


@dataclass(frozen=True)
class Outcome:
    """What became of a training step. With a `problem` nothing of it was applied."""

    ran: Ran
    loss: float
    problem: NonFiniteLoss | None = None


def train_step(
    session: Session,
    ready: Ready,
    groups: Sequence[Mapping[str, Any]],
    seed: int,
    number: int,
    scale: float,
    judge: Callable[[float], None] | None,
) -> Outcome:
    """Run a training step. `judge` is told a loss that is not finite, and raises NonFiniteLoss where it is not to be
    applied; None lets every loss pass. `groups` are the optimizer's parameter groups without their parameters."""
    compiled, weights = ready.compiled, ready.weights
    contents, plans = session.contents(compiled[0]), session.gradient_plans(compiled[0])
    relay, stash = session.make_ready(compiled, contents, plans, groups, "train")
    session.device.reset_peak()
    dtype = _loss_dtype(compiled[0])
    loss_row, losses, seed_row, seeds = session.scalars(len(weights), dtype)
    weights_on_host = torch.tensor(weights, dtype=dtype)
    losses_on_host = torch.zeros(len(weights), dtype=dtype)
    seeds_on_host = weights_on_host * scale

    def verdict(ran: Ran) -> Event:
        read = relay.drain_queue.read(losses_on_host, loss_row, ran.compute[-len(weights) :])
        ran.reads.append(read)

        def check() -> None:
            if judge is not None and not bool(torch.isfinite(losses_on_host).all()):
                judge(float((losses_on_host * weights_on_host).sum()))

        return session.host.run(check, [read], "verdict on the loss")

    first: list[Event] = []
    buffers = session.keep_buffers(compiled[0])
    try:
        with session.running(stash, first, buffers) as ran:
            first.append(relay.load_queue.write(seed_row, seeds_on_host))
            _bring(stash, ready)
            step = TrainingStep(
                compiled, contents, stash, seed, number, losses, plans, seeds, first[0], verdict, groups, 1.0 / scale
            )
            relay.train(step, ran)
    except NonFiniteLoss as problem:
        return Outcome(ran, problem.loss, problem)
    return Outcome(ran, _weighted(losses_on_host, weights))


def forward(
    session: Session,
    ready: Ready,
    seed: int,
    number: int,
    read_back: Callable[[Stash, Relay, Ran], None] | None = None,
) -> Outcome:
    """Run a forward pass alone. The loss is the mean over the batch, or 0 where the model has none."""
    compiled = ready.compiled
    contents = session.contents(compiled[0])
    relay, stash = session.make_ready(compiled, contents, [], [], "forward")
    session.store.version += 1  # the user may have written to the weights since: what slots still hold may be old
    session.device.reset_peak()
    dtype = _loss_dtype(compiled[0])
    loss_row, losses, _, _ = session.scalars(len(compiled), dtype)
    has_loss = compiled[0].partition.has_loss
    losses_on_host = torch.zeros(len(compiled), dtype=dtype)
    step = ForwardPass(compiled, contents, stash, seed, number, losses if has_loss else [])
    with session.running(stash, []) as ran:
        _bring(stash, ready)
        relay.forward(step, ran)
        if has_loss:
            ran.reads.append(relay.drain_queue.read(losses_on_host, loss_row, ran.compute[-len(compiled) :]))
        if read_back is not None:
            read_back(stash, relay, ran)
    session.take_interrupt()
    return Outcome(ran, _weighted(losses_on_host, ready.weights) if has_loss else 0.0)


def outputs(session: Session, pieces: Batch, compiled: Sequence[CompiledModel], seed: int, number: int) -> Any:
    """Run a forward pass and put the pieces' outputs together in the model's own structure.

    Tensors with the batch's length along dimension 0 are concatenated, scalars averaged over the batch; of others
    the first piece's are given.
    """
    rows: list[list[torch.Tensor]] = []

    def read_back(stash: Stash, relay: Relay, ran: Ran) -> None:
        for microbatch, one in enumerate(compiled):
            values = [one.partition.values[value] for value in one.partition.results]
            row = [torch.empty(stored_shape(value.shape, value.order), dtype=value.dtype) for value in values]
            rows.append(row)
            for value, target in zip(values, row, strict=True):
                access = stash.access(Key(value.index, False), microbatch, False)
                ran.reads.append(relay.drain_queue.read(target, access.view, access.waits))

    partition = compiled[0].partition
    weights = weigh(pieces, partition.loss_weight if partition.has_loss else None)
    forward(session, Ready(pieces, weights, list(compiled)), seed, number, read_back)
    values = [[one.partition.values[value] for value in one.partition.results] for one in compiled]
    written = [
        [as_written(target, value.order) for value, target in zip(*pair, strict=True)]
        for pair in zip(values, rows, strict=True)
    ]
    together = [_join(column, pieces.sizes, weights) for column in zip(*written, strict=True)]
    return partition.result_tree.fill(together)


def metrics_of(session: Session, outcome: Outcome, pieces: Batch, start: float, updates: Sequence[Event]) -> Metrics:
    """The figures of a pass that began at `start`; `updates` are the optimizer's work that goes to its account."""
    ran = outcome.ran
    return Metrics(
        loss=outcome.loss,
        grad_norm=ran.host.total_norm,
        seconds=perf_counter() - start,
        tokens=count_tokens(pieces),
        device_peak_bytes=session.device.memory().peak,
        host_bytes=session.host.ledger.total,
        compute_seconds=total_elapsed(ran.compute),
        transfer_seconds=total_elapsed([*ran.loads, *ran.reads, *ran.host.drains, *session.transfers]),
        optimizer_seconds=total_elapsed(updates),
        weight_bytes=ran.weight_bytes,
        skipped=ran.host.skipped or outcome.problem is not None,
    )


def _bring(stash: Stash, ready: Ready) -> None:
    for microbatch, tensors in enumerate(ready.pieces.pieces):
        partition = ready.compiled[microbatch].partition
        for value, tensor in zip(partition.inputs, tensors, strict=True):
            if partition.values[value].consumers:
                stash.bring(Key(value, False), microbatch, stored(tensor, partition.values[value].order))


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


def _loss_dtype(compiled: CompiledModel) -> torch.dtype:
    return torch.float32 if compiled.loss is None else compiled.partition.values[compiled.loss].dtype
