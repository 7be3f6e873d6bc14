"""Which changes between steps are compiled anew.

Those of the loss are, those that a forward makes itself or that are undone are not, and what nothing can see is where
the user asks for it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from tests.support.zoo.code_readers import WIDTH, Counting, a_batch, a_pair, doubled_output
from tests.support.zoo.plain_models import Build


class LossObject:
    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target) * self.weight


def loss_over(options: dict[str, float]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: nn.functional.mse_loss(output, target) * options["weight"]


def weighted_loss(output: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
    return nn.functional.mse_loss(output, target) * weight


OPTIONS = {"weight": 1.0}
LOSSES: dict[str, tuple[Callable[[], Any], Callable[[Any, pytest.MonkeyPatch], None]]] = {
    "an attribute of an object": (LossObject, lambda loss, patch: setattr(loss, "weight", 3.0)),
    "a dict in a closure": (lambda: loss_over(OPTIONS), lambda loss, patch: patch.setitem(OPTIONS, "weight", 3.0)),
    "a keyword of a partial": (
        lambda: functools.partial(weighted_loss, weight=1.0),
        lambda loss, patch: loss.keywords.update(weight=3.0),
    ),
    "a default": (
        lambda: weighted_loss,
        lambda loss, patch: patch.setattr(weighted_loss, "__defaults__", (3.0,)),
    ),
    "a number of a module": (lambda: nn.HuberLoss(delta=0.1), lambda loss, patch: setattr(loss, "delta", 1.0)),
    "a bound method": (lambda: LossObject().__call__, lambda loss, patch: setattr(loss.__self__, "weight", 3.0)),
    "a hook of a module": (nn.MSELoss, lambda loss, patch: loss.register_forward_hook(doubled_output)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_changes_is_seen(name: str, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    make, change = LOSSES[name]
    torch.manual_seed(0)
    modules = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    loss, inputs, targets = make(), torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    trainer = build(modules, loss=loss, microbatches=1, optimizer=relay.SGD(lr=0.0))
    assert trainer.step((inputs, targets)).loss == float(loss(nn.Sequential(*modules)(inputs), targets))
    change(loss, monkeypatch)
    expected = float(loss(nn.Sequential(*modules)(inputs), targets))
    assert trainer.step((inputs, targets)).loss == expected


def test_a_model_that_counts_its_calls_is_compiled_once(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    modules = [Counting() for _ in range(3)]
    trainer = build(modules, loss=nn.functional.mse_loss, microbatches=1)
    batches = [(torch.randn(size, WIDTH), torch.randn(size, WIDTH)) for size in (4, 6)]
    for batch in batches * 2:
        trainer.step(batch)
    with caplog.at_level("INFO", logger="relay"):
        for batch in batches * 3:
            trainer.step(batch)
    assert not [record for record in caplog.records if "compiling" in record.message]


def test_a_change_that_is_undone_finds_the_program_of_before(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    (model, _), batch = a_pair(), a_batch()
    trainer = build(model, microbatches=1, optimizer=relay.SGD(lr=0.0))
    first = trainer.step(batch).loss
    model.layers[1].cfg["scale"] = 3.0  # type: ignore[index,union-attr]
    second = trainer.step(batch).loss
    model.layers[1].cfg["scale"] = 1.0  # type: ignore[index,union-attr]
    with caplog.at_level("INFO", logger="relay"):
        assert trainer.step(batch).loss == first
        model.layers[1].cfg["scale"] = 3.0  # type: ignore[index,union-attr]
        assert trainer.step(batch).loss == second
    assert not [record for record in caplog.records if "compiling" in record.message]


def test_what_nothing_can_see_is_taken_in_by_recompile(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, value: Tensor) -> Tensor:
            return self.inner(value) * float(os.environ["SCALE_OF_A_TEST"])

    monkeypatch.setenv("SCALE_OF_A_TEST", "1.0")
    torch.manual_seed(0)
    modules = [Reading() for _ in range(2)]
    batch = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    with relay.Trainer(modules, nn.functional.mse_loss, microbatches=1, optimizer=relay.SGD(lr=0.0)) as trainer:
        trainer.step(batch)
        monkeypatch.setenv("SCALE_OF_A_TEST", "3.0")
        trainer.recompile()
        expected = float(nn.functional.mse_loss(nn.Sequential(*modules)(batch[0]), batch[1]))
        assert trainer.step(batch).loss == expected
