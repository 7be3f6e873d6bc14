"""The weight of each micro-batch in the loss of the whole batch, and what its program is given of the whole batch.

The loss of a batch is a sum of terms. The term of a micro-batch counts by its samples, by its targets that are not
masked, or fully if it is a sum. If all terms count alike, the loss of each micro-batch is multiplied by its share, and
so is its gradient. Otherwise the program multiplies each term by its own share, which is an input. Values that follow
from the batch alone and take samples together, such as the number of targets in it, are inputs as well: those of the
whole batch.

Which terms a loss has is decided in `relay.partition.loss_terms`; here they are counted. Invariant: the losses of the
micro-batches times their weights add up to the loss of the batch, unless the plan has a `problem` or is `unknown`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from relay.capture.guards.data_guards import Guard
from relay.data.join_outputs import Join

SUM = "sum"
"""The share of a micro-batch in a sum: 1."""
SAMPLES = "samples"
"""The share of a micro-batch in a mean over samples: its part of the samples."""


@dataclass(frozen=True, eq=False)
class TargetCount:
    """Counts the targets of a micro-batch that are not `ignored`, each as the weight of its class if there are any.

    `graph` takes a micro-batch's tensors and then the values of the whole batch. It returns the targets, and the
    weights of the classes if they have any.
    """

    graph: fx.GraphModule
    ignored: int

    def count(self, tensors: Sequence[torch.Tensor]) -> float:
        """The number of targets that count, or the sum of their class weights."""
        with torch.no_grad():
            target, *class_weights = self.graph(*tensors)
            counted = target[target != self.ignored]
            return float(class_weights[0][counted].sum(dtype=torch.float64)) if class_weights else counted.numel()


@dataclass(frozen=True, eq=False)
class StatedCount:
    """What the user says a micro-batch counts: `function` of the micro-batch, in the form of the batch."""

    function: Callable[[Any], float]


Share = str | TargetCount | StatedCount


@dataclass(frozen=True, eq=False)
class LossPlan:
    """How the losses of micro-batches make the loss of the batch.

    `share` is what the loss of a micro-batch counts by. `whole_values` computes, from the batch's tensors, the values
    of the whole batch that the program is given; after them it is given the share in each of `term_shares`, in the
    dtypes `term_dtypes`. Of the model's other outputs, scalars `summed` add up as the loss does, and `joins` says how
    those of micro-batches make the batch's, where that is known.

    `problem` says why the micro-batches cannot make the loss of the batch, and `mixed_output` why they cannot make an
    output. `unknown` says what could not be followed. `guards` are the model's questions about the whole batch. With
    `uses_length` the program computes with the length of the whole batch, which is a number in it.
    """

    share: Share = SAMPLES
    whole_values: fx.GraphModule | None = None
    term_shares: tuple[Share, ...] = ()
    term_dtypes: tuple[torch.dtype, ...] = ()
    summed: frozenset[int] = frozenset()
    joins: Mapping[int, Join] = field(default_factory=dict)
    problem: str | None = None
    mixed_output: str | None = None
    unknown: str | None = None
    guards: tuple[Guard, ...] = field(default=())
    uses_length: bool = False

    @property
    def is_rewritten(self) -> bool:
        """Whether the program computes another loss than the model does for the micro-batch."""
        return self.whole_values is not None or bool(self.term_shares)

    @property
    def needs_whole(self) -> bool:
        """Whether the program takes something of the whole batch that does not add up over its parts."""
        return self.whole_values is not None or self.uses_length

    def form(self) -> Any:
        """What is equal for micro-batches whose losses are computed in one way."""
        kinds = tuple(one if isinstance(one, str) else type(one).__name__ for one in (self.share, *self.term_shares))
        return kinds, self.term_dtypes, self.whole_values is not None, self.summed
