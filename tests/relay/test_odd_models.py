"""Models built in ways that nobody plans for train as in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

import relay
from tests.support import reference
from tests.support.told_masks import ToldMasks
from tests.support.zoo.odd_models import (
    Backwards,
    Checkpointed,
    Hooked,
    Hybrid,
    InModuleDict,
    Layers,
    ParametersGiven,
    Reversible,
    Rounded,
    Siamese,
    Slices,
    Stages,
    ThereAndBack,
    Universal,
    of,
)
from tests.support.zoo.odd_values import (
    Dataclasses,
    DenseNet,
    DictsChanged,
    GrowingMemory,
    IntegersBetween,
    KeywordsOnly,
    ObjectsChanged,
    ViewsAndNothings,
)
from tests.support.zoo.plain_models import WIDTH, Block, Build, Output, batches, check, output

functional = nn.functional


class StraightThrough(Block):
    def forward(self, value: Tensor) -> Tensor:
        value = super().forward(Rounded.apply(value * 4) / 4)
        if value.requires_grad:
            value.register_hook(lambda gradient: gradient * 0.5)
        return value


class Watched(Block):
    """Hooks its value without asking whether a gradient will flow: in training, one always does."""

    def forward(self, value: Tensor) -> Tensor:
        value = super().forward(value)
        value.register_hook(lambda gradient: gradient * 0.5)
        value.retain_grad()
        return value


class WatchedByData(Watched):
    """Runs eagerly."""

    def forward(self, value: Tensor) -> Tensor:
        value = super().forward(value)
        return value if value.detach().sum() < 1e9 else value * 2


class Fourier(Block):
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(torch.fft.fft2(value).real * 0.1)


class OldWeightNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.weight_norm(self.inner)


class Shadowed(nn.Module):
    """Follows its own weights with a moving average, which it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(self.inner.weight, 0.1)
        return value + self.inner(value) - functional.linear(value, self.average)


class Seen(Block):
    """Leaves what it made in an attribute for a look, and has a constant in another."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.full((WIDTH,), 0.5)

    def forward(self, value: Tensor) -> Tensor:
        self.seen = super().forward(value) * self.scale
        return self.seen


class Quantised(nn.Module):
    """A codebook between two lists of layers: nearest neighbours, a straight-through estimate, losses of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = Layers(), Layers()
        self.codes = nn.Embedding(7, WIDTH)

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        value = self.lower.run(inputs)
        nearest = torch.cdist(value.flatten(0, 1), self.codes.weight).argmin(-1)
        code = self.codes(nearest).view_as(value)
        extra = functional.mse_loss(code, value.detach()) + 0.25 * functional.mse_loss(value, code.detach())
        value = self.upper.run(value + (code - value).detach())
        return Output(functional.mse_loss(value, targets) + extra, value)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{
        made.__name__: made
        for made in (
            Dataclasses, KeywordsOnly, DictsChanged, ObjectsChanged, ViewsAndNothings, IntegersBetween, DenseNet,
            GrowingMemory, Backwards, InModuleDict, Stages, Hybrid, Reversible, Slices, ParametersGiven, Hooked,
            Quantised,
        )
    },
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed, reentrant": lambda: Checkpointed(True),
    "custom gradients": of(StraightThrough),
    "hooks without a question": of(Watched),
    "Fourier": of(Fourier),
    "old weight norm": of(OldWeightNorm),
    "moving average of weights": of(Shadowed),
    "attributes": of(Seen),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("name", MODELS)
def test_an_odd_model_trains_as_in_pytorch(build: Build, name: str) -> None:
    check(build, MODELS[name], batches(3), microbatches=3, stash="host", device="cpu:discrete")


@pytest.mark.parametrize("make", [Universal, ThereAndBack, Siamese])
def test_a_model_that_calls_its_layers_several_times_trains_as_in_pytorch(
    build: Build, make: Callable[[], nn.Module]
) -> None:
    """With one micro-batch, where there is one order of summation."""
    check(build, make, batches(3), microbatches=1)


class Dropping(Block):
    """Stochastic depth: a whole row of the batch passes the layer by, or not."""

    def forward(self, value: Tensor) -> Tensor:
        kept = value.new_empty(len(value), 1, 1).bernoulli_(0.5)
        return value + (super().forward(value) - value) * kept / 0.5


def test_stochastic_depth_by_row_draws_the_promised_numbers(build: Build) -> None:
    def make() -> Layers:
        torch.manual_seed(0)
        return Layers(Dropping)

    ours, plain = make(), make()
    masks = ToldMasks(plain, ["layers.0", "layers.1", "layers.2", "epilogue"], 4)
    optimizer = reference.adamw(list(plain.parameters()))
    trainer = build(ours, microbatches=2, seed=4)
    for step, batch in enumerate(batches(3)):
        optimizer.zero_grad()
        pieces = reference.cut(batch, 2)
        loss = 0.0
        for number, (piece, share) in enumerate(zip(pieces, reference.by_samples(pieces), strict=True)):
            masks.begin(step, number)
            with masks:
                value = plain(**piece).loss * share
            value.backward()
            loss += value.item()
        optimizer.step()
        assert trainer.step(batch).loss == loss
    assert masks.drawn == 3 * 2 * 3
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


class AsksWhatIsTrained(Layers):
    """It asks between layers whether what came so far is trained, and goes on in place."""

    def __init__(self, frozen: int) -> None:
        super().__init__()
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def run(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = layer(value)
            value += 0.1 if value.requires_grad else 0.2
        return value


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_model_learns_between_layers_what_is_trained(build: Build, frozen: int) -> None:
    check(build, lambda: AsksWhatIsTrained(frozen), batches(2), microbatches=2)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("block", [Watched, WatchedByData])
def test_a_list_of_layers_that_hook_without_a_question_trains_and_evaluates(build: Build, block: type[Block]) -> None:
    torch.manual_seed(0)
    plain = [block(), block()]
    ours = copy.deepcopy(plain)
    given = [tuple(batch.values()) for batch in batches(2)]
    losses = reference.train(plain, given, 2, loss=functional.mse_loss)
    trainer = build(ours, loss=functional.mse_loss, microbatches=2, recompute=False)
    assert [trainer.step(batch).loss for batch in given] == losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))
    assert trainer.evaluate(given[0]).loss > 0


def test_custom_gradients_anywhere_are_kept_in_a_list_of_modules(build: Build) -> None:
    class Ending(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return Rounded.apply(value)

    def make() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Block(), Block(), Ending()]

    ours, plain = make(), make()
    given = [tuple(batch.values()) for batch in batches(3)]
    losses = reference.train(plain, given, 2, loss=functional.mse_loss)
    trainer = build(ours, loss=functional.mse_loss, microbatches=2)
    assert [trainer.step(batch).loss for batch in given] == losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


def test_a_list_of_layers_within_a_dict_of_parts_is_found(build: Build) -> None:
    """The parts of a GPT, in a ModuleDict with two embeddings in it."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts: Iterable[tuple[str, nn.Module]] = [
                ("one", nn.Linear(WIDTH, WIDTH)), ("two", nn.Linear(WIDTH, WIDTH)),
                ("layers", nn.ModuleList([Block(), Block()])),
            ]  # fmt: skip
            self.parts = nn.ModuleDict(dict(parts))

        def forward(self, inputs: Tensor, targets: Tensor) -> Output:
            value = self.parts["two"](torch.tanh(self.parts["one"](inputs)))
            for layer in self.parts["layers"]:
                value = layer(value)
            return output(value, targets)

    trainer = check(build, Parts, batches(2))
    assert isinstance(trainer, relay.Trainer)
    names = [one.segment.name for one in next(iter(trainer._compiler.cache)).stages]
    assert names == ["prologue", "parts.layers.0", "parts.layers.1", "epilogue"]
