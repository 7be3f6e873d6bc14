"""Models that branch on values of the batch take PyTorch's branch, for every batch and micro-batch."""

from __future__ import annotations

import copy
import importlib.util
import logging
import threading
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import relay
from tests.support import reference
from tests.support.zoo.plain_models import Build

WIDTH = 8


class Output(NamedTuple):
    loss: Tensor
    value: Tensor


class Layer(nn.Module):
    """May be given a scale, as attention may be given a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor, scale: Tensor | None) -> Tensor:
        return torch.tanh(self.inner(value if scale is None else value * scale))


class Deciding(nn.Module):
    """Two layers, run with `scale`, which a subclass takes from the batch by looking at its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def scale(self, valid: Tensor) -> Tensor | None:
        raise NotImplementedError

    def forward(self, inputs: Tensor, valid: Tensor, targets: Tensor) -> Output:
        scale = self.scale(valid)
        value = self.first(inputs)
        for layer in self.layers:
            value = layer(value, scale)
        return Output(nn.functional.mse_loss(value, targets), value)


class AllKept(Deciding):
    def scale(self, valid: Tensor) -> Tensor | None:
        return None if valid.all() else valid.float()[:, None]


class HowMany(Deciding):
    """By a number, which becomes a part of the program."""

    def scale(self, valid: Tensor) -> Tensor | None:
        return torch.full((1,), 1.0 / max(1, int(valid.sum())))


class ByWriting(Deciding):
    """By a tensor that is written to before it is looked at."""

    def scale(self, valid: Tensor) -> Tensor | None:
        seen = torch.zeros(len(valid), dtype=torch.bool)
        seen[:] = valid.bool()
        return None if bool(seen.all()) else valid.float()[:, None] + 0.5


class Compared(Deciding):
    def scale(self, valid: Tensor) -> Tensor | None:
        return None if torch.equal(valid, torch.ones_like(valid)) else valid.float()[:, None]


def batches(rows: int = 6, steps: int = 6) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for step in range(steps):
        batch = {name: torch.randn(rows, WIDTH, generator=generator) for name in ("inputs", "targets")}
        batch["valid"] = torch.ones(rows, dtype=torch.long)
        if step % 3:
            batch["valid"][:: step + 1] = 0
        made.append(batch)
    return made


@pytest.mark.parametrize("kind", [AllKept, ByWriting, Compared])
@pytest.mark.parametrize(
    "options",
    [{"microbatches": 1}, {"microbatches": 4}, {"microbatches": 3, "device": "cpu:discrete", "stash": "host"}],
)
@pytest.mark.sample(2)
def test_branches_that_the_batch_decides_are_taken_as_in_pytorch(
    build: Build, kind: type[Deciding], options: dict[str, Any]
) -> None:
    """With several micro-batches some take one branch and some the other, within one step."""
    torch.manual_seed(0)
    ours = kind()
    plain = copy.deepcopy(ours)
    losses = reference.train(plain, batches(), options["microbatches"])
    trainer = build(ours, **options)
    assert [trainer.step(batch).loss for batch in batches()] == losses
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


@pytest.mark.parametrize("microbatches", [1, 3, 4])
@pytest.mark.sample("3")
def test_a_number_that_the_batch_decides_is_that_of_the_whole_batch_in_every_micro_batch(
    build: Build, microbatches: int
) -> None:
    torch.manual_seed(0)
    ours = HowMany()
    plain = copy.deepcopy(ours)
    losses = reference.train(plain, batches(), 1)
    trainer = build(ours, microbatches=microbatches)
    found = [trainer.step(batch).loss for batch in batches()]
    torch.testing.assert_close(found, losses, rtol=0 if microbatches == 1 else 1e-5, atol=0)


def test_evaluation_decides_too_and_a_batch_is_not_changed_by_the_question(build: Build) -> None:
    torch.manual_seed(0)
    model = AllKept()
    plain = copy.deepcopy(model).eval()
    trainer = build(model, microbatches=2)
    for batch in batches(steps=3):
        before = {name: tensor.clone() for name, tensor in batch.items()}
        expected = plain(**batch)
        torch.testing.assert_close(trainer.predict(batch).value, expected.value, rtol=1e-6, atol=1e-6)
        assert all(torch.equal(batch[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_depends_on_the_weights_is_pytorchs_until_it_changes_and_is_then_refused_by_name(
    build: Build, seed: int
) -> None:
    """The answer could change within the step that it is asked in."""

    class ByWeights(Deciding):
        def scale(self, valid: Tensor) -> Tensor | None:
            found = None if (self.first.weight * valid[0]).sum() > 0 else valid.float()[:, None]
            answers.append(found is None)
            return found

    answers: list[bool] = []
    torch.manual_seed(seed)
    ours = ByWeights()
    plain = copy.deepcopy(ours)
    losses = reference.train(plain, batches(), 2)
    decided = answers[:]
    trainer = build(ours, microbatches=2)
    for step, batch in enumerate(batches()):
        if len(set(decided[: 2 * step + 2])) == 1:
            assert trainer.step(batch).loss == losses[step]
            continue
        with pytest.raises(relay.CaptureError, match=r"'layers\.0' is given arguments .* depend on the data"):
            trainer.step(batch)
        break


def test_micro_batches_that_take_other_layers_cannot_share_a_step_and_that_is_said(build: Build) -> None:
    class Between(AllKept):
        def forward(self, inputs: Tensor, valid: Tensor, targets: Tensor) -> Output:
            value = self.layers[0](inputs, None)
            value = self.layers[1](value if valid.all() else value * valid.float()[:, None], None)
            return Output(nn.functional.mse_loss(value, targets), value)

    trainer = build(Between(), microbatches=2)
    valid = torch.tensor([1, 1, 1, 0, 1, 1])
    with pytest.raises(relay.PartitionError, match="cannot share a step"):
        trainer.step({**batches()[0], "valid": valid})


def test_many_answers_mean_many_programs_and_that_is_said_once(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    trainer = build(HowMany(), microbatches=1, max_cached_programs=9)
    with caplog.at_level(logging.WARNING, logger="relay"):
        for count in range(12):
            batch = batches(12, 1)[0]
            batch["valid"][:count] = 0
            trainer.step(batch)
    messages = [record.getMessage() for record in caplog.records]
    messages = [message for message in messages if "reads numbers from the batch" in message]
    assert len(messages) == 1
    assert len(trainer._compiler.cache) == 9


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_other_threads_and_later_code_see_transformers_as_it_is(build: Build) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.utils import import_utils

    original = import_utils.is_fake_tensor
    fake = FakeTensorMode().from_tensor(torch.ones(2))
    seen: list[bool] = []

    class Looking(AllKept):
        def scale(self, valid: Tensor) -> Tensor | None:
            asked = threading.Thread(target=lambda: seen.append(import_utils.is_fake_tensor(fake)))
            asked.start()
            asked.join()
            seen.append(import_utils.is_fake_tensor(valid))
            return super().scale(valid)

    trainer = build(Looking(), microbatches=1)
    trainer.step(batches()[0])
    assert seen == [True, False]
    assert import_utils.is_fake_tensor is original
