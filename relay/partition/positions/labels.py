"""What a value of the last segment is to the positions of a micro-batch, and how a chunk's graph takes an operand.

Plain data. Invariant: a label says what holds for every position; what is not known has no label, but `NotByPosition`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

from torch import fx

Slice = tuple[int, int, int]
"""A dimension of the positions, and the first and the last + 1 that are taken of it."""


class NotByPosition(Exception):
    """The loss cannot be computed over chunks of positions. The message says which op is in the way, and why."""


class HasOwnChunks(NotByPosition):
    """The model computes its loss over chunks of its own."""


class Kind(enum.Enum):
    """What a value depends on."""

    STATE = "parameters, buffers and constants alone"
    GIVEN = "the batch, and nothing that is trained"
    ROWS = "one row for each position, computed from the rows of that position"
    TERM = "a number that is a sum over positions"


@dataclass(frozen=True)
class Label:
    """The label of a value. The first `lead` dimensions of ROWS are the positions; `part` is what was sliced of them.

    `trained` is True for a STATE that depends on a parameter that is trained. ROWS that are `moved` have their last
    dimension behind the first one, where PyTorch's losses over several dimensions take the classes.
    """

    kind: Kind
    lead: int = 0
    part: tuple[Slice, ...] = ()
    trained: bool = False
    moved: bool = False


@dataclass(frozen=True, eq=False)
class OfState:
    """An operand made of parameters, in the given shape (or its own)."""

    node: fx.Node
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class OfBatch:
    """An operand made of the batch: whole in the given shape, or (with `lead`) one row for each position.

    It is first expanded to `shape`. With `part` its positions are those of a slice; it is padded with `fill` to all.
    """

    node: fx.Node
    shape: tuple[int, ...]
    lead: int | None = None
    part: tuple[Slice, ...] = ()
    fill: int = 0


@dataclass(frozen=True, eq=False)
class Count:
    """How many targets a mean is over: those that are not `ignored`, each with the weight of its class if given."""

    target: fx.Node
    weight: fx.Node | None
    ignored: int


@dataclass(frozen=True, eq=False)
class Written:
    """How a chunk's graph writes a node: a call whose arguments hold nodes and operands, then a division."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    divisor: Count | int | None = None


def rows_of(shape: tuple[int, ...], lead: int) -> int:
    """The number of positions of a value with that shape."""
    return math.prod(shape[:lead])
