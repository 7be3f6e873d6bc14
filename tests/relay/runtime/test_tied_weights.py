"""Tied weights train as in PyTorch, to the last bit: gradients are added in its order, and there is one update."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relay.models.gpt import cross_entropy
from tests.support import reference
from tests.support.zoo.plain_models import WIDTH, Block, Build, Stack, batches, check, gpt

STEPS = 20
SGD_OF_ONE = functools.partial(torch.optim.SGD, lr=1.0)
"""With it a step subtracts the gradient, so gradients can be read off the parameters."""


# **** tied embeddings ****


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("form", ["whole", "list"])
@pytest.mark.sample("whole-4", "list-1")
def test_tied_embeddings_are_equal_to_the_last_bit(build: Build, form: str, microbatches: int) -> None:
    model, plain = gpt(3, tied=True), gpt(3, tied=True)
    batches = reference.text_batches(8)
    losses = reference.train(plain, batches, microbatches)
    if form == "whole":
        trainer = build(model, microbatches=microbatches)
        assert [trainer.step(batch).loss for batch in batches] == losses
    else:
        trainer = build(model.as_list(), loss=cross_entropy, microbatches=microbatches)
        assert [trainer.step(pair).loss for pair in reference.as_pairs(batches)] == losses
    reference.assert_same_state(model.state_dict(), plain.state_dict())


def test_twelve_layers_of_the_model_of_relay_train_are_equal_over_twenty_steps(build: Build) -> None:
    batches = reference.text_batches(STEPS)
    model, plain = gpt(12, tied=True, vocabulary=256), gpt(12, tied=True, vocabulary=256)
    losses = reference.train(plain, batches)
    trainer = build(model)
    assert [trainer.step(batch).loss for batch in batches] == losses
    reference.assert_same_state(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.sample("cpu:discrete")
def test_without_exact_ties_gradients_of_both_uses_are_summed_to_rounding(build: Build, device: str) -> None:
    model, plain = gpt(3, tied=True), gpt(3, tied=True)
    before = reference.copy_of(model.state_dict())
    batches = reference.text_batches(1)
    build(model, optimizer=SGD_OF_ONE, device=device, exact_ties=False).step(batches[0])
    pieces = reference.cut(batches[0], 4)
    reference.gradients_of(reference.caller(plain, None), pieces, reference.by_samples(pieces))
    for name, parameter in plain.named_parameters():
        ours, expected = before[name] - model.state_dict()[name], before[name] - (before[name] - parameter.grad)
        error = torch.linalg.vector_norm(ours - expected) / torch.linalg.vector_norm(expected)
        assert error <= 1e-6, f"{name}: relative error {error:.1e}"


# **** ties ****


class Tied(Stack):
    """Weights tied between blocks, within a block, and between the ends, by assignment."""

    def __init__(self, where: str) -> None:
        super().__init__()
        if where == "blocks":
            self.layers[2].inner.weight = self.layers[0].inner.weight
        elif where == "ends":
            self.last.weight = self.first.weight
        elif where == "module":
            self.layers[1].norm = self.layers[0].norm
        elif where == "whole layer":
            self.layers[2] = self.layers[0]
        elif where == "three blocks":
            self.layers[1].inner.weight = self.layers[2].inner.weight = self.layers[0].inner.weight
        elif where == "ends and a block":
            self.last.weight = self.layers[1].inner.weight = self.first.weight


TIES = ["blocks", "ends", "module", "whole layer", "three blocks", "ends and a block"]


class Thrice(Block):
    """One weight used three times within a block."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.third = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.third.weight = self.inner.weight

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(self.third(torch.tanh(self.second(super().forward(value)))))


WAYS: dict[str, dict[str, Any]] = {
    "one micro-batch": {"microbatches": 1},
    "four": {"microbatches": 4},
    "streamed": {"microbatches": 3, "device": "cpu:discrete", "stash": "host"},
    "two layers a slot": {"microbatches": 3, "layers_per_slot": 2, "recompute": False},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", TIES)
@pytest.mark.sample(5)
def test_tied_weights_in_any_form_are_equal(build: Build, where: str, way: str) -> None:
    check(build, functools.partial(Tied, where), batches(), **WAYS[way])


@pytest.mark.parametrize("where", TIES)
@pytest.mark.sample(3)
def test_without_exact_ties_weights_in_any_form_get_the_gradients_of_all_uses(build: Build, where: str) -> None:
    torch.manual_seed(0)
    ours = Tied(where)
    plain = copy.deepcopy(ours)
    losses = reference.train(plain, batches(1), optimizer=SGD_OF_ONE)
    trainer = build(ours, optimizer=SGD_OF_ONE, exact_ties=False)
    assert trainer.step(batches(1)[0]).loss == losses[0]
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_weight_used_three_times_in_one_layer_is_equal(build: Build, microbatches: int) -> None:
    """Its gradients are added up in autograd's order, the last use first."""
    check(build, functools.partial(Stack, Thrice), batches(), microbatches=microbatches)
