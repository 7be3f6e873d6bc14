"""Small models that several tests share, and how to compare one that is relayed with one that is not.

Sequences of vectors go in and out; every model returns its loss and its value. Nothing is random but by torch's seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import reference
import torch
from torch import Tensor, nn

import relay

WIDTH = 8

Build = Callable[..., relay.Trainer]
"""The fixture `build`: makes trainers, which are closed after the test."""


class Output(NamedTuple):
    """What a model returns."""

    loss: Tensor
    value: Tensor


def output(value: Tensor, targets: Tensor) -> Output:
    """The mean squared error, and the value."""
    return Output(nn.functional.mse_loss(value, targets), value)


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return value + torch.tanh(self.inner(self.norm(value)))


class Stack(nn.Module):
    """Three blocks with something before and after."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        value = self.first(inputs)
        for layer in self.layers:
            value = layer(value)
        return output(self.last(value), targets)


def batches(steps: int = 4, rows: int = 10, length: int = 5) -> list[dict[str, Tensor]]:
    """Inputs and targets of shape (rows, length, WIDTH)."""
    generator = torch.Generator().manual_seed(3)
    return [
        {name: torch.randn(rows, length, WIDTH, generator=generator) for name in ("inputs", "targets")}
        for _ in range(steps)
    ]


def check(build: Build, make: Callable[[], nn.Module], given: list[dict[str, Tensor]], **options: Any) -> relay.Trainer:
    """Train two models of one kind, ours relayed and the other plainly, and compare every loss and tensor."""
    torch.manual_seed(0)
    ours = make()
    torch.manual_seed(0)
    plain = make()
    losses = reference.train(plain, given, options.get("microbatches", 4))
    trainer = build(ours, **options)
    assert [trainer.step(batch).loss for batch in given] == losses
    reference.assert_same_state(ours.state_dict(), plain.state_dict())
    return trainer
