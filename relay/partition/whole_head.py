"""The head of a model, for the whole batch: what comes after the last layer, and how micro-batches are joined for it.

A loss that compares samples needs the whole batch at once. The layers still run micro-batch by micro-batch; what the
head takes of them is joined inside its own program, so that the gradient comes back in pieces by autograd. Where a
model is cut for it is decided in `relay.partition.cut_head` and `relay.partition.module_list`; nothing runs here.

Invariant: samples keep their order, so the joined tensors are those that the model computes for the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from relay.capture.memory_order import as_written, order_of
from relay.graph.pytree import TensorTree
from relay.partition.batch_flow.labels import Count, Kind, Label
from relay.partition.named_outputs import scalar_loss
from relay.partition.segments import Join


def join(how: Join, parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """The value of the whole batch; micro-batch j has `sizes[j]` samples."""
    if how.kind == "same":
        return torch.stack(list(parts))[0]  # so that the other micro-batches have a gradient too: zeros
    if how.kind in ("sum", "mean"):
        total = sum(sizes)
        shares = [size / total if how.kind == "mean" else 1.0 for size in sizes]
        return torch.stack([part * share for part, share in zip(parts, shares, strict=True)]).sum(0)
    order = order_of(parts[0])
    dim = order.index(how.dim) if order else how.dim
    rows = [part.permute(order) if order else part for part in parts]
    blocks = rows[0].shape[dim] // (how.unit * sizes[0])
    if blocks == 1:
        return as_written(torch.cat(rows, dim), order)
    apart = [row.unflatten(dim, (blocks, row.shape[dim] // blocks)) for row in rows]
    return as_written(torch.cat(apart, dim + 1).flatten(dim, dim + 1), order)


def join_of(label: Label, size: int, length: int) -> Join | None:
    """How a value with that label is joined; None if it cannot be.

    `size` is that of its dimension `label.dim` for the whole batch, of `length` samples.
    """
    if label.kind is Kind.FREE:
        return Join("same")
    if label.kind is Kind.ROWS and (label.unit or size == length):
        return Join("rows", label.dim, label.unit or 1)
    if label.kind is Kind.TERMS:
        counts = {term.count for term in label.terms}
        if counts == {Count.SUM}:
            return Join("sum")
        if counts == {Count.SAMPLES}:
            return Join("mean")
    return None


@dataclass(frozen=True)
class WantedOutputs:
    """Which outputs of the model the head computes besides the loss: those of these names, or `everything`."""

    names: tuple[str, ...] = ()
    everything: bool = False


class JoinedHead(nn.Module):
    """A head that takes the micro-batches' values: those of the first, of the second and so on, then the batch's."""

    def __init__(self, head: nn.Module, joins: Sequence[Join], sizes: Sequence[int], arguments: Sequence[int]) -> None:
        super().__init__()
        self.head = head
        self.joins = tuple(joins)
        self.sizes = tuple(sizes)
        self.arguments = tuple(arguments)

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(self.joins)
        pieces = [values[number * count : (number + 1) * count] for number in range(len(self.sizes))]
        parts = zip(*pieces, strict=True)
        joined = [join(how, one, self.sizes) for how, one in zip(self.joins, parts, strict=True)]
        known = [*joined, *values[count * len(self.sizes) :]]
        return tuple(self.head(*[known[number] for number in self.arguments]))


class LossOfOutputs(nn.Module):
    """The loss of a list of modules alone: (output tensors, target tensors) -> (loss, output tensors)."""

    def __init__(
        self, loss: Callable[..., torch.Tensor], output_tree: TensorTree, target_tree: TensorTree, output_count: int
    ) -> None:
        super().__init__()
        self.loss = loss
        self.output_tree, self.target_tree = output_tree, target_tree
        self.output_count = output_count

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, targets = tensors[: self.output_count], tensors[self.output_count :]
        loss = scalar_loss(self.loss(self.output_tree.fill(outputs), self.target_tree.fill(targets)))
        return (loss, *(output.detach() for output in outputs))
