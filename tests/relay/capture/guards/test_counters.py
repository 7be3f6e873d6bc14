"""Numbers that a forward counts and computes with: the layer runs eagerly, or the model is refused by name."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from hal.errors import Unsupported
from relay.errors import PartitionError
from tests.support import reference
from tests.support.zoo.plain_models import WIDTH, Build, Output, output

pytestmark = pytest.mark.filterwarnings("ignore:layer .* runs eagerly", "ignore:The loss of .* cannot be followed")

COUNT = 0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        self.temperature = 1.0
        self.table = {"calls": 0}
        self.longest = 0
        self.object = SimpleNamespace(calls=0)
        self.closure = counting()

    def forward(self, value: Tensor) -> Tensor:
        return value + torch.tanh(self.linear(value))


def counting() -> Callable[[Tensor], Tensor]:
    number = 0

    def divided(value: Tensor) -> Tensor:
        nonlocal number
        number += 1
        return value / number

    return divided


class DividedByCalls(Layer):
    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(value) / self.calls


class Annealed(Layer):
    def forward(self, value: Tensor) -> Tensor:
        self.temperature *= 0.9
        return super().forward(value * max(self.temperature, 0.1))


class OtherwiseAfterAWhile(Layer):
    def forward(self, value: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return value if self.calls > 3 else super().forward(value)


class CountingInADict(Layer):
    def forward(self, value: Tensor) -> Tensor:
        self.table["calls"] += 1
        return super().forward(value) / self.table["calls"]


class DividedByWhatItMakes(Layer):
    def forward(self, value: Tensor) -> Tensor:
        self.made = getattr(self, "made", 0) + 1
        return super().forward(value) / self.made


class DividedByAnAttributeOfTheClass(Layer):
    calls_of_the_class = 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls_of_the_class += 1
        return super().forward(value) / self.calls_of_the_class


class OnlyCounting(Layer):
    def forward(self, value: Tensor) -> Tensor:
        global COUNT
        self.calls += 1
        self.table["calls"] += 1
        self.object.calls += 1
        COUNT += 1
        return super().forward(value)


class Longest(Layer):
    """What it remembers is the same after each call with a batch of that length."""

    def forward(self, value: Tensor) -> Tensor:
        self.longest = max(self.longest, len(value))
        return super().forward(value) * self.longest


class ByAGlobal(Layer):
    def forward(self, value: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return super().forward(value) / COUNT


class ByAClosure(Layer):
    def forward(self, value: Tensor) -> Tensor:
        return self.closure(super().forward(value))


class Model(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.steps = 0

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        value = self.first(inputs)
        for layer in self.layers:
            value = layer(value)
        return output(value, targets)


class WarmedUp(Model):
    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        self.steps += 1
        found = super().forward(inputs, targets)
        return Output(found.loss * min(1.0, self.steps / 10), found.value)


class WarmedUpByWhatItMakes(Model):
    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        self.made = getattr(self, "made", 0) + 1
        found = super().forward(inputs, targets)
        return Output(found.loss * min(1.0, self.made / 10), found.value)


class WarmedUpByItsClass(Model):
    steps_of_the_class = 0

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        self.steps_of_the_class += 1
        found = super().forward(inputs, targets)
        return Output(found.loss * min(1.0, self.steps_of_the_class / 10), found.value)


class MakingALength(Model):
    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        self.length = inputs.shape[1]
        self.counted = getattr(self, "counted", 0) + 1  # and does not compute with it
        found = super().forward(inputs, targets)
        return Output(found.loss * self.length, found.value)


class CountingItsSteps(Model):
    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        self.steps += 1
        return super().forward(inputs, targets)


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{name: torch.randn(6, WIDTH, generator=generator) for name in ("inputs", "targets")} for _ in range(3)]


def two(make: Callable[[], Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    ours = make()
    torch.manual_seed(0)
    return ours, make()


COUNTERS = [DividedByCalls, Annealed, OtherwiseAfterAWhile, CountingInADict]
LATE = [DividedByWhatItMakes, DividedByAnAttributeOfTheClass]
SAMPLE = {(DividedByCalls, 2), (OnlyCounting, 1), (Longest, 2), (DividedByWhatItMakes, 2)}


@pytest.mark.parametrize(
    ("layer", "microbatches"),
    [
        pytest.param(layer, count, marks=() if (layer, count) in SAMPLE else pytest.mark.exhaustive)
        for layer in (*COUNTERS, *LATE, OnlyCounting, Longest)
        for count in (1, 2)
    ],
)
def test_a_model_whose_layers_count_trains_as_in_pytorch(build: Build, layer: type[Layer], microbatches: int) -> None:
    """Each forward counts once, and a recompute begins with the number that its forward began with."""
    ours, plain = two(lambda: Model(layer))
    losses = reference.train(plain, batches(), microbatches)
    trainer = build(ours, microbatches=microbatches)
    assert [trainer.step(batch).loss for batch in batches()] == losses
    reference.assert_same_state(ours.state_dict(), plain.state_dict())
    if layer in COUNTERS:
        numbers = [[(one.calls, one.temperature, one.table) for one in model.layers] for model in (ours, plain)]
        assert numbers[0] == numbers[1]


def test_what_counts_is_compiled_once(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    for make in (lambda: Model(DividedByWhatItMakes), lambda: CountingItsSteps(OnlyCounting)):
        trainer = build(make(), microbatches=1)
        trainer.step(batches()[0])
        with caplog.at_level("INFO", logger="relay"):
            for batch in batches():
                trainer.step(batch)
        assert not [record for record in caplog.records if "compiling" in record.message]


def test_a_number_that_a_forward_makes_anew_is_none_that_it_counts(build: Build) -> None:
    ours, plain = two(lambda: MakingALength(Layer))
    losses = reference.train(plain, batches(), 1)
    trainer = build(ours, microbatches=1)
    assert [trainer.step(batch).loss for batch in batches()] == losses


class Filled(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.fill = float("nan")

    def forward(self, value: Tensor) -> Tensor:
        return torch.nan_to_num(torch.where(value > 0, super().forward(value), self.fill), nan=0.0)


def test_a_constant_that_is_no_number_is_not_taken_for_one_that_changes(build: Build) -> None:
    torch.manual_seed(0)
    ours = Model(Filled)
    plain = copy.deepcopy(ours)
    losses = reference.train(plain, batches(), 1)
    trainer = build(ours, microbatches=1)
    assert [trainer.step(batch).loss for batch in batches()] == losses


def test_what_the_garbage_collector_runs_is_no_code_of_the_model(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    collections = 0

    def count(phase: str, details: dict[str, int]) -> None:
        nonlocal collections
        collections += 1

    thresholds = gc.get_threshold()
    gc.callbacks.append(count)
    try:
        gc.set_threshold(20, 1, 1)
        with caplog.at_level("INFO", logger="relay"):
            build(Model(Layer), microbatches=1).step(batches()[0])
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(count)
    assert collections > 0
    assert gc.isenabled()
    assert len([record for record in caplog.records if "compiling" in record.message]) == 1


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Model(ByAGlobal), "COUNT"),
        (lambda: Model(ByAClosure), r".*closure of layers\.0\.closure"),
        (lambda: WarmedUp(Layer), "'steps', outside of its repeated layers"),
        (lambda: WarmedUpByWhatItMakes(Layer), "'made', outside of its repeated layers"),
        (lambda: WarmedUpByItsClass(Layer), "'steps_of_the_class', outside of its repeated layers"),
    ],
)
def test_a_number_that_no_layer_holds_is_refused_by_name(
    build: Build, make: Callable[[], nn.Module], names: str
) -> None:
    with pytest.raises(PartitionError, match=f"changes the number {names}.*register_buffer"):
        build(make(), microbatches=1).step(batches()[0])


def test_a_layer_that_counts_is_refused_by_name_where_python_cannot_run() -> None:
    trainer = relay.Trainer(Model(DividedByCalls), device="onnx:cpu", microbatches=1)
    with trainer, pytest.raises(Unsupported, match=r"layers\.0.*the number 'block\.calls'"):
        trainer.step(batches()[0])
