"""Two traces of one code, for a micro-batch and for the whole batch: what differs comes from the batch's length.

A size or a number that is the same in both is a constant. For a micro-batch of one sample some ops are left out that
do nothing there, such as `expand` and `contiguous`; they pair with what they are given. Invariant: apart from those,
paired traces have the same ops in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

_IDLE = {"expand", "expand_as", "broadcast_to", "contiguous", "clone", "detach", "alias", "to"}
"""Ops that are left out of a trace where they do nothing."""


class TracePair:
    """The traces `small`, of a micro-batch of `lengths[0]` samples, and `large`, of a batch of `lengths[1]`.

    `small_of` pairs the nodes of the large trace with those of the small one. Raises ValueError, with the difference in
    words, if they do not pair.
    """

    def __init__(self, small: fx.GraphModule, large: fx.GraphModule, lengths: tuple[int, int]) -> None:
        self.small, self.large, self.lengths = small, large, lengths
        self.small_of: dict[fx.Node, fx.Node] = {}
        self._left_out: set[fx.Node] = set()
        self._pair()

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
        difference = abs(small * self.lengths[1] - large * self.lengths[0])
        return small != large and difference <= 1e-9 * abs(large * self.lengths[0])

    def literals(self, node: fx.Node) -> Iterator[tuple[int, Any, Any]]:
        """The arguments that are plain values: which leaf each is, and what it is in both traces."""
        if node in self._left_out:
            return
        other = self.small_of[node]
        large = pytree.tree_leaves((node.args, node.kwargs))
        small = pytree.tree_leaves((other.args, other.kwargs))
        for place, (value, counterpart) in enumerate(zip(large, small, strict=True)):
            if not isinstance(value, fx.Node):
                yield place, counterpart, value

    def _pair(self) -> None:
        small, large = list(self.small.graph.nodes), list(self.large.graph.nodes)
        source: dict[fx.Node, fx.Node] = {}  # of nodes that the large trace does without: what they are given
        ours = theirs = 0
        while ours < len(small) or theirs < len(large):
            one = small[ours] if ours < len(small) else None
            other = large[theirs] if theirs < len(large) else None
            if one is not None and other is not None and self._same(one, other, source):
                self.small_of[other] = one
                ours, theirs = ours + 1, theirs + 1
            elif other is not None and _is_idle(other) and self._same_rank(self.small_of[other.args[0]], other):
                self.small_of[other] = self.small_of[other.args[0]]
                self._left_out.add(other)
                theirs += 1
            elif one is not None and _is_idle(one):
                source[one] = source.get(one.args[0], one.args[0])
                ours += 1
            else:
                names = [_name(each) if each is not None else "nothing" for each in (other, one)]
                raise ValueError(f"{names[0]} is where a micro-batch has {names[1]}")

    def _same(self, one: fx.Node, other: fx.Node, source: dict[fx.Node, fx.Node]) -> bool:
        if one.op != other.op or (one.op == "call_function" and one.target != other.target):
            return False
        ours, our_form = pytree.tree_flatten((one.args, one.kwargs))
        theirs, their_form = pytree.tree_flatten((other.args, other.kwargs))
        if our_form != their_form:
            return False
        for mine, yours in zip(ours, theirs, strict=True):
            if isinstance(mine, fx.Node) and isinstance(yours, fx.Node):
                counterpart = self.small_of[yours]
                if source.get(mine, mine) is not source.get(counterpart, counterpart):
                    return False
            elif mine != yours and not (_is_number(mine) and _is_number(yours)):
                return False
        return self._same_rank(one, other)

    @staticmethod
    def _same_rank(one: fx.Node, other: fx.Node) -> bool:
        return _same_ranks(one.meta.get("val"), other.meta.get("val"))


def _is_idle(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    return getattr(packet, "__name__", "") in _IDLE and isinstance(node.args[0], fx.Node)


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "overloadpacket", node.target))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same_ranks(one: Any, other: Any) -> bool:
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same_ranks, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dim() == other.dim() and one.dtype == other.dtype
    return True
