"""What a model does around its layers, or keeps in attributes, is as in plain PyTorch or refused by name."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from relay.capture.guards.plain_tensors import KeepsState
from relay.errors import PartitionError
from tests.support import reference
from tests.support.zoo.plain_models import Build

WIDTH, CLASSES = 8, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.kept: Tensor | None = None

    def forward(self, value: Tensor) -> Tensor:
        return value + torch.tanh(self.inner(value))


class Base(nn.Module):
    layer: type[Layer] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(self.layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("queue", torch.linspace(-1, 1, 6 * WIDTH).view(6, WIDTH))
        self.kept: Tensor | None = None

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        value = self.embed(inputs)
        for layer in self.layers:
            value = layer(value)
        return self.end(value, labels)

    def end(self, value: Tensor, labels: Tensor) -> Any:
        logits = self.head(value)
        return SimpleNamespace(loss=functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


def batches(steps: int = 2) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {name: torch.randint(0, CLASSES, (4, 5), generator=generator) for name in ("inputs", "labels")}
        for _ in range(steps)
    ]


def trains_as_in_pytorch(build: Build, model: nn.Module, microbatches: int = 1) -> None:
    plain = copy.deepcopy(model)
    losses = reference.train(plain, batches(), microbatches)
    trainer = build(model, microbatches=microbatches)
    assert [trainer.step(batch).loss for batch in batches()] == losses
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())


class HeadUnderAutocast(Base):
    def end(self, value: Tensor, labels: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.head(value)
        return SimpleNamespace(loss=functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten()))


class EmbeddingUnderAutocast(Base):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            first = self.before(self.embed(inputs))
        value = first.float()
        for layer in self.layers:
            value = layer(value)
        return self.end(value, labels)


@pytest.mark.parametrize("make", [HeadUnderAutocast, EmbeddingUnderAutocast])
def test_an_autocast_of_the_models_own_around_the_layers_is_kept(build: Build, make: type[Base]) -> None:
    torch.manual_seed(0)
    trains_as_in_pytorch(build, make(), 2)


class WithoutAutocast(Base):
    """What must be exact is computed without the autocast around the model."""

    def end(self, value: Tensor, labels: Tensor) -> Any:
        logits = self.head(value)
        with torch.autocast("cpu", enabled=False):
            wide = logits.float()
            similar = (wide @ wide.transpose(1, 2)).mean()
        return SimpleNamespace(loss=functional.cross_entropy(wide.flatten(0, 1), labels.flatten()) + similar)


def test_a_region_without_autocast_is_kept_in_half_precision(build: Build) -> None:
    torch.manual_seed(0)
    model = WithoutAutocast()
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(**batches()[0]).loss.item()
    assert build(model, microbatches=1, precision="bf16").step(batches()[0]).loss == expected


class Queue(Base):
    """Assigns a buffer of the model in its forward, as memory banks do."""

    def end(self, value: Tensor, labels: Tensor) -> Any:
        pooled = value.mean(1)
        logits = pooled @ self.queue.T
        self.queue = torch.cat([pooled.detach(), self.queue[: -len(pooled)]])
        return SimpleNamespace(loss=functional.cross_entropy(logits, labels[:, 0]))


class QueueInLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.linspace(-1, 1, 6 * WIDTH).view(6, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        pooled = value.mean(1)
        read = torch.softmax(pooled @ self.queue.T, -1) @ self.queue
        self.queue = torch.cat([pooled.detach(), self.queue[: -len(pooled)]])
        return super().forward(value + read[:, None])


def test_a_buffer_that_a_layer_reads_and_assigns_is_changed(build: Build) -> None:
    class Model(Base):
        layer = QueueInLayer

    torch.manual_seed(0)
    trains_as_in_pytorch(build, Model(), 2)


class QueueOfSelected(Queue):
    """The same in code that runs eagerly."""

    def end(self, value: Tensor, labels: Tensor) -> Any:
        pooled, kept = value.mean(1), labels[:, 0] > 0
        logits = pooled @ self.queue.T
        self.queue = torch.cat([pooled.detach(), self.queue[: -len(pooled)]])
        return SimpleNamespace(loss=functional.cross_entropy(logits[kept], labels[:, 0][kept]))


@pytest.mark.filterwarnings("ignore:the code of .* runs eagerly")
def test_a_buffer_that_code_run_eagerly_assigns_is_changed(build: Build) -> None:
    torch.manual_seed(0)
    trains_as_in_pytorch(build, QueueOfSelected())


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_buffer_of_the_model_that_its_forward_assigns_is_changed(build: Build, microbatches: int) -> None:
    torch.manual_seed(0)
    trains_as_in_pytorch(build, Queue(), microbatches)


class CachedMask(Layer):
    """Makes its mask once, in the first call."""

    def forward(self, value: Tensor) -> Tensor:
        if self.kept is None or self.kept.shape[0] != value.shape[1]:
            self.kept = torch.tril(torch.ones(value.shape[1], value.shape[1]))
        return super().forward(self.kept @ value)


class CachedMaskAndGates(CachedMask):
    """The same in a layer that runs eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(self.gates(value)[0])


@pytest.mark.parametrize("layer", [CachedMask, CachedMaskAndGates])
@pytest.mark.filterwarnings("ignore:The loss of .* cannot be")
def test_a_tensor_that_the_first_call_puts_in_the_place_of_none_is_a_constant(build: Build, layer: type[Layer]) -> None:
    class Model(Base):
        pass

    Model.layer = layer
    torch.manual_seed(0)
    trains_as_in_pytorch(build, Model(), 2)


class Remembers(Layer):
    def forward(self, value: Tensor) -> Tensor:
        result = super().forward(value if self.kept is None else value + self.kept)
        self.kept = result.detach()
        return result


class RemembersInGates(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, value: Tensor) -> Tensor:
        result, state = self.gates(value, self.kept)
        self.kept = state.detach()
        return result


class RemembersOutside(Base):
    def end(self, value: Tensor, labels: Tensor) -> Any:
        value = value if self.kept is None else value + self.kept
        self.kept = value.detach()
        return super().end(value, labels)


@pytest.mark.parametrize("kind", [Remembers, RemembersInGates, RemembersOutside])
def test_a_state_that_begins_as_none_is_refused_by_name(build: Build, kind: type[Any]) -> None:
    class Model(Base):
        layer = kind if issubclass(kind, Layer) else Layer

    with pytest.raises(KeepsState, match=r"kept' *, which is no buffer.*register_buffer"):
        build(kind() if kind is RemembersOutside else Model(), microbatches=1).step(batches()[0])


def test_an_embedding_that_scales_by_frequency_is_refused_over_micro_batches(build: Build) -> None:
    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(CLASSES, WIDTH, scale_grad_by_freq=True)

    torch.manual_seed(0)
    trains_as_in_pytorch(build, Model(), 1)
    with pytest.raises(PartitionError, match="how often a row is looked up in the batch"):
        build(Model(), microbatches=2).step(batches()[0])


class OddOutputs(Base):
    """Outputs whose first dimension is not that of the samples."""

    def end(self, value: Tensor, labels: Tensor) -> Any:
        logits = self.head(value)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "flat": logits.flatten(0, 1), "by_time": logits.transpose(0, 1), "sum": logits.sum()}


def test_outputs_are_joined_along_the_dimension_of_the_samples(build: Build) -> None:
    torch.manual_seed(0)
    model = OddOutputs()
    plain, batch = copy.deepcopy(model), batches()[0]
    expected, found = plain(**batch), build(model, microbatches=3).predict(batch)
    for name in ("flat", "by_time", "sum"):
        torch.testing.assert_close(found[name], expected[name].detach(), rtol=1e-6, atol=1e-6)


class OddOutputsOfSelected(Base):
    """Its loss cannot be followed, so it is not known which dimension is that of the samples."""

    def end(self, value: Tensor, labels: Tensor) -> Any:
        logits, kept = self.head(value), labels > 0
        return {"loss": functional.cross_entropy(logits[kept], labels[kept]), "flat": logits.flatten(0, 1)}


@pytest.mark.filterwarnings("ignore:.*runs eagerly", "ignore:The loss of .* cannot be")
def test_an_output_that_could_be_put_together_in_several_ways_is_refused(build: Build) -> None:
    trainer = build(OddOutputsOfSelected(), microbatches=3)
    with pytest.raises(PartitionError, match="which of their dimensions is that of the samples"):
        trainer.predict(batches()[0])
