"""Models whose code before or between their layers has no graph train as in plain PyTorch: it runs eagerly.

Devices that take graphs alone have the host run it.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import relay
from relay.errors import CaptureError, PartitionError
from tests.support import reference
from tests.support.zoo.plain_models import Build, Output

pytestmark = pytest.mark.filterwarnings(
    "ignore:the code of .* runs eagerly", "ignore:layer 'prologue' runs eagerly", "ignore:The loss of .* cannot be"
)

WIDTH, CLASSES, IMAGE = 8, 6, 0


class Rounded(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.round()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Base(nn.Module):
    """Tokens and images, layers with code between them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.images = nn.Embedding(CLASSES, WIDTH), nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("calls", torch.zeros(()))

    def begin(self, inputs: Tensor, images: Tensor) -> Tensor:
        merged = self.embed(inputs).clone()
        merged[inputs == IMAGE] = self.images(images)[inputs == IMAGE]
        return merged

    def between(self, value: Tensor, first: Tensor) -> Tensor:
        return value

    def end(self, value: Tensor, labels: Tensor) -> Output:
        logits = self.head(value)
        return Output(functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)

    def forward(self, inputs: Tensor, images: Tensor, labels: Tensor) -> Output:
        first = value = self.begin(inputs, images)
        for layer in self.layers:
            value = self.between(torch.tanh(layer(value)), first)
        return self.end(value, labels)


class CustomGradient(Base):
    def begin(self, inputs: Tensor, images: Tensor) -> Tensor:
        return Rounded.apply(4 * self.embed(inputs)) + self.images(images).mean(1, keepdim=True)


class CustomAndSkips(CustomGradient):
    def between(self, value: Tensor, first: Tensor) -> Tensor:
        return Rounded.apply(4 * value) + first.detach().mean(-1, keepdim=True)


class States(Base):
    """A counter and a BatchNorm before the first layer."""

    def begin(self, inputs: Tensor, images: Tensor) -> Tensor:
        self.calls += 1
        normed = self.norm(self.embed(inputs).transpose(1, 2)).transpose(1, 2)
        return Rounded.apply(4 * normed) / self.calls


class MergedAndSelected(Base):
    def end(self, value: Tensor, labels: Tensor) -> Output:
        kept = labels != reference.IGNORED
        logits = self.head(value[kept])
        return Output(functional.cross_entropy(logits, labels[kept]), logits)


MODELS = [Base, CustomGradient, CustomAndSkips, States, MergedAndSelected]


def batches(steps: int = 2) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(steps):
        text = torch.randint(0, CLASSES, (4, 6), generator=generator)
        text[:, 1] = IMAGE
        labels = text[:, 1:].clone().index_fill(1, torch.tensor([0]), -100)
        made.append(
            {"inputs": text[:, :-1].clone(), "images": torch.randn(4, 5, 4, generator=generator), "labels": labels}
        )
    return made


def two(make: type[Base]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize(
    ("make", "microbatches", "device"),
    [
        (Base, 1, "cpu"),
        (CustomAndSkips, 2, "cpu"),
        (States, 2, "cpu:discrete"),
        *(
            pytest.param(make, count, device, marks=pytest.mark.exhaustive)
            for make in MODELS
            for count in (1, 2)
            for device in ("cpu", "cpu:discrete", "sim")
        ),
    ],
)
def test_what_comes_before_the_layers_or_between_them_runs_eagerly_as_in_pytorch(
    build: Build, make: type[Base], microbatches: int, device: str
) -> None:
    ours, plain = two(make)
    losses = reference.train(plain, batches(), microbatches)
    trainer = build(ours, microbatches=microbatches, device=device)
    assert [trainer.step(batch).loss for batch in batches()] == losses
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("make", "device"),
    [
        (CustomAndSkips, "numpy"),
        (MergedAndSelected, "onnx:cpu"),
        *(
            pytest.param(make, device, marks=pytest.mark.exhaustive)
            for make in MODELS
            for device in ("numpy", "onnx:cpu", "opencl:0")
        ),
    ],
)
def test_a_device_that_takes_graphs_alone_has_the_host_run_it(build: Build, make: type[Base], device: str) -> None:
    ours, plain = two(make)
    losses = reference.train(plain, batches(), 2)
    trainer = build(ours, microbatches=2, device=device)
    with pytest.warns(UserWarning, match="runs eagerly, on the host"):
        found = [trainer.step(batches()[0]).loss]
    found += [trainer.step(batch).loss for batch in batches()[1:]]
    assert found == pytest.approx(losses, rel=1e-5)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(trainer.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


def test_the_hosts_copies_of_values_are_in_its_ledger_and_go_with_the_trainer() -> None:
    with relay.Trainer(CustomGradient(), device="numpy", microbatches=1) as trainer:
        trainer.step(batches()[0])
        rows = {state: size for state, _, size in trainer._session.host.ledger.rows()}
        assert rows["values of code that the host runs"] > 0


def test_it_is_said_once_and_evaluation_prediction_and_outputs_work(build: Build) -> None:
    class Own(CustomAndSkips):
        """Of a class of its own: what other tests captured is not said again."""

    ours, plain = two(Own)
    trainer = build(ours, microbatches=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.step(batches()[0])
    said = [str(one.message) for one in caught if "runs eagerly" in str(one.message)]
    assert len(said) == 1
    assert "Own around its layers runs eagerly" in said[0]
    reference.train(plain, batches()[:1], 1)
    batch = batches()[1]
    plain.eval()
    assert trainer.evaluate(batch).loss == plain(**batch).loss.item()
    assert torch.equal(trainer.predict(batch).value, plain(**batch).value)


class CountedBeforeAndAfter(Base):
    """What is counted before the layers is read after them, so two parts would each count."""

    def begin(self, inputs: Tensor, images: Tensor) -> Tensor:
        self.calls += 1
        return self.embed(inputs)

    def end(self, value: Tensor, labels: Tensor) -> Output:
        kept = labels != reference.IGNORED
        logits = self.head(value[kept]) / self.calls
        return Output(functional.cross_entropy(logits, labels[kept]), logits)


class OneDrawForTwoParts(CustomGradient):
    def forward(self, inputs: Tensor, images: Tensor, labels: Tensor) -> Output:
        noise = torch.rand(len(inputs), 1, 1)
        value = Rounded.apply(4 * self.embed(inputs)) + noise
        for layer in self.layers:
            value = torch.tanh(layer(value)) + noise
        return self.end(value, labels)


@pytest.mark.parametrize("make", [CountedBeforeAndAfter, OneDrawForTwoParts])
def test_what_two_parts_would_each_change_or_draw_is_refused(build: Build, make: type[Base]) -> None:
    with pytest.raises((CaptureError, PartitionError)):
        build(make(), microbatches=1).step(batches()[0])


class NumberFromTheData(Base):
    """Its layers are given a number that the batch decides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, inputs: Tensor, images: Tensor, labels: Tensor) -> Output:
        value, factor = Rounded.apply(4 * self.embed(inputs)), int(inputs[0, 0])
        for layer in self.layers:
            value = layer(value, factor)
        return self.end(value, labels)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor, factor: int) -> Tensor:
        return self.inner(value) * factor


def test_a_number_that_the_data_decide_and_a_layer_takes_is_refused_where_it_changes(build: Build) -> None:
    trainer = build(NumberFromTheData(), microbatches=1)
    batch = batches()[0]
    trainer.step(batch)
    other = {**batch, "inputs": (batch["inputs"] + 1) % CLASSES}
    with pytest.raises(CaptureError, match=r"'layers.0' is given arguments .* depend on the data"):
        trainer.step(other)
