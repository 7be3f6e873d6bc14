"""A forward that changes what its layers read, for some of their calls alone, is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relay.errors import PartitionError
from tests.support import reference
from tests.support.zoo.odd_models import Layers
from tests.support.zoo.plain_models import WIDTH, Build, batches

SCALE = 1.0


class Layer(nn.Module):
    """A layer that reads its state in many places: of its own, of a submodule, of a shared object and of a global."""

    def __init__(self, shared: SimpleNamespace) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)
        self.adapter = Adapter()
        self.off = False
        self.shared = shared
        self.table = {"sign": 1}
        self.seen = 0
        self.number = 0

    def forward(self, value: Tensor) -> Tensor:
        self.seen += 1
        if self.off:
            return value
        made = self.dropout(torch.tanh(self.adapter(self.inner(value)))) * SCALE * self.table["sign"]
        return value + (made * 2 if self.shared.double else made)


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.disabled = False

    def forward(self, value: Tensor) -> Tensor:
        return value if self.disabled else value * self.weight


class Changing(Layers):
    """Its layers run twice. What `around` does is done around the second pass."""

    def __init__(self, around: Callable[[Any], Any]) -> None:
        self.shared = SimpleNamespace(double=False, calls=0)
        shared = self.shared
        super().__init__(lambda: Layer(shared), count=2)
        self.shared, self.around = shared, around

    def run(self, value: Tensor) -> Tensor:
        value = super().run(value)
        with self.around(self):
            return super().run(value)


class OnceEach(Changing):
    """Its layers run once; what `around` does is done around the second of them."""

    def run(self, value: Tensor) -> Tensor:
        value = self.layers[0](value)
        with self.around(self):
            return self.layers[1](value)


class After(Changing):
    """What `around` does is done after the layers, and before the next forward undone: by its code after the layers."""

    def run(self, value: Tensor) -> Tensor:
        with self.around(self):
            value = Layers.run(self, value)
        return value * 2


def setting(place: Callable[[Changing], Any], name: str, value: Any) -> Callable[[Changing], Any]:
    @contextmanager
    def around(model: Changing) -> Iterator[None]:
        subject = place(model)
        subjects = subject if isinstance(subject, list) else [subject]
        tables = [one if isinstance(one, dict) else vars(one) for one in subjects]
        before = [table[name] for table in tables]
        for table in tables:
            table[name] = value
        yield
        for table, old in zip(tables, before, strict=True):
            table[name] = old

    return around


@contextmanager
def in_the_other_mode(model: Changing) -> Iterator[None]:
    mode = model.training
    model.train(not mode)
    yield
    model.train(mode)


@contextmanager
def with_a_global(model: Changing) -> Iterator[None]:
    global SCALE
    SCALE = 0.5
    yield
    SCALE = 1.0


OFF = setting(lambda model: list(model.layers), "off", True)
ADAPTERS = setting(lambda model: [layer.adapter for layer in model.layers], "disabled", True)
DROPOUT = setting(lambda model: [layer.dropout for layer in model.layers], "p", 0.5)
TABLE = setting(lambda model: model.layers[1].table, "sign", -1)
SHARED = setting(lambda model: model.shared, "double", True)


@pytest.mark.parametrize(
    ("make", "around", "named"),
    [
        (Changing, OFF, r"layers\.0\.off"),
        (Changing, ADAPTERS, r"layers\.0\.adapter\.disabled"),
        (Changing, DROPOUT, r"layers\.0\.dropout\.p"),
        (Changing, TABLE, r"table.*sign"),
        (Changing, SHARED, r"shared\.double"),
        (Changing, in_the_other_mode, r"layers\.0.*training"),
        (Changing, with_a_global, "SCALE"),
        (OnceEach, SHARED, r"shared\.double"),
        (OnceEach, with_a_global, "SCALE"),
        (After, OFF, r"layers\.0\.off"),
        (After, ADAPTERS, r"layers\.0\.adapter\.disabled"),
    ],
)
def test_a_state_that_holds_for_some_calls_alone_is_refused_by_name(
    build: Build, make: Callable[..., nn.Module], around: Callable[[Any], Any], named: str
) -> None:
    torch.manual_seed(0)
    model = make(around)
    before = reference.copy_of(model.state_dict())
    with pytest.raises(PartitionError, match=f"changes .*{named}.*as an argument"):
        build(model, microbatches=1).step(batches(1)[0])
    reference.assert_same_state(model.state_dict(), before)


def test_it_is_refused_where_the_code_around_the_layers_runs_eagerly(build: Build) -> None:
    class Eager(Changing):
        def run(self, value: Tensor) -> Tensor:
            value = super().run(value)
            return value[value.sum(-1) > 0] if value.numel() == 0 else value * len(torch.unique(value.detach() > 0))

    torch.manual_seed(0)
    with pytest.raises(PartitionError, match=r"layers\.0\.off"):
        build(Eager(OFF), microbatches=1).step(batches(1)[0])


class SetBefore(Layers):
    """Sets its layers' state in every forward, before they are called, and changes what they do not read or count."""

    def __init__(self) -> None:
        self.shared = SimpleNamespace(double=False, calls=0)
        shared = self.shared
        super().__init__(lambda: Layer(shared), count=2)
        self.shared = shared

    def run(self, value: Tensor) -> Tensor:
        self.shared.double = True
        for number, layer in enumerate(self.layers):
            layer.off = False
            layer.number = number
            self.shared.calls += 1
            value = layer(layer(value))
            layer.number = 0
        return value


def test_a_state_that_is_set_before_the_layers_and_stays_is_that_of_plain_pytorch(build: Build) -> None:
    torch.manual_seed(0)
    model, plain = SetBefore(), SetBefore()
    plain.load_state_dict(model.state_dict())
    trainer = build(model, microbatches=1)
    for batch in batches(2):
        expected = plain(**batch).loss
        assert trainer.evaluate(batch).loss == expected.item()
