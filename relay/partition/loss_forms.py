"""Whether the loss of a batch can be put together from those of its micro-batches, read off the traced loss.

It can where the loss is a sum of means over samples (each times a number), one cross-entropy, or a sum. A quotient of
two sums, a root of a mean or a mixture of cross-entropies gives another number for a batch that is cut than for the
whole, in plain PyTorch too. It decides nothing: `relay.data.loss_weight` says what each piece counts, and this says
when that may not be what was meant. Invariant: a loss of PyTorch's own with reduction "mean" or "sum" is never doubted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from relay.capture import trace
from relay.data.loss_weight import (
    CROSS_ENTROPIES,
    MEAN,
    STACKS,
    LossWeight,
    is_sum,
    joins_losses,
    loss_weight_of,
    reduction_of,
)

aten = torch.ops.aten

_SUMS = {aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar}
_SAME = {
    aten.neg.default, aten.clone.default, aten._to_copy.default, aten.view.default, aten.alias.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.detach.default,
    aten._unsafe_view.default, aten.reshape.default,
}  # fmt: skip


def find_loss_weight(
    loss: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor],
    outputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    first: int,
) -> tuple[LossWeight | None, str | None]:
    """The weight for `loss(outputs, targets)`, given fake tensors, and the doubt about it; it counts from the targets
    alone.

    `first` is how many tensors of the batch come before the targets.
    """
    examples = [[torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in group] for group in (outputs, targets)]
    try:
        traced = trace(loss, examples, "loss")
    except Exception:  # a loss that cannot be traced by itself is weighted by samples, and traced again with its layer
        return None, None
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    result = next(iter(reversed(traced.graph.nodes))).args[0]
    if isinstance(result, (list, tuple)) and len(result) == 1:
        result = result[0]
    if not isinstance(result, fx.Node):
        return None, None
    weight = loss_weight_of(traced, result, placeholders[len(outputs) :], {}, first)
    return weight, doubt_about(traced, result, placeholders)


def doubt_about(traced: fx.GraphModule, loss: fx.Node, batch: Sequence[fx.Node]) -> str | None:
    """Why the pieces' losses may not make the batch's, in words that follow "because"; None where they do.

    `batch` are the placeholders that carry tensors of the batch.
    """
    if is_sum(loss):
        return None
    reached = set(batch)
    for node in traced.graph.nodes:
        if any(other in reached for other in node.all_input_nodes):
            reached.add(node)
    terms: list[fx.Node] = []
    odd = _taken_apart(loss, reached, terms)
    if odd is not None:
        op = getattr(odd.target, "overloadpacket", odd.target)
        return f"it goes through {op} of numbers that come from all of a batch"
    counted = [term for term in terms if term.target in CROSS_ENTROPIES]
    if counted and len(terms) > 1:
        return "it adds a cross-entropy, a mean over targets that are not masked, to other means"
    return None


def _taken_apart(node: Any, reached: set[fx.Node], terms: list[fx.Node]) -> fx.Node | None:
    """Note in `terms` the means that a loss is a sum of; the first op that is neither a mean nor a sum of some."""
    if not isinstance(node, fx.Node) or node not in reached:
        return None
    target, arguments = node.target, node.args
    if target in _SUMS or target in STACKS:
        parts = arguments[0] if target in STACKS else arguments[:2]
        found = (_taken_apart(part, reached, terms) for part in parts)  # type: ignore[union-attr]
        return next((one for one in found if one is not None), None)
    if target in _SAME:
        return _taken_apart(arguments[0], reached, terms)
    if target in (aten.mul.Tensor, aten.mul.Scalar):
        factors = [one for one in arguments[:2] if isinstance(one, fx.Node) and one in reached]
        return node if len(factors) > 1 else _taken_apart(factors[0], reached, terms)
    if target in (aten.div.Tensor, aten.div.Scalar):
        over, under = arguments[:2]
        if isinstance(under, fx.Node) and under in reached:
            return node
        if isinstance(over, fx.Node) and is_sum(over) and _counts(under, over):
            terms.append(over)
            return None
        return _taken_apart(over, reached, terms)
    if target in (aten.mean.default, aten.sum.default):
        (whole,) = node.all_input_nodes
        if joins_losses(whole):
            return _taken_apart(whole, reached, terms)
    of_all = target is aten.mean.default or (target is aten.mean.dim and node.meta["val"].dim() == 0)
    if of_all or reduction_of(node) == MEAN:
        terms.append(node)
        return None
    return node


def _counts(number: Any, total: fx.Node) -> bool:
    """Whether a number is how many samples, or elements, a sum goes over."""
    sizes = [tensor.meta["val"] for tensor in total.all_input_nodes]
    return isinstance(number, (int, float)) and any(number in (one.numel(), *one.shape[:1]) for one in sizes)
