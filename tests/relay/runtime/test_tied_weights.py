"""Tied weights train as in PyTorch: the gradients of all uses are summed, and there is one update."""

from __future__ import annotations

import copy
import functools

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


@pytest.mark.parametrize("form", ["whole", "list"])
def test_tied_embeddings_are_equal_to_the_last_bit_with_one_micro_batch(build: Build, form: str) -> None:
    model, plain = gpt(3, tied=True), gpt(3, tied=True)
    batches = reference.text_batches(8)
    losses = reference.train(plain, batches, 1)
    if form == "whole":
        trainer = build(model, microbatches=1)
        assert [trainer.step(batch).loss for batch in batches] == losses
    else:
        trainer = build(model.as_list(), loss=cross_entropy, microbatches=1)
        assert [trainer.step(pair).loss for pair in reference.as_pairs(batches)] == losses
    reference.assert_same_state(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
def test_tied_embeddings_get_the_gradients_of_both_uses_with_several_micro_batches(build: Build, device: str) -> None:
    model, plain = gpt(3, tied=True), gpt(3, tied=True)
    before = reference.copy_of(model.state_dict())
    batches = reference.text_batches(1)
    build(model, optimizer=SGD_OF_ONE, device=device).step(batches[0])
    pieces = reference.cut(batches[0], 4)
    reference.gradients_of(reference.caller(plain, None), pieces, reference.by_samples(pieces))
    for name, parameter in plain.named_parameters():
        ours, expected = before[name] - model.state_dict()[name], before[name] - (before[name] - parameter.grad)
        error = torch.linalg.vector_norm(ours - expected) / torch.linalg.vector_norm(expected)
        assert error <= 1e-6, f"{name}: relative error {error:.1e}"


def test_tied_embeddings_train_to_the_same_losses_with_several_micro_batches(build: Build) -> None:
    batches = reference.text_batches(STEPS)
    losses = reference.train(gpt(12, tied=True), batches)
    trainer = build(gpt(12, tied=True))
    assert [trainer.step(batch).loss for batch in batches] == pytest.approx(losses, abs=1e-4)


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


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.parametrize("where", TIES)
def test_tied_weights_in_any_form_are_equal_with_one_micro_batch(build: Build, where: str, device: str) -> None:
    check(build, functools.partial(Tied, where), batches(), microbatches=1, device=device)


@pytest.mark.parametrize("where", TIES)
def test_tied_weights_in_any_form_get_the_gradients_of_all_uses(build: Build, where: str) -> None:
    torch.manual_seed(0)
    ours = Tied(where)
    plain = copy.deepcopy(ours)
    losses = reference.train(plain, batches(1), optimizer=SGD_OF_ONE)
    assert build(ours, optimizer=SGD_OF_ONE).step(batches(1)[0]).loss == losses[0]
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_weight_used_three_times_in_one_layer_is_equal(build: Build, microbatches: int) -> None:
    """Its gradients are added up in autograd's order, the last use first."""
    check(build, functools.partial(Stack, Thrice), batches(), microbatches=microbatches)
