"""PyTorch's own losses, whose mean may be over the targets that are not masked."""

from __future__ import annotations

from typing import Any

from torch import fx

from relay.partition.batch_flow.elementwise import SAME, elementwise
from relay.partition.batch_flow.labels import Count, Kind, Label, free
from relay.partition.batch_flow.op_call import Labels, OpCall, alike, name_of
from relay.partition.batch_flow.views import REORDERS, RESHAPES

MEAN, SUM = 1, 2
"""PyTorch's numbers for the reductions of a loss."""


def loss(call: OpCall) -> Labels:
    """PyTorch's losses that compare element by element, or sample by sample."""
    found = elementwise(call) if call.name in ELEMENT_LOSSES else first_rows(call)
    if not isinstance(found, Label) or found.kind is not Kind.ROWS:
        return found
    reduction = call.argument("reduction")
    if reduction == MEAN:
        return call.term(Count.SAMPLES)
    return call.term(Count.SUM) if reduction == SUM else call.shaped(found)


def first_rows(call: OpCall) -> Label:
    labels = [call.label(operand) for operand in call.operands]
    if any(label.kind is Kind.ROWS and label.dim != 0 for label in labels):
        return call.mixed("takes another dimension for the batch's")
    if any(label.kind is Kind.TERMS or label.numbers for label in labels):
        return call.mixed("takes samples together")
    return next((label for label in labels if label.kind is Kind.ROWS), free()).derived(call.given)


ELEMENT_LOSSES = {
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div", "poisson_nll_loss",
    "binary_cross_entropy_with_logits", "soft_margin_loss", "hinge_embedding_loss", "margin_ranking_loss",
}  # fmt: skip
SAMPLE_LOSSES = {
    "multi_margin_loss", "multilabel_margin_loss", "triplet_margin_loss", "cosine_embedding_loss",
    "multilabel_soft_margin_loss",
}  # fmt: skip
CROSS_ENTROPIES = {
    "cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward",
    "_linear_cross_entropy_batch_chunked", "_linear_cross_entropy_batch_chunked_no_reduction",
}  # fmt: skip
"""Losses that are means over targets that are not masked."""

POSITIONS = {"argmax", "argmin", "argsort"}


def cross_entropy(call: OpCall) -> Labels:
    scores, target = call.argument("self", "input"), call.argument("target")
    weight, reduction = call.argument("weight"), call.argument("reduction")
    reduction = {"mean": MEAN, "sum": SUM}.get(reduction, reduction)  # PyTorch's fused ones have names
    if call.label(weight).kind is not Kind.FREE:
        return alike(call, call.mixed("weighs classes by the samples"))
    found = first_rows(call)
    if found.kind is not Kind.ROWS:
        return alike(call, found if found.kind is not Kind.FREE else call.mixed("has targets alone from the batch"))
    if any(call.label(one).kind is not Kind.ROWS for one in (scores, target)):
        return alike(call, call.mixed("sets samples against what is free of them"))
    if reduction not in (MEAN, SUM):
        return call.shaped(found)
    label = call.term(Count.SUM)
    if reduction == MEAN:
        if target.meta["val"].dtype.is_floating_point or (weight is None and never_masked(call, target)):
            label = call.term(Count.SAMPLES)
        elif call.flow.is_given(target) and (weight is None or call.flow.is_given(weight)):
            label = call.term(Count.TARGETS)
        else:
            label = call.mixed("divides by a count that depends on what the model computes")
    return alike(call, label)


def never_masked(call: OpCall, target: fx.Node) -> bool:
    """Whether targets are positions, which are never negative, and a negative number is what masks."""
    node: Any = target
    while isinstance(node, fx.Node) and node.op == "call_function":
        if name_of(node) in POSITIONS:
            return int(call.argument("ignore_index")) < 0
        moves = name_of(node) in SAME | REORDERS | RESHAPES
        node = node.args[0] if moves else None
    return False
