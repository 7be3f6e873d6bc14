"""Tensors of a model that share memory: a buffer follows the parameter that it views, and the rest is refused by name.

The reference is plain PyTorch, in which a view is a view for ever.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from tests.support.zoo.plain_models import Build

WIDTH = 8


class Out:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Block(nn.Module):
    """A layer that may multiply by the weight of another one, without a gradient for it."""

    view: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.other: nn.Parameter | None = None

    def forward(self, value: Tensor) -> Tensor:
        new = torch.tanh(self.inner(value))
        if "view" in self._buffers:
            new = new @ self.view[:WIDTH, :WIDTH]
        if self.other is not None:
            new = new @ self.other.detach()
        return value + new


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Out:
        value = self.first(inputs)
        for layer in self.layers:
            value = layer(value)
        value = self.last(value)
        if "view" in self._buffers:
            value = value @ self.view.reshape(WIDTH, -1)[:, :WIDTH]
        return Out(nn.functional.mse_loss(value, targets))


def a_batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"inputs": torch.randn(4, WIDTH), "targets": torch.randn(4, WIDTH)}


def of_the_model(model: Any) -> None:
    model.register_buffer("view", model.layers[1].inner.weight.detach())


def of_a_later_layer(model: Any) -> None:
    """The first layer's backward reads what the last layer's update would change."""
    model.layers[0].register_buffer("view", model.layers[2].inner.weight.detach())


def of_an_earlier_layer(model: Any) -> None:
    model.layers[2].register_buffer("view", model.layers[0].inner.weight.detach())


def of_another_shape(model: Any) -> None:
    model.layers[2].register_buffer("view", model.layers[0].inner.weight.detach().view(WIDTH, WIDTH, 1).squeeze(2))


def of_its_own_layer(model: Any) -> None:
    model.layers[1].register_buffer("view", model.layers[1].inner.weight.detach())


def a_parameter_without_its_gradient(model: Any) -> None:
    model.layers[0].other = model.layers[2].inner.weight


SHARED: dict[str, Callable[[Any], None]] = {
    "the model": of_the_model,
    "a layer, of a later one": of_a_later_layer,
    "a layer, of an earlier one": of_an_earlier_layer,
    "a layer, in another shape": of_another_shape,
    "a layer, of its own": of_its_own_layer,
    "no buffer, but detached": a_parameter_without_its_gradient,
}


def tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.parametrize("name", SHARED)
def test_a_buffer_that_views_a_parameter_follows_it_through_steps_and_a_checkpoint(
    name: str, device: str, build: Build, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    for changed in (model, plain):
        SHARED[name](changed)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    trainer = build(model, microbatches=1, optimizer=relay.SGD(lr=0.1), device=device)
    batch = a_batch()

    def step_both() -> None:
        optimizer.zero_grad()
        loss = plain(**batch).loss
        loss.backward()
        optimizer.step()
        assert trainer.step(batch).loss == loss.item()
        for ours, theirs in zip(tensors(model), tensors(plain), strict=True):
            assert torch.equal(ours, theirs)

    step_both()
    trainer.save(tmp_path / "checkpoint")
    kept = copy.deepcopy(plain.state_dict())
    step_both()
    trainer.load(tmp_path / "checkpoint")
    plain.load_state_dict(kept)
    step_both()
    with torch.no_grad():
        for changed in (model, plain):
            changed.layers[2].inner.weight.mul_(0.5)  # type: ignore[union-attr]
    step_both()
    trainer.close()
    with torch.no_grad():
        for changed in (model, plain):
            for layer in changed.layers:
                layer.inner.weight.mul_(0.5)  # type: ignore[union-attr]
    for ours, theirs in zip(tensors(model), tensors(plain), strict=True):
        assert torch.equal(ours, theirs)


def tied_by_value(model: Any) -> None:
    model.last.weight = nn.Parameter(model.layers[0].inner.weight.data)


def tied_by_data(model: Any) -> None:
    model.last.weight.data = model.layers[0].inner.weight.data


def overlapping_in_part(model: Any) -> None:
    memory = torch.randn(WIDTH + 1, WIDTH)
    model.layers[0].inner.weight = nn.Parameter(memory[:WIDTH])
    model.layers[1].inner.weight = nn.Parameter(memory[1:])


def one_of_them_frozen(model: Any) -> None:
    model.last.weight = nn.Parameter(model.layers[0].inner.weight.data, requires_grad=False)


def expanded(model: Any) -> None:
    model.layers[1].inner.weight = nn.Parameter(torch.randn(1, WIDTH).expand(WIDTH, WIDTH))


def windows(model: Any) -> None:
    model.layers[1].inner.weight = nn.Parameter(torch.randn(2 * WIDTH).as_strided((WIDTH, WIDTH), (1, 1)))


def transposed_buffer(model: Any) -> None:
    model.layers[1].register_buffer("view", model.layers[0].inner.weight.detach().t())


def over_two_parameters(model: Any) -> None:
    memory = torch.randn(2 * WIDTH, WIDTH)
    model.layers[0].inner.weight = nn.Parameter(memory[:WIDTH])
    model.layers[1].inner.weight = nn.Parameter(memory[WIDTH:])
    model.register_buffer("view", memory)


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "tied by value": (tied_by_value, r"model\.last\.weight = model\.layers\[0\]\.inner\.weight"),
    "tied by .data": (tied_by_data, r"model\.last\.weight = model\.layers\[0\]\.inner\.weight"),
    "in part": (overlapping_in_part, r"model\.layers\[1\]\.inner\.weight = nn\.Parameter\(.*clone"),
    "with one frozen": (one_of_them_frozen, r"model\.last\.weight = model\.layers\[0\]\.inner\.weight"),
    "expanded": (expanded, r"'layers\.1\.inner\.weight'.*expand"),
    "windows over one memory": (windows, r"'layers\.1\.inner\.weight'.*strides are \(1, 1\)"),
    "a transposed buffer": (transposed_buffer, r"'layers\.1\.view'.*'layers\.0\.inner\.weight'"),
    "a buffer over two parameters": (over_two_parameters, r"'view'.*'layers\.\d\.inner\.weight'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_parameters_over_one_memory_and_views_that_cannot_follow_are_refused_by_name(name: str, build: Build) -> None:
    share, what = REFUSED[name]
    torch.manual_seed(0)
    model = Model()
    share(model)
    before = copy.deepcopy(model.state_dict())
    trainer = build(model, microbatches=1)
    with pytest.raises(relay.PartitionError, match=what):
        trainer.step(a_batch())
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key])


def test_parameters_that_are_parts_of_one_memory_and_do_not_overlap_train_as_in_pytorch(build: Build) -> None:
    torch.manual_seed(0)
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    memory = torch.randn(WIDTH, 2 * WIDTH)
    for changed, own in ((model, memory), (plain, memory.clone())):
        changed.layers[0].inner.weight = nn.Parameter(own[:, :WIDTH])  # type: ignore[union-attr]
        changed.layers[1].inner.weight = nn.Parameter(own[:, WIDTH:])  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    trainer = build(model, microbatches=1, optimizer=relay.SGD(lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        loss = plain(**a_batch()).loss
        loss.backward()
        optimizer.step()
        assert trainer.step(a_batch()).loss == loss.item()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
