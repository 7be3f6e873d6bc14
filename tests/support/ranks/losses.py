"""Losses of several terms, or of values of the whole batch, and what ranks that train and evaluate them return."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

import relay
from tests.support.ranks.models import batch, layers, shares

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Result = tuple[float, float, torch.Tensor, str]


def of_two_counts(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, targets, ignore_index=-100) + 0.1 * output.pow(2).mean()


def over_the_number_of_targets(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    total = nn.functional.cross_entropy(output, targets, ignore_index=-100, reduction="sum")
    return total / (targets != -100).sum()


def of_both(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return of_two_counts(output, targets) + over_the_number_of_targets(output, targets)


def over_the_length_before_the_sum(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    each = nn.functional.cross_entropy(output, targets, ignore_index=-100, reduction="none")
    return (each / len(targets)).sum()


LOSSES: dict[str, Loss] = {
    "two counts": of_two_counts,
    "the number of targets": over_the_number_of_targets,
    "both": of_both,
    "the length, before the sum": over_the_length_before_the_sum,
}


def train_losses(rank: int, count: int, names: Sequence[str], sizes: Sequence[int], masked: int) -> dict[str, Result]:
    """For each loss: that of a step, that of a batch which the last rank alone evaluates, a weight, and an error.

    The error is that of a batch whose targets are all masked, and of which only the first rank has samples.
    """
    found = {}
    for name in names:
        share = shares(batch(0, sum(sizes), masked), sizes)[rank]
        with relay.Trainer(layers(), LOSSES[name], optimizer=relay.SGD(lr=0.1), microbatches=2) as trainer:
            loss = trainer.step(share).loss
            evaluated = trainer.evaluate(batch(1, 5)).loss if rank == count - 1 else 0.0
            trainer.predict(batch(1, 1)[0])
            weight, error = trainer.state_dict()["0.weight"].clone(), ""
            try:
                trainer.step(shares(batch(2, 2, 2), [2] + [0] * (count - 1))[rank])
            except relay.BatchError as failure:
                error = str(failure)
            found[name] = loss, evaluated, weight, error
    return found


def train_unequal_lengths(rank: int, count: int) -> str:
    """A step of sequences whose length differs by rank. Returns the error."""
    inputs, targets = torch.ones(2, 3 + rank, 8), torch.zeros(2, 3 + rank, dtype=torch.long)

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return over_the_number_of_targets(output.flatten(0, 1), targets.flatten())

    try:
        with relay.Trainer(layers(), loss, microbatches=2) as trainer:
            trainer.step((inputs, targets))
    except relay.BatchError as error:
        return str(error)
    return "no error"
