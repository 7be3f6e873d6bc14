"""Models built in unusual ways train as in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

import relay
from tests.support import reference
from tests.support.given_masks import GivenMasks
from tests.support.zoo.odd_layers import AsksWhatIsTrained, Dropping, Watched, WatchedByData
from tests.support.zoo.odd_models import Layers, Rounded
from tests.support.zoo.plain_models import WIDTH, Block, Build, Output, batches, check, output
from tests.support.zoo.table import Entry, Group, cases

functional = nn.functional


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("entry", cases(Group.ODD))
@pytest.mark.sample(
    "Dataclasses", "ViewsAndNothings", "ObjectsChanged", "InModuleDict", "Reversible", "Slices", "Hooked",
    "checkpointed, reentrant", "custom gradients", "moving average of weights",
)  # fmt: skip
def test_an_odd_model_trains_as_in_pytorch(build: Build, entry: Entry) -> None:
    check(build, entry.make, batches(3), microbatches=entry.microbatches, stash="host", device="cpu:discrete")


@pytest.mark.parametrize("entry", cases(Group.REUSED))
def test_a_model_that_calls_its_layers_several_times_trains_as_in_pytorch(build: Build, entry: Entry) -> None:
    check(build, entry.make, batches(3), microbatches=entry.microbatches)


def test_stochastic_depth_by_row_draws_the_promised_numbers(build: Build) -> None:
    def make() -> Layers:
        torch.manual_seed(0)
        return Layers(Dropping)

    ours, plain = make(), make()
    masks = GivenMasks(plain, ["layers.0", "layers.1", "layers.2", "epilogue"], 4)
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
    names = [stage.segment.name for stage in next(iter(trainer._compiler.cache)).stages]
    assert names == ["prologue", "parts.layers.0", "parts.layers.1", "epilogue"]
