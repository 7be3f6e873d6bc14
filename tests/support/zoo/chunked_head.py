"""A small model whose head may run over chunks of positions, its losses, and a step of it in plain PyTorch.

The reference runs the layers on a micro-batch, and the head and the loss on one chunk of its positions after the other,
each with its own backward. The gradient of the hidden states goes on into the layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relay

CLASSES, HIDDEN, SAMPLES, LENGTH = 23, 8, 6, 5
Total = Callable[["Model", Tensor], float]
Part = Callable[["Model", Tensor, Tensor], Tensor]


@dataclass
class Loss:
    """A loss as a model computes it, and as the sum over a chunk with what it is divided by.

    With `shift` a position is trained on the label of the next one. The losses of micro-batches are `added`, or else
    are means that count by what they are divided by.
    """

    whole: Callable[[Model, Tensor, Tensor], Tensor]
    part: Part
    total: Total = lambda _, labels: float((labels != -100).sum())
    shift: bool = False
    added: bool = False


class Model(nn.Module):
    """Embedding, two layers, norm and head: `model(ids=, labels=)` has a loss and logits."""

    def __init__(self, loss: Loss, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, HIDDEN)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES, bias=bias)
        self.register_buffer("class_weights", torch.rand(CLASSES) + 0.5)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss = loss

    def hidden(self, ids: Tensor) -> Tensor:
        stream = self.embedding(ids)
        for layer in self.layers:
            stream = layer(stream)
        return stream

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        logits = self.logits(self.hidden(ids))
        return SimpleNamespace(loss=self.loss.whole(self, logits, labels), logits=logits)


def flat(loss: Part) -> Callable[[Model, Tensor, Tensor], Tensor]:
    return lambda model, logits, labels: loss(model, logits.flatten(0, 1), labels.flatten())


def cross_entropy(reduction: str, **options: Any) -> Part:
    return lambda _, logits, labels: F.cross_entropy(logits, labels, reduction=reduction, **options)


def weighted(reduction: str) -> Part:
    return lambda model, logits, labels: F.cross_entropy(logits, labels, model.class_weights, reduction=reduction)


def capped(reduction: str) -> Part:
    return lambda _, logits, labels: F.cross_entropy(3 * torch.tanh(logits / 3), labels, reduction=reduction)


def masked_z(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.logsumexp(-1).square() * (labels != -100)).sum()


def with_z(model: Model, logits: Tensor, labels: Tensor) -> Tensor:
    count = (labels != -100).sum()
    return F.cross_entropy(logits, labels) + 0.01 * masked_z(logits, labels) / count


def shifted(model: Model, logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1))


def padded(model: Model, logits: Tensor, labels: Tensor) -> Tensor:
    moved = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), moved.view(-1))


def classes_second(model: Model, logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels)


def weighted_second(model: Model, logits: Tensor, labels: Tensor) -> Tensor:
    scores = logits[:, :-1].movedim(-1, 1).float().log_softmax(1)
    return F.nll_loss(scores, labels[:, 1:], model.class_weights)


def masked_by_hand(model: Model, logits: Tensor, labels: Tensor) -> Tensor:
    counted = (labels != -100).float()
    each = F.cross_entropy(logits.permute(0, 2, 1) * 1.0, labels, reduction="none")
    return (each * counted).sum() / counted.sum()


def of_classes(model: Model, logits: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(logits, F.one_hot(labels.clamp(min=0), CLASSES).float())


def divergence(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """From a distribution near to the labels, as a teacher gives it."""
    targets = (3.0 * F.one_hot(labels.clamp(min=0), CLASSES)).log_softmax(-1)
    return F.kl_div(logits.log_softmax(-1), targets, reduction=reduction, log_target=True)


LOSSES = {
    "mean": Loss(flat(cross_entropy("mean")), cross_entropy("sum")),
    "smoothing": Loss(flat(cross_entropy("mean", label_smoothing=0.1)), cross_entropy("sum", label_smoothing=0.1)),
    "weights": Loss(flat(weighted("mean")), weighted("sum"), lambda m, y: float(m.class_weights[y[y != -100]].sum())),
    "softcap": Loss(flat(capped("mean")), capped("sum")),
    "given count": Loss(
        lambda *given: flat(cross_entropy("sum"))(*given) / 7, cross_entropy("sum"), lambda *_: 7.0, added=True
    ),
    "z-loss": Loss(flat(with_z), lambda m, x, y: F.cross_entropy(x, y, reduction="sum") + 0.01 * masked_z(x, y)),
    "shift": Loss(shifted, cross_entropy("sum"), shift=True),
    "padded shift": Loss(padded, cross_entropy("sum"), shift=True),
    "classes second": Loss(classes_second, cross_entropy("sum")),
    "weights, classes second": Loss(
        weighted_second, weighted("sum"), lambda m, y: float(m.class_weights[y[y != -100]].sum()), shift=True
    ),
    "masked by hand": Loss(masked_by_hand, cross_entropy("sum")),
    "squares": Loss(
        of_classes,
        lambda m, x, y: F.mse_loss(x, F.one_hot(y.clamp(min=0), CLASSES).float(), reduction="sum"),
        lambda _, labels: float(labels.numel() * CLASSES),
    ),
    "divergence": Loss(
        lambda _, x, y: divergence(x, y, "mean"),
        lambda _, x, y: divergence(x, y, "sum"),
        lambda _, labels: float(labels.numel() * CLASSES),
    ),
}  # fmt: skip


def batch_of(masked: slice = slice(0, 3)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator)
    labels = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator)
    labels[0, masked] = -100
    return {"ids": ids, "labels": labels}


def step_in_chunks(model: Model, batch: dict[str, Tensor], microbatches: int, size: int) -> float:
    """One SGD step as plain PyTorch does it over the same micro-batches and chunks. Returns the loss."""
    rows = -(-SAMPLES // microbatches)
    pieces = [{key: value[start : start + rows] for key, value in batch.items()} for start in range(0, SAMPLES, rows)]
    targets, totals = [], []
    for piece in pieces:
        labels = F.pad(piece["labels"], (0, 1), value=-100)[..., 1:] if model.loss.shift else piece["labels"]
        targets.append(labels.flatten())
        totals.append(model.loss.total(model, targets[-1]))
    weights = [1.0 if model.loss.added else total / sum(totals) for total in totals]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = 0.0
    for piece, labels, total, weight in zip(pieces, targets, totals, weights, strict=True):
        hidden = model.hidden(piece["ids"])
        leaf = hidden.detach().flatten(0, 1).requires_grad_()
        for start in range(0, len(leaf), size):
            chunk = slice(start, start + size)
            part = model.loss.part(model, model.logits(leaf[chunk]), labels[chunk]) / total
            (part * weight).backward()
            loss += float(part.detach() * weight)
        hidden.backward(leaf.grad.view_as(hidden))
    optimizer.step()
    return loss


def trained(model: Model, batch: dict[str, Tensor], size: int | str | None, **options: Any) -> tuple[float, Model]:
    mine = copy.deepcopy(model)
    with relay.Trainer(mine, optimizer=relay.SGD(lr=0.1), head_chunk_tokens=size, **options) as trainer:
        loss = trainer.step(batch).loss
    return loss, mine


def distance(one: nn.Module, other: nn.Module) -> float:
    """The largest relative L2 distance of two models' parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)
