"""A batch as a pass takes it: micro-batches, their weights in the loss, and the compiled model for each.

Of a batch that is the share of one process, weights and shares of terms are known once all processes have sent what
their micro-batches count (`relay.distributed.together`). Nothing is compiled here. Invariant: what a share counts does
not depend on the other shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from relay.data.loss_weight import LossPlan
from relay.data.microbatches import (
    Batch,
    Piece,
    counts_of,
    holds_lists,
    refuse_without_whole,
    term_counts,
    with_term_shares,
    with_values,
)
from relay.errors import BatchError
from relay.runtime.stages import CompiledModel


@dataclass(frozen=True)
class PreparedBatch:
    """A batch in micro-batches, what each counts in the mean loss, and the compiled model for each.

    Micro-batches that count nothing are left out: these are numbers `numbers` of `count`. With a head over the whole
    batch there is one weight, that of the batch.

    Where the batch is the share of one of several processes, `counts` are what the micro-batches count, from which the
    weights follow once all processes know them (None: the weights are final), and `terms` what each counts in each term
    of the loss that has a share of its own. With `needs_whole` the share has to be prepared again, with the whole batch
    that it belongs to.
    """

    pieces: Batch
    weights: list[float]
    compiled: list[CompiledModel]
    numbers: list[int]
    count: int
    counts: list[float] | None = None
    terms: list[list[float]] = field(default_factory=list)
    needs_whole: bool = False

    @property
    def rows(self) -> list[Piece]:
        """What a pass is given: every micro-batch, and after them the whole batch if a head runs over it."""
        whole = self.pieces.whole
        return [*self.pieces.pieces, *([whole] if self.compiled[0].head is not None and whole is not None else [])]

    @property
    def inputs(self) -> list[list[torch.Tensor]]:
        """The tensors of each row."""
        return [row.tensors for row in self.rows]

    @property
    def whole(self) -> Piece | None:
        """The batch as one micro-batch; None if it was given in pieces."""
        return self.pieces.whole or (self.pieces.pieces[0] if len(self.pieces.pieces) == 1 else None)

    def by_number(self, outputs: Sequence[dict[str, Any]]) -> list[dict[str, Any] | None]:
        """What the micro-batches gave, with None for each that was left out; what a head over the whole batch gave."""
        if self.compiled[0].head is not None or not self.count:
            return list(outputs)
        found = dict(zip(self.numbers, outputs, strict=True))
        return [found.get(number) for number in range(self.count)]

    def with_term_shares(self, totals: Sequence[float]) -> PreparedBatch:
        """The share of a batch that counts `totals` in the terms of the loss."""
        if not totals:
            return self
        plans = [model.partition.loss_plan for model in self.compiled]
        return replace(self, pieces=with_term_shares(self.pieces, plans, self.terms, totals))


def share_of_batch(
    given: Batch, compiled: list[CompiledModel], plans: Sequence[LossPlan], whole: Piece | None
) -> PreparedBatch:
    """A batch that is the share of one process of the batch `whole`, if that is known.

    Its weights are final where the loss is a sum. Raises BatchError for pieces whose loss takes a value of the whole
    batch.
    """
    if whole is None and any(plan.needs_whole for plan in plans):
        if given.whole is None and len(given.pieces) > 1:
            refuse_without_whole()
        if holds_lists(given.whole or given.pieces[0]):
            raise BatchError(
                "The loss takes a value of the whole batch, such as the number of its targets, and the batch has lists "
                "with an entry for each sample, which several processes cannot join. Give tensors, or loss_weight=, a "
                "function of a micro-batch."
            )
        ones = [1.0] * len(compiled)
        return PreparedBatch(given, ones, compiled, list(range(len(compiled))), len(compiled), needs_whole=True)
    given = with_values(replace(given, whole=whole), plans)
    counts = counts_of(given, plans)
    weights = [1.0] * len(compiled) if counts is None else counts
    numbers = [number for number, weight in enumerate(weights) if weight != 0]  # the mean of nothing is undefined
    kept = numbers or [0]  # the model is compiled, even if nothing is to run
    extended = replace(given, pieces=[given.pieces[number] for number in kept])
    return PreparedBatch(
        extended,
        [weights[number] for number in kept],
        [compiled[number] for number in kept],
        kept,
        len(compiled),
        None if counts is None else [counts[number] for number in kept],
        term_counts(extended, [plans[number] for number in kept]),
    )
