"""The memory order of tensors is preserved between layers, so PyTorch's kernels run as in eager."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.support import reference
from tests.support.zoo.plain_models import Build

WIDTH = 8

Batch = dict[str, Tensor]


class Output(NamedTuple):
    loss: Tensor
    value: Tensor


class Stack(nn.Module):
    """Three layers with something before and after."""

    def __init__(self, block: Callable[[], nn.Module], ends: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        ends = ends or functools.partial(nn.Linear, WIDTH, WIDTH)
        self.first, self.last = ends(), ends()
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        value = self.first(inputs)
        for layer in self.layers:
            value = layer(value)
        value = self.last(value)
        return Output(nn.functional.mse_loss(value, targets), value)


def drawn(*shape: int, steps: int = 5, order: tuple[int, ...] = ()) -> list[Batch]:
    """Batches of that shape; with `order` they lie in memory with their dimensions in that order."""
    generator = torch.Generator().manual_seed(3)

    def sample() -> Tensor:
        tensor = torch.randn(*shape, generator=generator)
        if not order:
            return tensor
        back = sorted(range(len(order)), key=order.__getitem__)
        return tensor.permute(order).contiguous().permute(back)

    return [{name: sample() for name in ("inputs", "targets")} for _ in range(steps)]


def check(build: Build, make: Callable[[], nn.Module], batches: list[Batch], **options: Any) -> None:
    torch.manual_seed(0)
    ours = make()
    torch.manual_seed(0)
    plain = make()
    losses = reference.train(plain, batches, options["microbatches"])
    trainer = build(ours, **options)
    assert [trainer.step(batch).loss for batch in batches] == losses
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.recurrent = kind(WIDTH, WIDTH, **settings)

    def forward(self, value: Tensor) -> Tensor:
        batch_first = self.recurrent.batch_first
        made = self.recurrent(value if batch_first else value.transpose(0, 1))[0][..., :WIDTH]
        return value + (made if batch_first else made.transpose(0, 1))


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        state = torch.zeros(len(value), WIDTH)
        for position in range(value.shape[1]):
            state = self.cell(value[:, position], state)
        return value + state[:, None]


class Turned(nn.Module):
    """Returns its result with the first two dimensions exchanged, as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(self.inner(value.transpose(0, 1))).transpose(0, 1)


class Both(nn.Module):
    """One tensor as written and one turned; the next layer adds them up, so two gradients meet in each."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        plain, turned = pair
        mixed = plain + torch.tanh(self.inner(turned))
        return mixed, torch.tanh(self.outer(mixed.transpose(0, 1))).transpose(0, 1)


class OfBoth(Stack):
    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        first = self.first(inputs)
        pair = (first, first.transpose(1, 2).contiguous().transpose(1, 2))
        for layer in self.layers:
            pair = layer(pair)
        value = self.last(pair[0] + pair[1])
        return Output(nn.functional.mse_loss(value, targets), value)


class Branching(Turned):
    """Turned, and run eagerly, since data decide."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(-value if value.sum() > 0 else value)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, value: Tensor) -> Tensor:
        return torch.relu(self.norm(self.convolution(value))) + value


class ChannelsLast(Stack):
    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        return super().forward(inputs.to(memory_format=torch.channels_last), targets)


def convolution() -> nn.Module:
    return nn.Conv2d(4, 4, 3, padding=1)


SEQUENCES = functools.partial(drawn, 7, 5, WIDTH)
PICTURES = functools.partial(drawn, 5, 4, 6, 6)
LAST = (0, 2, 3, 1)


def the_same_twice() -> nn.Module:
    inner = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(inner, nn.Tanh(), inner)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Batch]]]] = {
    "LSTM": (lambda: Stack(lambda: Recurrent(nn.LSTM, batch_first=True)), SEQUENCES),
    "LSTM, time first": (lambda: Stack(lambda: Recurrent(nn.LSTM)), SEQUENCES),
    "LSTM, both ways": (lambda: Stack(lambda: Recurrent(nn.LSTM, bidirectional=True, num_layers=2)), SEQUENCES),
    "GRU": (lambda: Stack(lambda: Recurrent(nn.GRU, batch_first=True)), SEQUENCES),
    "GRU cells": (lambda: Stack(Cell), SEQUENCES),
    "a module in two places": (lambda: Stack(the_same_twice), SEQUENCES),
    "turned outputs": (lambda: Stack(Turned), SEQUENCES),
    "turned outputs, eagerly": (lambda: Stack(Branching), SEQUENCES),
    "gradients of two orders": (lambda: OfBoth(Both), SEQUENCES),
    "turned batches": (lambda: Stack(Turned), functools.partial(SEQUENCES, order=(1, 0, 2))),
    "channels last inside": (lambda: ChannelsLast(Convolved, convolution), PICTURES),
    "channels last batches": (lambda: Stack(Convolved, convolution), functools.partial(PICTURES, order=LAST)),
}


@pytest.mark.filterwarnings("ignore:layer")
@pytest.mark.parametrize(
    "options", [{"microbatches": 1}, {"microbatches": 3, "device": "cpu:discrete", "stash": "host"}], ids=["1", "3"]
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(
    "LSTM-1", "LSTM, time first-3", "GRU-1", "GRU cells-1", "a module in two places-3", "turned outputs-1",
    "turned outputs, eagerly-3", "gradients of two orders-3", "turned batches-1", "channels last inside-3",
    "channels last batches-3",
)  # fmt: skip
def test_layers_that_care_how_tensors_lie_are_equal_to_the_last_bit(
    build: Build, case: str, options: dict[str, Any]
) -> None:
    make, batches = CASES[case]
    check(build, make, batches(), **options)


def test_predictions_have_the_models_own_shape_however_they_lie(build: Build) -> None:
    torch.manual_seed(0)
    model = Stack(Turned, Turned)
    plain = Stack(Turned, Turned)
    plain.load_state_dict(model.state_dict())
    batch = SEQUENCES()[0]
    expected = plain.eval()(**batch).value
    torch.testing.assert_close(build(model, microbatches=2).predict(batch).value, expected)


@pytest.mark.filterwarnings("ignore:layer")
def test_recurrent_layers_run_where_only_core_programs_do(build: Build) -> None:
    torch.manual_seed(0)
    model = Stack(lambda: Recurrent(nn.GRU, batch_first=True))
    torch.manual_seed(0)
    plain = Stack(lambda: Recurrent(nn.GRU, batch_first=True))
    short = drawn(4, 2, WIDTH, steps=2)
    losses = reference.train(plain, short, 2)
    trainer = build(model, microbatches=2, device="numpy")
    assert [trainer.step(batch).loss for batch in short] == pytest.approx(losses, rel=1e-5)
