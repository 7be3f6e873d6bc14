"""What stands in `.grad` of parameters before a step, and what is there after one."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

import relay
from tests.support import reference
from tests.support.zoo.plain_models import Build, Stack, batches, perceptron, regression

MSE = nn.functional.mse_loss


def trainers(build: Build) -> dict[str, tuple[relay.Trainer, nn.Module, Any]]:
    """A list of modules, and a whole model with a frozen layer, several micro-batches and clipping."""
    modules, model = perceptron(), Stack()
    model.layers[0].requires_grad_(False)
    return {
        "list": (build(modules, loss=MSE, microbatches=1), nn.Sequential(*modules), regression()),
        "whole": (build(model, microbatches=3, clip_grad_norm=0.5), model, batches(1)[0]),
    }


@pytest.mark.parametrize("kind", ["list", "whole"])
def test_a_gradient_that_stands_before_a_step_is_refused_by_name_until_it_is_cleared(build: Build, kind: str) -> None:
    trainer, model, batch = trainers(build)[kind]
    before = copy.deepcopy(model.state_dict())
    for name, parameter in model.named_parameters():  # frozen ones too: torch.optim updates by what stands there
        parameter.grad = torch.ones_like(parameter)
        with pytest.raises(relay.StandingGradient, match=rf"'{name}' has a gradient in \.grad.*zero_grad\(\)"):
            trainer.step(batch)
        trainer.optimizer.zero_grad(set_to_none=False)
        with pytest.raises(relay.StandingGradient, match="Zeros are a gradient too"):
            trainer.step(batch)
        trainer.optimizer.zero_grad()
    reference.assert_same_state(model.state_dict(), before)
    assert trainer.steps == 0
    trainer.step(batch)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_habit_of_clearing_gradients_before_every_step_trains_as_in_pytorch(build: Build) -> None:
    ours, plain = perceptron(), perceptron()
    for modules in (ours, plain):  # as a search for a learning rate leaves them
        MSE(nn.Sequential(*modules)(regression()[0]), regression()[1]).backward()
    data = [regression(seed=seed) for seed in range(3)]
    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    for module in plain:
        module.zero_grad()
    losses = reference.train(plain, data, 2, loss=MSE, optimizer=make)
    trainer = build(ours, loss=MSE, optimizer=make, microbatches=2)
    found = []
    for batch in data:
        trainer.optimizer.zero_grad()
        found.append(trainer.step(batch).loss)
    assert found == losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


def test_a_learning_rate_that_a_hook_sets_before_the_step_counts_for_that_step(build: Build) -> None:
    ours, plain = perceptron(), perceptron()
    data = [regression(seed=seed) for seed in range(3)]
    optimizer = torch.optim.SGD(nn.Sequential(*plain).parameters(), lr=1.0)
    trainer = build(ours, loss=MSE, optimizer=functools.partial(torch.optim.SGD, lr=1.0), microbatches=1)

    def warm_up() -> Any:
        rates = iter([0.01, 0.02, 0.04])

        def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            optimizer.param_groups[0]["lr"] = next(rates)

        return hook

    for one in (optimizer, trainer.optimizer):
        one.register_step_pre_hook(warm_up())
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = MSE(nn.Sequential(*plain)(inputs), targets)
        loss.backward()
        optimizer.step()
        assert trainer.step((inputs, targets)).loss == loss.item()
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))
