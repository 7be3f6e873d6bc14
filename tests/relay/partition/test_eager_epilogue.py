"""Models whose code after the last layer has no graph train as in plain PyTorch: the code runs eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from relay.errors import CaptureError
from tests.support import reference
from tests.support.zoo.plain_models import Build, Output

pytestmark = pytest.mark.filterwarnings(
    "ignore:the code of .* runs eagerly", "ignore:The loss of .* cannot be followed"
)

WIDTH, CLASSES = 8, 6


class Rounded(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.round()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Base(nn.Module):
    """Embedding, layers with an op between them, and a head whose loss is to be filled in."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: Tensor, labels: Tensor) -> Output:
        first = value = self.embed(inputs)
        hidden = []
        for layer in self.layers:
            value = torch.tanh(layer(value))
            hidden.append(value)
        return self.end(value, labels, first, hidden)

    def end(self, value: Tensor, labels: Tensor, first: Tensor, hidden: list[Tensor]) -> Output:
        raise NotImplementedError


class Selected(Base):
    def end(self, value: Tensor, labels: Tensor, first: Tensor, hidden: list[Tensor]) -> Output:
        kept = labels != reference.IGNORED
        logits = self.head(value[kept])
        return Output(functional.cross_entropy(logits, labels[kept]), logits)


class TiedAndSelected(Base):
    def end(self, value: Tensor, labels: Tensor, first: Tensor, hidden: list[Tensor]) -> Output:
        kept = labels != reference.IGNORED
        logits = value[kept] @ self.embed.weight.T
        return Output(functional.cross_entropy(logits, labels[kept]), logits)


class CustomGradient(Base):
    def end(self, value: Tensor, labels: Tensor, first: Tensor, hidden: list[Tensor]) -> Output:
        logits = self.head(Rounded.apply(4 * value))
        return Output(functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class SkipFromTheStart(Base):
    def end(self, value: Tensor, labels: Tensor, first: Tensor, hidden: list[Tensor]) -> Output:
        kept = labels != reference.IGNORED
        logits = self.head((value + first)[kept])
        return Output(functional.cross_entropy(logits, labels[kept]), logits)


class AllHiddenStates(Base):
    def end(self, value: Tensor, labels: Tensor, first: Tensor, hidden: list[Tensor]) -> Output:
        kept = labels != reference.IGNORED
        logits = self.head(torch.stack(hidden).mean(0)[kept])
        return Output(functional.cross_entropy(logits, labels[kept]), logits)


class BranchOnTheResult(Base):
    def end(self, value: Tensor, labels: Tensor, first: Tensor, hidden: list[Tensor]) -> Output:
        logits = self.head(value if value.sum() > 0 else -value)
        return Output(functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class NormAndCounter(Base):
    def end(self, value: Tensor, labels: Tensor, first: Tensor, hidden: list[Tensor]) -> Output:
        self.calls += 1
        kept = labels != reference.IGNORED
        logits = self.head(self.norm(value[kept])) / self.calls
        return Output(functional.cross_entropy(logits, labels[kept]), logits)


class Transcribed(Base):
    """CTC, whose backward on the CPU reads lengths as numbers."""

    def end(self, value: Tensor, labels: Tensor, first: Tensor, hidden: list[Tensor]) -> Output:
        scores = functional.log_softmax(self.head(value), -1).transpose(0, 1)
        targets = labels.clamp(1)[:, :2]
        lengths = torch.full((len(labels),), labels.shape[1])
        if int(lengths.max()) > scores.shape[0]:
            raise ValueError("a length is too long")
        loss = functional.ctc_loss(scores, targets, lengths, (targets > 0).sum(1), reduction="sum")
        return Output(loss / len(labels), scores)


MODELS = [
    Selected, TiedAndSelected, CustomGradient, SkipFromTheStart, BranchOnTheResult, NormAndCounter, Transcribed,
]  # fmt: skip
SAMPLE = {TiedAndSelected, CustomGradient, NormAndCounter}


def batches(steps: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(steps):
        text = torch.randint(0, CLASSES, (4, 6), generator=generator)
        made.append(
            {"inputs": text[:, :-1].clone(), "labels": text[:, 1:].clone().index_fill(1, torch.tensor([0]), -100)}
        )
    return made


def two(make: Callable[[], Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    ours = make()
    torch.manual_seed(0)
    return ours, make()


@pytest.mark.parametrize(
    ("make", "microbatches"),
    [
        pytest.param(make, count, marks=() if make in SAMPLE and count == 1 else pytest.mark.exhaustive)
        for make in MODELS
        for count in (1, 2)
        if count == 1 or make is not TiedAndSelected
    ],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cpu:discrete", marks=pytest.mark.exhaustive)])
def test_what_follows_the_last_layer_runs_eagerly_as_in_pytorch(
    build: Build, make: type[Base], microbatches: int, device: str
) -> None:
    ours, plain = two(make)
    losses = reference.train(plain, batches(), microbatches)
    trainer = build(ours, microbatches=microbatches, device=device)
    assert [trainer.step(batch).loss for batch in batches()] == losses
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())


def test_outputs_of_several_layers_agree_to_rounding(build: Build) -> None:
    """What is computed between the layers is computed once more for the head, so gradients are added elsewhere."""
    ours, plain = two(AllHiddenStates)
    losses = reference.train(plain, batches(), 1)
    trainer = build(ours, microbatches=1)
    assert [trainer.step(batch).loss for batch in batches()] == pytest.approx(losses, rel=1e-6)


def test_the_layers_weights_and_the_embedding_are_not_loaded_for_it(build: Build) -> None:
    trainer = build(Selected(), microbatches=1)
    trainer.step(batches()[0])
    stages = trainer._compiler.compiled(trainer._compiler.take_apart(batches()[0], True), 0, True, False).stages
    assert stages[-1].parameters == ("head.weight", "head.bias")
    assert len(stages[-1].segment.inputs) == 2 + 1


def test_it_is_said_that_the_code_runs_eagerly_and_evaluation_and_outputs_work(build: Build) -> None:
    ours, plain = two(CustomGradient)
    trainer = build(ours, microbatches=1)
    with pytest.warns(UserWarning, match=r"CustomGradient after its last layer runs eagerly.*Rounded"):
        trainer.step(batches()[0])
    reference.train(plain, batches()[:1], 1)
    batch = batches()[1]
    plain.eval()
    assert trainer.evaluate(batch).loss == plain(**batch).loss.item()
    assert torch.equal(trainer.predict(batch).value, plain(**batch).value)
    ours.train()
    plain.train()
    found = trainer.step(batch, outputs=["value"]).outputs[0]["value"]
    assert torch.equal(found, plain(**batch).value)


class RandomBefore(Base):
    """What is selected at the end was drawn before the layers."""

    def forward(self, inputs: Tensor, labels: Tensor) -> Output:
        kept = torch.rand(labels.shape) > 0.5
        value = self.embed(inputs)
        for layer in self.layers:
            value = torch.tanh(layer(value))
        return Output(self.head(value[kept]).square().mean(), value)


class ChosenByDraw(Selected):
    def forward(self, inputs: Tensor, labels: Tensor) -> Output:
        value = self.embed(inputs)
        for layer in self.layers:
            if torch.rand([]) >= 0.5:
                value = torch.tanh(layer(value))
        return self.end(value, labels, value, [])


@pytest.mark.parametrize("make", [RandomBefore, ChosenByDraw])
def test_what_a_forward_of_its_own_would_draw_otherwise_is_refused(build: Build, make: type[Base]) -> None:
    with pytest.raises(CaptureError, match="depend on the data"):
        build(make(), microbatches=1).step(batches()[0])
