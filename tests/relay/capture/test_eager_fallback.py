"""Layers whose shapes or control flow depend on the data run eagerly, and equal plain PyTorch."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from relay.capture.eager_call import generators_of
from relay.errors import NonFiniteLoss
from tests.support import reference
from tests.support.zoo.plain_models import WIDTH, Build, Output

pytestmark = pytest.mark.filterwarnings("ignore:layer")


class Routed(nn.Module):
    """Routed experts: nonzero finds the rows of the two best experts for each row. An expert may have none."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 6)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.drop = nn.Dropout(dropout)

    def forward(self, value: Tensor) -> Tensor:
        weights, chosen = torch.topk(torch.softmax(self.router(value), -1), 2)
        result = torch.zeros_like(value)
        for number, expert in enumerate(self.experts):
            rows, columns = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                result = result.index_add(0, rows, expert(value[rows]) * weights[rows, columns, None])
        return value + self.drop(torch.tanh(result))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        if value.sum() > 0:
            value = -value
        return value + torch.tanh(self.norm(self.inner(value)))


class Counting(nn.Module):
    """Its output depends on buffers that it changes: how often it was called, and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        self.average = 0.9 * self.average + 0.1 * value.detach().mean(0)
        if value.sum() > 0:
            value = value * 1.1
        return value + torch.tanh(self.norm(self.inner(value - self.average))) / self.calls


class Whole(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        value = self.first(inputs)
        for layer in self.layers:
            value = layer(value)
        return Output(nn.functional.mse_loss(value, targets), value)


def batches(steps: int = 6, rows: int = 5) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {name: torch.randn(rows, WIDTH, generator=generator) for name in ("inputs", "targets")} for _ in range(steps)
    ]


def pair(make: Callable[[], Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    made = make()
    return made, copy.deepcopy(made)


@pytest.mark.parametrize("layer", [Routed, Branching, Counting])
@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.sample("cpu-Counting", "cpu:discrete-Routed")
def test_a_model_of_such_layers_trains_as_in_pytorch_to_the_last_bit(
    build: Build, layer: type[nn.Module], device: str
) -> None:
    """Few rows and many experts: in most steps some expert has no gradient, and must not even be decayed."""
    ours, plain = pair(lambda: Whole(layer))
    decaying = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.5, fused=True)
    losses = reference.train(plain, batches(), 2, optimizer=decaying)
    trainer = build(ours, microbatches=2, device=device, optimizer=relay.AdamW(lr=1e-2, weight_decay=0.5))
    assert [trainer.step(batch).loss for batch in batches()] == losses
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_recompute_finds_the_buffers_as_the_forward_found_them(build: Build, stash: str) -> None:
    """With several micro-batches the last forward has changed them again and again before the first recompute."""
    ours, plain = pair(lambda: Whole(Counting))
    losses = reference.train(plain, batches(rows=8), 4)
    trainer = build(ours, microbatches=4, stash=stash, device="cpu:discrete")
    assert [trainer.step(batch).loss for batch in batches(rows=8)] == losses
    reference.assert_same_state(ours.state_dict(), plain.state_dict())
    assert int(trainer.state_dict()["layers.0.calls"]) == 4 * 6


def test_torch_optimizers_leave_experts_without_a_gradient_alone_too(build: Build) -> None:
    ours, plain = pair(lambda: Whole(Routed))
    momentum = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)
    losses = reference.train(plain, batches(), 1, optimizer=momentum)
    trainer = build(ours, microbatches=1, optimizer=momentum)
    assert [trainer.step(batch).loss for batch in batches()] == losses
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.sample("2")
def test_what_a_refused_step_reached_is_forgotten_when_it_is_repeated(build: Build, microbatches: int) -> None:
    ours, plain = pair(lambda: Whole(Routed))
    decaying = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.5, fused=True)
    losses = reference.train(plain, batches(), microbatches, optimizer=decaying)
    trainer = build(ours, microbatches=microbatches, optimizer=relay.AdamW(lr=1e-2, weight_decay=0.5))
    spoiled = {name: tensor.clone() for name, tensor in batches(7, rows=20)[-1].items()}
    spoiled["targets"][0] = torch.nan
    found = []
    for batch in batches():
        with pytest.raises(NonFiniteLoss):
            trainer.step(spoiled)
        found.append(trainer.step(batch).loss)
    assert found == losses
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


def test_with_clipping_too(build: Build) -> None:
    ours, plain = pair(lambda: Whole(Routed))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.5, fused=True)
    trainer = build(ours, microbatches=2, clip_grad_norm=0.1, optimizer=relay.AdamW(lr=1e-2, weight_decay=0.5))
    for batch in batches():
        optimizer.zero_grad()
        pieces = reference.cut(batch, 2)
        loss = reference.gradients_of(reference.caller(plain, None), pieces, reference.by_samples(pieces))
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        assert trainer.step(batch).loss == pytest.approx(loss, rel=1e-5)
    trainer.synchronize()
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], expected, rtol=1e-4, atol=1e-5)


def test_in_a_list_the_last_layer_and_the_loss_may_depend_on_data_too(build: Build) -> None:
    def loss(value: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(value, target)

    ours, plain = pair(lambda: [nn.Linear(WIDTH, WIDTH), Routed(), Branching(), Routed()])
    given = [(batch["inputs"], batch["targets"]) for batch in batches()]
    losses = reference.train(plain, given, 2, loss=loss)
    trainer = build(ours, loss=loss, microbatches=2)
    assert [trainer.step(batch).loss for batch in given] == losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


def test_dropout_inside_is_the_same_in_the_recompute_and_moves_no_global_generator(build: Build) -> None:
    """The loss at a point and just beside it, with the same masks, tell the gradient that was applied."""
    still = functools.partial(torch.optim.SGD, lr=0.0)
    torch.manual_seed(0)
    model = Whole(functools.partial(Routed, 0.5))
    batch = batches(1)[0]
    state = torch.get_rng_state()
    runs = []
    for _ in range(2):
        trainer = build(copy.deepcopy(model), microbatches=1, optimizer=still, seed=3)
        runs.append([trainer.step(batch).loss for _ in range(3)])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3
    assert torch.equal(torch.get_rng_state(), state)
    moved = copy.deepcopy(model)
    trainer = build(moved, microbatches=1, optimizer=functools.partial(torch.optim.SGD, lr=1e-3), seed=3)
    first = trainer.step(batch).loss
    assert first == runs[0][0]
    delta = {name: moved.state_dict()[name] - model.state_dict()[name] for name in model.state_dict()}
    expected = -sum(float((change**2).sum()) for change in delta.values()) / 1e-3
    after = build(copy.deepcopy(moved), microbatches=1, optimizer=still, seed=3).step(batch).loss
    assert after - first == pytest.approx(expected, rel=0.05)


def test_it_is_said_once_for_each_layer_and_not_again(build: Build) -> None:
    ours, _ = pair(lambda: Whole(Routed))
    trainer = build(ours, microbatches=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.step(batches(1)[0])
        trainer.step(batches(1)[0])
    messages = [str(warning.message) for warning in caught if "eagerly" in str(warning.message)]
    assert len(messages) == 3
    assert "layers.1" in messages[1]
    assert "nonzero" in messages[1]


def test_a_layer_that_runs_eagerly_gives_the_generators_of_its_devices_back() -> None:
    on_gpus = [SimpleNamespace(device=torch.device(name)) for name in ("cuda:1", "cpu", "cuda:0", "cuda:1")]
    assert generators_of(on_gpus) == {"devices": [0, 1], "device_type": "cuda"}  # type: ignore[arg-type]
    assert generators_of([torch.zeros(1)]) == {"devices": ()}
