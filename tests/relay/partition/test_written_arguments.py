"""Layers that write to what they are given train as in plain PyTorch, unless the model reads that memory afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relay.errors import PartitionError
from tests.support import reference
from tests.support.zoo.plain_models import WIDTH, Block, Build, Stack, batches, check, output

MSE = nn.functional.mse_loss


class Writing(Block):
    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.Hardtanh(inplace=True)

    def forward(self, value: Tensor) -> Tensor:
        value += self.norm.bias
        value[:, 1:].mul_(0.5)
        return super().forward(self.activation(value))


def sequence() -> nn.Sequential:
    """A Sequential as people write it, with activations that are layers of the list."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Flatten()]
    rest = [nn.Unflatten(1, (5, WIDTH)), nn.Linear(WIDTH, WIDTH), Writing(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.ELU(inplace=True), *rest)


@pytest.mark.parametrize(
    "options",
    [{}, {"layers_per_slot": 2, "device": "cpu:discrete", "stash": "host"}, {"recompute": False}],
    ids=["plain", "merged", "saved"],
)
def test_a_list_with_layers_in_place_trains_as_in_pytorch(build: Build, options: dict[str, Any]) -> None:
    pairs = reference.as_pairs([{"input_ids": one["inputs"], "labels": one["targets"]} for one in batches(2)])
    plain, mine = sequence(), sequence()
    losses = reference.train(list(plain), pairs, 2, loss=MSE)
    trainer = build(mine, loss=MSE, microbatches=2, **options)
    kept = [(inputs.clone(), targets.clone()) for inputs, targets in pairs]
    assert [trainer.step(pair).loss for pair in pairs] == losses
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())
    assert all(map(torch.equal, sum(pairs, ()), sum(kept, ())))


def test_a_model_with_layers_that_write_to_their_inputs_trains_as_in_pytorch(build: Build) -> None:
    check(build, lambda: Stack(Writing), batches(2), microbatches=2)


class ReadAfterwards(Stack):
    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        value = self.first(inputs)
        for layer in self.layers:
            value = value + layer(value)
        return output(self.last(value), targets)


class ReadAsAView(Stack):
    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        value = self.first(inputs)
        first = value[:, :1]
        for layer in self.layers:
            value = layer(value)
        return output(self.last(value) + first, targets)


class Handing(Block):
    """It returns what it was given, beside its value."""

    def forward(self, value: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        before.mul_(0.5)
        return super().forward(value), value


class HandedOn(Stack):
    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        value, before = self.first(inputs), inputs.clone()
        for layer in self.layers:
            value, before = layer(value, before)
        return output(self.last(value) + before, targets)


class OfTheModel(Stack):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__(block)
        self.register_buffer("mask", torch.ones(12, 5, WIDTH))

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        return output(self.last(self.layers[2](self.layers[1](self.layers[0](self.mask))) + inputs), targets)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ReadAfterwards(Writing),
        lambda: ReadAsAView(Writing),
        lambda: HandedOn(Handing),
        lambda: OfTheModel(Writing),
    ],
    ids=["read afterwards", "read as a view", "handed on", "a buffer of the model"],
)
def test_a_model_that_reads_what_a_layer_wrote_is_refused_by_name(build: Build, make: Callable[[], nn.Module]) -> None:
    with pytest.raises(PartitionError, match=r"layer 'layers.\d' changes one of its inputs in place.*value.clone\(\)"):
        build(make(), microbatches=1).step(batches(1)[0])
