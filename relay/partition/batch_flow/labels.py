"""What a value of a traced model has to do with the batch: the labels, and two traces that show its length.

One code is traced for two lengths of a batch. Where the two graphs have the same ops, a size or a number that differs
between them comes from the batch's length, and one that does not is a constant. Nothing is decided here:
`relay.partition.batch_flow.flow` gives each value its label. Invariant: a `TracePair` exists only where the two traces
have the same ops in the same order.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree


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


class TracePair:
    """Two traces of one code: `small` for a piece of `lengths[0]` samples, `large` for a batch of `lengths[1]`."""

    def __init__(self, small: fx.GraphModule, large: fx.GraphModule, lengths: tuple[int, int]) -> None:
        self.small, self.large, self.lengths = small, large, lengths
        pairs = zip(large.graph.nodes, small.graph.nodes, strict=True)
        self.small_of: dict[fx.Node, fx.Node] = dict(pairs)

    def tensors(self, node: fx.Node) -> tuple[Any, Any]:
        """What the node of the large trace holds in both, small and large: fake tensors, or tuples of them."""
        return self.small_of[node].meta.get("val"), node.meta.get("val")

    def varying(self, node: fx.Node, item: int | None = None) -> list[int]:
        """The dimensions whose size comes from the batch's length."""
        small, large = self.tensors(node)
        if item is not None:
            small, large = small[item], large[item]
        if not isinstance(large, torch.Tensor):
            return []
        return [dim for dim, (one, other) in enumerate(zip(small.shape, large.shape, strict=True)) if one != other]

    def proportional(self, small: float, large: float) -> bool:
        """Whether a number grows as the batch does."""
        return small != large and abs(small * self.lengths[1] - large * self.lengths[0]) <= 1e-9 * abs(
            large * self.lengths[0]
        )

    def literals(self, node: fx.Node) -> Iterator[tuple[int, Any, Any]]:
        """The arguments that are plain values: which leaf each is, and what it is in both traces."""
        other = self.small_of[node]
        large = pytree.tree_flatten((node.args, node.kwargs))[0]
        small = pytree.tree_flatten((other.args, other.kwargs))[0]
        for place, (value, counterpart) in enumerate(zip(large, small, strict=True)):
            if not isinstance(value, fx.Node):
                yield place, counterpart, value


def why_unlike(small: fx.GraphModule, large: fx.GraphModule) -> str | None:
    """Where two traces have other ops than each other, in words; None where they pair."""
    pairs = list(zip(small.graph.nodes, large.graph.nodes, strict=False))
    if len(small.graph.nodes) != len(large.graph.nodes):
        return f"it takes {len(small.graph.nodes)} operations for a piece and {len(large.graph.nodes)} for the batch"
    place = dict(pairs)
    for one, other in pairs:
        unlike = f"{_name(other)} stands where a piece has {_name(one)}"
        if one.op != other.op or (one.op == "call_function" and one.target != other.target):
            return unlike
        ours, our_form = pytree.tree_flatten((one.args, one.kwargs))
        theirs, their_form = pytree.tree_flatten((other.args, other.kwargs))
        if our_form != their_form:
            return unlike
        for mine, yours in zip(ours, theirs, strict=True):
            if isinstance(mine, fx.Node) or isinstance(yours, fx.Node):
                if place.get(mine) is not yours:
                    return unlike
            elif mine != yours and not (_is_number(mine) and _is_number(yours)):
                return unlike
        if not _same_ranks(one.meta.get("val"), other.meta.get("val")):
            return f"{_name(other)} gives another number of dimensions than for a piece"
    return None


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "overloadpacket", node.target))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same_ranks(one: Any, other: Any) -> bool:
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same_ranks, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dim() == other.dim()
    return True
