"""`trainer.verify` where steps leave layers out, and where code holds views of parameters: both are compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from tests.support import reference
from tests.support.zoo.plain_models import Block, Build, Stack, batches, gpt, output, perceptron, regression


class InATuple(Block):
    """It returns its value in a tuple, and has statistics of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(5)
        self.drop = nn.Dropout(0.3)

    def forward(self, value: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        return (super().forward(self.drop(self.statistics(value))),)


class StackOfTuples(Stack):
    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        value = self.first(inputs)
        for layer in self.layers:
            value = layer(value)[0]
        return output(self.last(value), targets)


def test_steps_that_leave_layers_out_are_compared(build: Build) -> None:
    torch.manual_seed(0)
    trainer = build(StackOfTuples(InATuple), microbatches=2, seed=3)
    before = reference.copy_of(trainer.state_dict())
    found = trainer.verify(batches(3), active_layers=lambda step: [[0, 2], [1], []][step])
    assert found.equal, str(found)
    assert found.steps == 3
    reference.assert_same_state(trainer.state_dict(), before)
    trainer.step(batches(1)[0])
    assert trainer.verify(batches(1), active_layers=[-1]).equal
    as_list = build(perceptron(), loss=nn.functional.mse_loss, microbatches=2)
    assert as_list.verify([regression()], active_layers=["0", "2", "4"]).equal


def test_a_layer_that_ran_though_it_was_left_out_is_named(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build(gpt(layers=2), microbatches=2)
    step = trainer._one_step
    monkeypatch.setattr(trainer, "_one_step", lambda batch, active, asked: step(batch, None, asked))
    found = trainer.verify(reference.text_batches(1), active_layers=[0])
    assert found.first is not None
    assert found.first.kind == "loss"


class Following(Block):
    """It reads its weight through a buffer that views it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shown", self.inner.weight.detach())

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) * self.shown.mean()


def test_a_buffer_that_views_a_parameter_follows_it_in_plain_pytorch_too(build: Build) -> None:
    torch.manual_seed(0)
    found = build(Stack(Following), microbatches=2, optimizer=relay.SGD(lr=0.5)).verify(batches(3))
    assert found.equal, str(found)
    assert found.steps == 3


class Holding(Block):
    """It reads half of its weight, and the weight of its norm, in ways of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.half = self.inner.weight[:4]
        self.others = {"norm": self.norm.weight, "row": [self.inner.bias.detach()[2:]]}

    def forward(self, value: Tensor) -> Tensor:
        scale = self.half.sum() + self.others["norm"].sum() + self.others["row"][0].sum()  # type: ignore[index]
        return super().forward(value) * scale


def test_views_of_parameters_that_code_holds_follow_in_plain_pytorch_too(build: Build) -> None:
    torch.manual_seed(0)
    model = Stack(Holding)
    last = model.last.weight
    model.layers[1].register_forward_hook(lambda module, given, value: value + last.mean())
    trainer = build(model, microbatches=2)
    found = trainer.verify(batches(2))
    assert found.equal, str(found)
    assert trainer.verify(batches(1), active_layers=[0, 1]).equal
