"""Gradient accumulation over batches of their own shapes, and outputs of the training forward, beside plain PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relay.errors import BatchError
from tests.support import reference
from tests.support.zoo.plain_models import Build, perceptron, regression

WIDTH, CLASSES = 8, 5


class Output(dict[str, Any]):
    """A mapping with attributes, as transformers returns it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Tagger(nn.Module):
    """Gives each token of a sequence a class; returns its loss, its logits and what each layer computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        value = self.first(inputs)
        states = []
        for layer in self.layers:
            value = value + torch.tanh(layer(value))
            states.append(value)
        logits = self.last(value)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=self.reduction)
        return Output(loss=loss, logits=logits, states=tuple(states), cache=None)

    reduction = "mean"


class SumTagger(Tagger):
    """The same with a sum over tokens for a loss."""

    reduction = "sum"


def tagger(kind: type[Tagger] = Tagger) -> Tagger:
    torch.manual_seed(0)
    return kind()


def padded(*shapes: tuple[int, int], seed: int = 1) -> list[dict[str, Tensor]]:
    """Pieces of these (samples, length), with some of their labels masked as padding."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for samples, length in shapes:
        labels = torch.randint(CLASSES, (samples, length), generator=generator)
        labels[torch.rand(samples, length, generator=generator) < 0.4] = reference.IGNORED
        labels[0, 0] = 1
        made.append({"inputs": torch.randn(samples, length, WIDTH, generator=generator), "labels": labels})
    return made


STEPS = [padded((2, 5), (3, 4), (1, 9)), padded((4, 3), (2, 5), seed=2), padded((3, 4), seed=3)]


def accumulated(model: nn.Module, steps: list[Any], shares: Callable[[Any], list[float]]) -> tuple[list[float], Any]:
    """Plain PyTorch's gradient accumulation: its losses, and its outputs, piece by piece."""
    optimizer = reference.adamw(list(model.parameters()))
    losses, outputs = [], []
    for pieces in steps:
        total, rows = 0.0, []
        for piece, share in zip(pieces, shares(pieces), strict=True):
            found = model(**piece)
            (found.loss * share).backward()
            total += (found.loss * share).item()
            rows.append(found)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        outputs.append(rows)
    return losses, outputs


@pytest.mark.parametrize(
    "options",
    [{}, {"stash": "host", "device": "cpu:discrete", "slots": 1}, {"recompute": False, "layers_per_slot": 2}],
    ids=["device", "host", "merged"],
)
@pytest.mark.sample(2)
def test_pieces_of_their_own_shapes_are_gradient_accumulation(build: Build, options: dict[str, Any]) -> None:
    plain, ours = tagger(), tagger()
    losses, _ = accumulated(plain, STEPS, reference.by_targets)
    trainer = build(ours, **options)
    assert [trainer.step(pieces=pieces).loss for pieces in STEPS] == losses
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


def test_pieces_of_a_sum_each_count_in_full(build: Build) -> None:
    plain, ours = tagger(SumTagger), tagger(SumTagger)
    losses, _ = accumulated(plain, STEPS, lambda pieces: [1.0] * len(pieces))
    trainer = build(ours)
    assert [trainer.step(pieces=pieces).loss for pieces in STEPS] == losses
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


def test_weights_are_what_each_pieces_loss_is_multiplied_by(build: Build) -> None:
    plain, ours = tagger(), tagger()
    weights = [0.25, 2.0, 0.0]
    losses, _ = accumulated(plain, STEPS[:1], lambda pieces: weights)
    trainer = build(ours)
    assert trainer.step(pieces=STEPS[0], weights=weights).loss == losses[0]
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


def test_pieces_of_a_list_of_modules(build: Build) -> None:
    plain, modules = nn.Sequential(*perceptron()), perceptron()
    pieces = [regression(3, seed=1), regression(5, seed=2)]
    shares = [3 / 8, 5 / 8]
    optimizer = reference.adamw(list(plain.parameters()))
    expected, found = 0.0, []
    for (inputs, targets), share in zip(pieces, shares, strict=True):
        found.append(plain(inputs))
        loss = nn.functional.mse_loss(found[-1], targets) * share
        loss.backward()
        expected += loss.item()
    optimizer.step()
    metrics = build(modules, loss=nn.functional.mse_loss).step(pieces=pieces, outputs=["output"])
    assert metrics.loss == expected
    assert all(torch.equal(row["output"], value) for row, value in zip(metrics.outputs, found, strict=True))
    reference.assert_same_state(nn.Sequential(*modules).state_dict(), plain.state_dict())


@pytest.mark.parametrize("options", [{}, {"stash": "host", "device": "cpu:discrete"}], ids=["device", "host"])
def test_outputs_are_those_of_the_training_forward_detached(build: Build, options: dict[str, Any]) -> None:
    plain, ours = tagger(), tagger()
    losses, outputs = accumulated(plain, STEPS, reference.by_targets)
    trainer = build(ours, **options)
    names = ["logits", "states", "loss", "cache"]
    for pieces, loss, rows in zip(STEPS, losses, outputs, strict=True):
        metrics = trainer.step(pieces=pieces, outputs=names)
        assert metrics.loss == loss
        assert len(metrics.outputs) == len(rows)
        for found, expected in zip(metrics.outputs, rows, strict=True):
            assert found is not None
            assert list(found) == names
            assert found["cache"] is None
            tensors = [(found["logits"], expected.logits), (found["loss"], expected.loss)]
            tensors += list(zip(found["states"], expected.states, strict=True))
            assert len(tensors) == 5
            for mine, theirs in tensors:
                assert torch.equal(mine, theirs)
                assert not mine.requires_grad
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


def test_outputs_of_a_batch_that_is_cut_come_for_each_micro_batch(build: Build) -> None:
    plain, ours = tagger(), tagger()
    (batch,) = padded((7, 4))
    _, outputs = accumulated(plain, [reference.cut(batch, 3)], reference.by_targets)
    metrics = build(ours, microbatches=3).step(batch, outputs=["logits"])
    assert [list(row) for row in metrics.outputs] == [["logits"]] * 3  # type: ignore[arg-type]
    for found, expected in zip(metrics.outputs, outputs[0], strict=True):
        assert torch.equal(found["logits"], expected.logits)  # type: ignore[index]
    assert build(tagger(), microbatches=3).step(batch).outputs == []


def test_outputs_of_a_last_layer_that_runs_eagerly(build: Build) -> None:
    class Sorts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 3)

        def forward(self, value: Tensor) -> Tensor:
            found = self.inner(value)
            return found * (2.0 if found.sum() > 0 else 3.0)

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), Sorts())
    torch.manual_seed(0)
    ours = [nn.Linear(6, 8), Sorts()]
    inputs, targets = regression(4)
    trainer = build(ours, loss=nn.functional.mse_loss, microbatches=2)
    with pytest.warns(UserWarning, match="eagerly"):
        metrics = trainer.step((inputs, targets), outputs=["output"])
    for found, rows in zip(metrics.outputs, inputs.split(2), strict=True):
        assert torch.equal(found["output"], plain(rows))  # type: ignore[index]


def test_a_piece_without_targets_adds_nothing_and_has_no_outputs(build: Build) -> None:
    plain, ours = tagger(), tagger()
    first, empty, last = padded((2, 5), (3, 4), (1, 9))
    empty["labels"].fill_(reference.IGNORED)
    losses, outputs = accumulated(plain, [[first, last]], reference.by_targets)
    metrics = build(ours).step(pieces=[first, empty, last], outputs=["logits"])
    assert metrics.loss == losses[0]
    assert metrics.outputs[1] is None
    assert torch.equal(metrics.outputs[2]["logits"], outputs[0][1].logits)  # type: ignore[index]
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


def test_gradients_come_to_what_pieces_were_computed_from(build: Build) -> None:
    plain, ours = tagger(), tagger()
    mine, theirs = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def prompted(prompt: Tensor) -> list[dict[str, Tensor]]:
        return [piece | {"inputs": piece["inputs"] + prompt} for piece in STEPS[0]]

    accumulated(plain, [prompted(theirs)], reference.by_targets)
    build(ours).step(pieces=prompted(mine))
    assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, BatchError, "or pieces="),
        ({"batch": STEPS[0][0], "pieces": STEPS[0]}, TypeError, "not both"),
        ({"pieces": []}, BatchError, "empty"),
        ({"pieces": STEPS[0][0]}, TypeError, "pieces= must be a list; got dict"),
        ({"pieces": STEPS[0], "weights": [1.0]}, ValueError, "1 entries for 3 pieces"),
        ({"pieces": STEPS[0], "weights": [1.0, 2.0, float("nan")]}, ValueError, "finite"),
        ({"batch": STEPS[0][0], "weights": [1.0]}, TypeError, "pieces="),
        ({"pieces": STEPS[0], "outputs": ["logit"]}, ValueError, "'logit'.*loss, logits, states"),
        ({"pieces": STEPS[0], "outputs": "logits"}, TypeError, r"\['logits'\]"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_step(
    build: Build, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    trainer = build(tagger())
    with pytest.raises(error, match=message):
        trainer.step(**given)
    assert trainer.steps == 0
