"""Small models that several tests share, and how to compare one that is relayed with one that is not.

`Stack` and its like take sequences of vectors and return their loss and their value; `gpt` and `perceptron` are there
as a whole model and as a list of modules. Nothing is random but by torch's seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import relay
from relay.models import GPT
from relay.optim.int8_state import Int8State
from tests.support import reference

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


def batches(steps: int = 4, rows: int = 12, length: int = 5) -> list[dict[str, Tensor]]:
    """Inputs and targets of shape (rows, length, WIDTH). 12 rows are two, three or four micro-batches of one shape."""
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


def gpt(layers: int = 3, **changes: Any) -> GPT:
    """A byte-sized GPT, always with the same weights, for `reference.text_batches`."""
    torch.manual_seed(0)
    settings = {"vocabulary": 64, "layers": layers, "hidden": 16, "heads": 2, "sequence": 12, "tied": False}
    return GPT(**{**settings, **changes})


def perceptron(middle: Callable[[], nn.Module] = nn.Identity, count: int = 3) -> list[nn.Module]:
    """A list of modules for `regression`, always with the same weights."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), middle(), nn.Tanh()) for _ in range(count)]
    return [nn.Linear(6, 8), *layers, nn.Linear(8, 3)]


def same_perceptrons(middle: Callable[[], nn.Module] = nn.Identity) -> tuple[list[nn.Module], list[nn.Module]]:
    """Two copies: the relay's, and plain PyTorch's."""
    return perceptron(middle), perceptron(middle)


def regression(batch: int = 12, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs (batch, 6) and targets (batch, 3)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 6, generator=generator), torch.randn(batch, 3, generator=generator)


def everything(trainer: relay.Trainer) -> dict[str, Tensor]:
    """Copies of all that a step may change: parameters, buffers, optimizer states with their step counts."""
    trainer.synchronize()
    optimizer = trainer._session.server.optimizer
    result = reference.copy_of(trainer.state_dict())
    for name, _ in trainer._model.named_parameters():
        for label, value in optimizer.state(name).items():
            if isinstance(value, Int8State):
                result[f"{name} {label} codes"] = value.codes.clone()
                result[f"{name} {label} scales"] = value.scales.clone()
            elif isinstance(value, Tensor):
                result[f"{name} {label}"] = value.clone()
    return result
