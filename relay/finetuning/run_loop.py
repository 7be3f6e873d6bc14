"""The steps of a fine-tuning: rates, evaluations, samples, early stopping, checkpoints and callbacks, in order.

The trainer, the batches and the callbacks are made elsewhere. Invariant: what a step does depends on its number and the
state in the checkpoint alone, so that a run that was killed goes on as if it had not been.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from relay.checkpoint_manager import Checkpoints
from relay.finetuning.data.batches import Batches, trained_targets
from relay.finetuning.data.tokenise import IGNORED
from relay.finetuning.options import FinetuneOptions
from relay.finetuning.reporting import Callback
from relay.finetuning.samples import Sampler
from relay.finetuning.schedule import learning_rate
from relay.trainer import Trainer

EVALUATIONS = 5
"""How often a run evaluates where --eval-every is not given."""


@dataclass
class Progress:
    """What a run has found so far. It is part of each checkpoint."""

    evaluations: list[list[float]] = field(default_factory=list)
    best: float = math.inf
    without_better: int = 0
    stopped: bool = False

    def state_dict(self) -> dict[str, Any]:
        best = None if math.isinf(self.best) else self.best
        return {
            "evaluations": [list(one) for one in self.evaluations], "best": best,
            "without_better": self.without_better, "stopped": self.stopped,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.evaluations = [list(one) for one in state["evaluations"]]
        self.best = math.inf if state["best"] is None else state["best"]
        self.without_better, self.stopped = state["without_better"], state["stopped"]

    def evaluated(self, step: int) -> bool:
        """Whether the model after that step was evaluated."""
        return any(one[0] == step for one in self.evaluations)

    def add(self, step: int, loss: float, patience: int | None) -> bool:
        """Note a held-out loss. Returns whether it is the lowest so far."""
        self.evaluations.append([step, loss])
        better = loss < self.best
        self.best = min(self.best, loss)
        self.without_better = 0 if better else self.without_better + 1
        self.stopped = patience is not None and self.without_better >= patience
        return better


def evaluate(trainer: Trainer, held_out: Batches) -> dict[str, float]:
    """The mean loss over all targets of held-out rows; for classes also the share that is right."""
    task = held_out.task
    total = right = 0.0
    count = 0
    for batch, real in held_out.in_order():
        if task in ("causal", "seq2seq"):
            targets = trained_targets(batch, task)
            total += float(trainer.evaluate(batch).loss) * targets
        else:
            logits = trainer.predict(batch).logits[:real].float()
            labels = batch["labels"][:real]
            if task == "regression":
                targets = real
                total += float((logits.squeeze(-1) - labels).square().sum())
            else:
                logits = logits.reshape(-1, logits.shape[-1])
                labels = labels.reshape(-1)
                targets = int(labels.ne(IGNORED).sum())
                total += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
                right += int((logits.argmax(dim=-1) == labels).sum())
        count += targets
    found = {"held_out_loss": total / max(1, count)}
    if task in ("classification", "token-classification"):
        found["accuracy"] = right / max(1, count)
    return found


class RunLoop:
    """A run of `steps` steps with everything that happens between them.

    `improved` is called where the held-out loss is the lowest so far and the model is to be kept.
    """

    def __init__(
        self, trainer: Trainer, training: Batches, held_out: Batches | None, own: FinetuneOptions, steps: int,
        lr: float, progress: Progress, callbacks: Sequence[Callback], sampler: Sampler | None,
        improved: Callable[[], None],
    ) -> None:  # fmt: skip
        self._trainer = trainer
        self._training = training
        self._held_out = held_out
        self._own = own
        self._steps = steps
        self._lr = lr
        self._progress = progress
        self._callbacks = callbacks
        self._sampler = sampler
        self._improved = improved
        self._every = own.eval_every or max(1, -(-steps // EVALUATIONS))
        self.latest: dict[str, float] = {}

    def run(self, checkpoints: Checkpoints | None) -> Iterator[dict[str, Any]]:
        """Make the steps, and yield the figures of each and of each evaluation."""
        trainer, progress = self._trainer, self._progress
        begin = trainer.steps
        batches = self._training.steps(begin, self._steps, self._own.workers)
        while True:
            step = trainer.steps
            if self._due(step) and not progress.evaluated(step):
                figures = self._evaluate(step)
                yield figures
                if checkpoints is not None and step:
                    checkpoints.after_step()
            if progress.stopped or step >= self._steps:
                return
            for group in trainer.optimizer.param_groups:
                group["lr"] = learning_rate(step, self._steps, self._lr, self._own.schedule, self._own.warmup)
            batch = next(batches)
            metrics = trainer.step(batch)
            figures = {
                "step": trainer.steps,
                "loss": metrics.loss,
                "lr": trainer.optimizer.param_groups[0]["lr"],
                "grad_norm": metrics.grad_norm,
                "tokens_per_second": metrics.tokens_per_second,
                "trained_targets": trained_targets(batch, self._training.task),
                "seconds": metrics.seconds,
                "device_peak_bytes": metrics.device_peak_bytes,
                "host_bytes": metrics.host_bytes,
                "weight_bytes": metrics.weight_bytes,
            }
            for callback in self._callbacks:
                callback.on_step(figures)
            yield figures
            if checkpoints is not None and not (self._due(trainer.steps) and not progress.evaluated(trainer.steps)):
                checkpoints.after_step()

    def _due(self, step: int) -> bool:
        return self._held_out is not None and (step % self._every == 0 or step == self._steps)

    def _evaluate(self, step: int) -> dict[str, Any]:
        assert self._held_out is not None
        found = evaluate(self._trainer, self._held_out)
        better = self._progress.add(step, found["held_out_loss"], self._own.patience)
        if better and step and (self._own.keep_best or self._own.patience is not None):
            self._improved()
        figures: dict[str, Any] = {"step": step, **found, "best": self._progress.best, "samples": []}
        if self._sampler is not None and step:
            figures["samples"] = self._sampler.write(self._trainer)
        for callback in self._callbacks:
            callback.on_evaluation(figures)
        self.latest = found
        return figures
