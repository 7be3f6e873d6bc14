"""Whether the loss of a batch equals the weighted sum of the losses of its micro-batches, judged from the traced loss.

It does if the loss is a sum of means over samples (each times a number), one cross-entropy, or a sum. A quotient of
two sums, a root of a mean or a mixture of cross-entropies has another value for a batch cut into pieces than for the
whole, in plain PyTorch too. `relay.data.loss_weight` computes the weights of the pieces; this module only finds losses
for which that may be wrong. Invariant: a loss of PyTorch's own with reduction "mean" or "sum" is never doubted.
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
    """The weight of a micro-batch for `loss(outputs, targets)`, and the doubt about it (see `doubt_about`).

    `outputs` and `targets` are fake tensors. `first` is the number of tensors of the batch before the targets, since
    the weight is computed from the targets alone. Both results are None if the loss cannot be traced by itself.
    """
    examples = [[torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in group] for group in (outputs, targets)]
    try:
        traced = trace(loss, examples, "loss")
    except Exception:  # it is weighted by samples then, and traced again with its layer
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
    """Why the losses of micro-batches may not add up to that of the batch, in words that follow "because", or None.

    `batch` are the placeholders of the tensors of the batch.
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
    """Collect in `terms` the means that the loss is a sum of. Returns the first op that is no such sum, or None."""
    if not isinstance(node, fx.Node) or node not in reached:
        return None
    target, arguments = node.target, node.args
    if target in _SUMS or target in STACKS:
        parts = arguments[0] if target in STACKS else arguments[:2]
        found = (_taken_apart(part, reached, terms) for part in parts)  # type: ignore[union-attr]
        return next((term for term in found if term is not None), None)
    if target in _SAME:
        return _taken_apart(arguments[0], reached, terms)
    if target in (aten.mul.Tensor, aten.mul.Scalar):
        factors = [factor for factor in arguments[:2] if isinstance(factor, fx.Node) and factor in reached]
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
    """Whether a number is the count of samples, or of elements, that `total` sums."""
    sizes = [tensor.meta["val"] for tensor in total.all_input_nodes]
    return isinstance(number, (int, float)) and any(number in (size.numel(), *size.shape[:1]) for size in sizes)
