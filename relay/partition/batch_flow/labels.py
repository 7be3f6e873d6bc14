"""The labels: what a value of a traced model has to do with the samples of a batch.

Nothing is decided here: `relay.partition.batch_flow.flow` gives each value its label.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from torch import fx


class Kind(enum.Enum):
    """What a value has to do with the samples of a batch."""

    FREE = "free"
    """The same however the batch is cut: parameters, constants, what is computed from them."""
    ROWS = "rows"
    """One of its dimensions is the batch's, and what belongs to a sample depends on that sample alone."""
    TERMS = "terms"
    """A sum of terms, each of which is the weighted sum of what the pieces of a batch give for it."""
    MIXED = "mixed"
    """Depends on several samples in another way: no sum over pieces gives it."""
    UNKNOWN = "unknown"
    """It went through something that cannot be followed."""


class Count(enum.Enum):
    """By what a piece's share in a term is counted."""

    SUM = "sum"
    """The term is a sum: every piece's is added as it is."""
    SAMPLES = "samples"
    """The term is a mean over samples (or something fixed): a piece's counts by its samples."""
    TARGETS = "targets"
    """The term is a mean over targets that are not masked, by their class weights if there are any."""


@dataclass(frozen=True)
class Term:
    """One term of a loss: `node` computes it. With `operand` it is what that argument adds to a sum instead."""

    node: fx.Node
    count: Count
    operand: int | None = None


@dataclass(frozen=True)
class Cause:
    """Why a value is mixed or unknown: the op where that began, and what it does, in words that follow its name."""

    op: str
    reason: str
    node: fx.Node | None = None
    layer: str = ""


@dataclass(frozen=True)
class Label:
    """What a value has to do with the batch.

    Of `ROWS`, dimension `dim` is the batch's: what stands at index i there belongs to sample (i // unit) % length.
    `given` values depend on the batch and on constants alone, on no trained parameter and no random number. A `MIXED`
    value with `numbers` holds at each index of `dim` that index itself, as arange(len(x)) does.
    """

    kind: Kind
    dim: int = -1
    unit: int = 1
    given: bool = False
    numbers: bool = False
    terms: tuple[Term, ...] = ()
    cause: Cause | None = None

    def derived(self, given: bool) -> Label:
        """The same for a value computed from this one."""
        return self if self.given == given else replace(self, given=given)


def free(given: bool = False) -> Label:
    """The label of what does not depend on the batch."""
    return Label(Kind.FREE, given=given)


def rows(dim: int, unit: int = 1, given: bool = False) -> Label:
    """The label of what has the batch's rows along `dim`."""
    return Label(Kind.ROWS, dim, unit, given)
