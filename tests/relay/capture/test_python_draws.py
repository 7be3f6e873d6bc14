"""Numbers that a model draws from Python's and numpy's generators, such as those of layerdrop."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import relay
from relay.errors import CaptureError, PartitionError
from tests.support import reference
from tests.support.zoo.plain_models import Block, Build, Stack, batches, check, perceptron, regression

DRAWS: dict[str, Callable[[], float]] = {"python": random.random, "numpy": np.random.rand}


class Noted:
    """Draws of a generator, noted; or those that were noted before, given again."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self.noted: list[float] = []
        self.given: Iterator[float] | None = None

    def __call__(self) -> float:
        if self.given is not None:
            return next(self.given)
        drawn = float(self._draw())
        self.noted.append(drawn)
        return drawn


class Dropped(Block):
    """A layer that is left out by chance."""

    def __init__(self, draw: Callable[[], float], rate: float) -> None:
        super().__init__()
        self.draw, self.rate = draw, rate

    def forward(self, value: Tensor) -> Tensor:
        if self.training and self.draw() < self.rate:
            return value
        return super().forward(value)


@pytest.mark.parametrize("by", DRAWS)
@pytest.mark.filterwarnings("ignore:.*runs eagerly, op by op, since random numbers that it draws")
def test_layers_that_are_left_out_by_chance_are_drawn_anew_in_every_step(build: Build, by: str) -> None:
    data = batches(6)
    torch.manual_seed(0)
    draws, again = [Noted(DRAWS[by]) for _ in range(3)], [Noted(DRAWS[by]) for _ in range(3)]
    each = iter([*draws, *again])
    ours = Stack(lambda: Dropped(next(each), 0.5))
    torch.manual_seed(0)
    plain = Stack(lambda: Dropped(next(each), 0.5))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01, fused=True)
    trainer = build(ours, microbatches=1, optimizer=relay.AdamW(lr=1e-2, weight_decay=0.01))
    trainer.prepare(data[0])
    before = random.getstate(), repr(np.random.get_state())
    left_out = set()
    for batch in data:
        noted = [len(one.noted) for one in draws]
        found = trainer.step(batch)
        drawn = [one.noted[start:] for one, start in zip(draws, noted, strict=True)]
        assert all(number == first for first, *recomputed in drawn for number in recomputed)
        left_out.add(tuple(first < 0.5 for first, *_ in drawn))
        for one, (first, *_) in zip(again, drawn, strict=True):
            one.given = iter([first])
        optimizer.zero_grad()
        loss = plain(**batch).loss
        loss.backward()
        optimizer.step()
        assert found.loss == loss.item()
    assert len(left_out) > 1
    assert (random.getstate(), repr(np.random.get_state())) == before
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


@pytest.mark.filterwarnings("error:.*runs eagerly")
def test_numbers_that_are_drawn_and_decide_nothing_do_no_harm(build: Build) -> None:
    class Stack0(Stack):
        def forward(self, inputs: Tensor, targets: Tensor) -> Any:
            random.random()
            return super().forward(inputs, targets)

    check(build, lambda: Stack0(lambda: Dropped(np.random.rand, 0.0)), batches(2), microbatches=2)


class Skipping(Stack):
    """A model that leaves layers out by chance, rarely."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        value = self.first(inputs)
        for layer in self.layers:
            if self.draw() >= 0.001:
                value = layer(value)
        return value.square().mean(), self.last(value)


class Scaled(Stack):
    """A model with a noisy input."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        return super().forward(inputs + 0.1 * self.draw(), targets)


@pytest.mark.parametrize("by", DRAWS)
@pytest.mark.parametrize("kind", [Skipping, Scaled])
def test_numbers_drawn_outside_of_the_layers_that_decide_are_refused_by_name(
    build: Build, by: str, kind: Callable[..., nn.Module]
) -> None:
    trainer = build(kind(DRAWS[by]), microbatches=1)
    with pytest.raises(PartitionError, match=rf"that {kind.__name__} draws.*outside of its repeated.*active_layers="):
        trainer.step(batches(1)[0])
    assert trainer.steps == 0


OWN = np.random.default_rng(3)


class Holding(Block):
    """A layer that draws from a generator of its own, and rarely does anything else for it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.held = where, random.Random(1)

    def forward(self, value: Tensor) -> Tensor:
        drawn = self.held.random() if self.where == "attribute" else OWN.random()
        return value if drawn < 1e-3 else super().forward(value)


@pytest.mark.parametrize("where", ["attribute", "global"])
def test_a_generator_that_a_layer_holds_is_refused_by_name(build: Build, where: str) -> None:
    trainer = build(Stack(lambda: Holding(where)), microbatches=1)
    name = {"attribute": "held", "global": "OWN"}[where]
    with pytest.raises(CaptureError, match=rf"draws random numbers from '[\w.]*{name}.*torch\.rand, dropout"):
        trainer.step(batches(1)[0])


@pytest.mark.filterwarnings("ignore:.*runs eagerly, op by op, since random numbers that it draws")
@pytest.mark.filterwarnings("ignore:The loss of .* random numbers that it draws")
def test_a_loss_that_draws_has_other_numbers_in_every_step(build: Build) -> None:
    draws = Noted(random.random)

    def mixed(output: Tensor, targets: Tensor) -> Tensor:
        share = draws()
        return share * nn.functional.mse_loss(output, targets) + (1 - share) * nn.functional.l1_loss(output, targets)

    modules, plain = perceptron(), perceptron()
    trainer = build(modules, loss=mixed, microbatches=2, optimizer=relay.SGD(lr=0.0))
    batch = regression()
    for _ in range(2):  # the first changes the list of what was noted, so the second compiles anew
        trainer.step(batch)
    shares = []
    for _ in range(3):
        before = len(draws.noted)
        found = trainer.step(batch).loss
        shares.append(tuple(draws.noted[before:]))
        given = iter(shares[-1])
        pieces = zip(batch[0].split(6), batch[1].split(6), strict=True)
        with mock.patch.object(draws, "given", given):
            expected = sum(mixed(nn.Sequential(*plain)(one), other).item() for one, other in pieces) / 2
        assert found == pytest.approx(expected, rel=1e-6)
    assert len({share for pair in shares for share in pair}) == 6
