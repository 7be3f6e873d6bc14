"""Small models, batches and plain references for tests of several ranks.

The reference is plain PyTorch in one process. It sums gradients in the grouping that ranks have: each rank's
micro-batches one after the other, then the ranks' sums in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import relay.models

HIDDEN, CLASSES = 16, 5

Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def layers(seed: int = 0) -> list[nn.Module]:
    """Two layers between an input and an output: 11 parameters, some of fewer elements than a block."""
    torch.manual_seed(seed)
    return [nn.Linear(8, HIDDEN), Block(), Block(), nn.Linear(HIDDEN, CLASSES)]


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, targets, ignore_index=-100)


def batch(step: int, size: int, masked: int = 0) -> Batch:
    """A batch whose first `masked` targets do not count."""
    generator = torch.Generator().manual_seed(step)
    targets = torch.randint(0, CLASSES, (size,), generator=generator)
    targets[:masked] = -100
    return torch.randn(size, 8, generator=generator), targets


def shares(whole: Batch, sizes: Sequence[int]) -> list[Batch]:
    """A batch in the shares of the ranks."""
    return list(zip(*(torch.split(tensor, list(sizes)) for tensor in whole), strict=True))


def plain_steps(
    batches: Sequence[Sequence[Batch]],
    microbatches: int,
    optimizer: Callable[..., torch.optim.Optimizer],
    clip: Callable[[list[torch.Tensor]], torch.Tensor] | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final parameters of plain PyTorch, which sums gradients in the grouping of ranks.

    `batches` are the ranks' shares, step by step; `clip` gives the factor that multiplies gradients.
    """
    model = nn.Sequential(*layers())
    chosen = optimizer(model.parameters())
    losses = []
    for of_ranks in batches:
        pieces = [
            list(zip(*(torch.chunk(part, microbatches) for part in one), strict=True))
            for one in of_ranks
            if len(one[0])
        ]
        total = sum(int((targets != -100).sum()) for rank in pieces for _, targets in rank)
        whole: list[torch.Tensor] = []
        losses.append(0.0)
        for rank in pieces:
            model.zero_grad()
            for inputs, targets in rank:
                count = int((targets != -100).sum())
                if count:
                    value = loss(model(inputs), targets) * (count / total)
                    value.backward()
                    losses[-1] += float(value.detach())
            own: list[Any] = [parameter.grad for parameter in model.parameters()]
            if own[0] is not None:
                whole = (
                    [one.clone() for one in own] if not whole else [a.add_(b) for a, b in zip(whole, own, strict=True)]
                )
        for parameter, gradient in zip(model.parameters(), whole, strict=True):
            parameter.grad = gradient
        if clip is not None:
            factor = clip(whole)
            for gradient in whole:
                gradient.mul_(factor)
        chosen.step()
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def small_gpt(name: str) -> relay.models.GPT:
    """A GPT of two layers, whose embedding is tied to its head; "dropout" has dropout."""
    torch.manual_seed(0)
    return relay.models.GPT(
        vocabulary=32, sequence=8, layers=2, hidden=16, heads=2, tied=True, dropout=0.1 if name == "dropout" else 0.0
    )


def gpt_batch(step: int, size: int) -> dict[str, torch.Tensor]:
    """A batch of random tokens, of which every third label does not count."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, 32, (size, 9), generator=generator)
    labels = tokens[:, 1:].clone()
    labels.view(-1)[:: 3 + step] = -100
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": labels}


def gpt_share(step: int, rank: int, count: int) -> dict[str, torch.Tensor]:
    """The share of a rank of a batch of 8 samples."""
    return {name: torch.tensor_split(tensor, count)[rank] for name, tensor in gpt_batch(step, 8).items()}
