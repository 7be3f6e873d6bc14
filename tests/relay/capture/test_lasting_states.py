"""What a forward keeps in lists, dicts, objects, arrays, iterators, closures and generators is as in plain PyTorch, or
refused by name if the next call reads it.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import relay
from relay.capture.guards.plain_tensors import KeepsState
from tests.support.zoo.plain_models import Block, Build, Stack, batches, check

Read = Callable[[Any], Any]
"""Changes what it is given as a forward does, and returns a number to multiply with."""


def with_tensor(kept: dict[str, Tensor]) -> Any:
    before = kept.get("last", 1.0)
    kept["last"] = torch.full((), 0.5)
    return before


def length(kept: Any) -> float:
    kept.append(1)
    return 1 + 0.1 * len(kept)


def entry(kept: list[Tensor]) -> Tensor:
    before, kept[0] = kept[0], kept[0] * 0.5
    return before


def in_place(kept: list[Tensor]) -> Tensor:
    before = kept[0] * 1.0
    kept[0].mul_(0.5)
    return before


def of_object(kept: Any) -> float:
    kept.count += 1
    return 1 + 0.1 * float(kept.count)


def of_array(kept: np.ndarray) -> float:
    kept += 1
    return 1 + 0.1 * float(kept[0])


def of_set(kept: set[int]) -> float:
    kept.add(len(kept))
    return 1 + 0.1 * len(kept)


class Counting:
    count = 0


class Kept(Block):
    """A layer, or a model, that keeps a state in an attribute."""

    def __init__(self, make: Callable[[], Any], read: Read) -> None:
        super().__init__()
        self.kept, self.read = make(), read

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) * self.read(self.kept)


STATES: dict[str, tuple[Callable[[], Any], Read]] = {
    "a tensor in a dict": (dict, with_tensor),
    "the length of a list": (list, length),
    "a deque": (lambda: deque(maxlen=9), length),
    "an entry of a list": (lambda: [torch.ones(())], entry),
    "a tensor in a list, in place": (lambda: [torch.ones(())], in_place),
    "a tensor, in place": (lambda: torch.ones(1), lambda kept: in_place([kept])),
    "an object": (lambda: SimpleNamespace(count=0), of_object),
    "an object, by its class": (Counting, of_object),
    "an array": (lambda: np.zeros(1), of_array),
    "a set": (set, of_set),
    "an iterator": (lambda: itertools.count(1), next),
    "a generator of Python's": (lambda: random.Random(3), lambda kept: kept.random()),
    "a generator of numpy's": (lambda: np.random.default_rng(3), lambda kept: kept.random()),
}


@pytest.mark.parametrize(("make", "read"), STATES.values(), ids=STATES)
@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.sample("a tensor in a dict", "the length of a list", "an object, by its class", "a tensor, in place")
def test_a_layer_that_reads_what_its_last_call_left_is_refused_by_name(
    build: Build, make: Callable[[], Any], read: Read
) -> None:
    with pytest.raises(KeepsState, match=r"layer 'layers.0' keeps a state .* in 'kept.*register_buffer"):
        build(Stack(lambda: Kept(make, read)), microbatches=1).step(batches(1)[0])


class ModelThatKeeps(Stack):
    def __init__(self, make: Callable[[], Any], read: Read) -> None:
        super().__init__()
        self.kept, self.read = make(), read

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        return super().forward(inputs * self.read(self.kept), targets)


@pytest.mark.parametrize(("make", "read"), STATES.values(), ids=STATES)
@pytest.mark.sample("a tensor in a dict", "the length of a list", "an object", "a tensor, in place")
def test_a_model_that_reads_what_its_last_call_left_is_refused_by_name(
    build: Build, make: Callable[[], Any], read: Read
) -> None:
    with pytest.raises(KeepsState, match=r"ModelThatKeeps keeps a state .* in '(kept|a tensor of shape)"):
        build(ModelThatKeeps(make, read), microbatches=1).step(batches(1)[0])


def test_a_hook_that_counts_in_its_closure_is_refused_by_name(build: Build) -> None:
    model, kept = Stack(), [0]
    model.layers[1].inner.register_forward_hook(lambda module, given, value: value * length(kept))
    with pytest.raises(KeepsState, match=r"layer 'layers.1' keeps a state .* in 'kept "):
        build(model, microbatches=1).step(batches(1)[0])


class Recording(Block):
    """It appends to a list that no forward reads, fills a cache once, and collects anew in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []
        self.cache: dict[int, float] = {}
        self.parts: list[Tensor] = []

    def forward(self, value: Tensor) -> Tensor:
        self.history.append(value.detach().mean())
        if value.shape[1] not in self.cache:
            self.cache[value.shape[1]] = value.shape[1] ** -0.5
        self.parts = []
        for _ in range(2):
            self.parts.append(super().forward(value) * self.cache[value.shape[1]])
        return sum(self.parts, torch.zeros(()))


class Toggling(Block):
    """A flag that each call turns, and a text that each makes longer."""

    def __init__(self) -> None:
        super().__init__()
        self.flag, self.text = False, ""

    def forward(self, value: Tensor) -> Tensor:
        self.flag, self.text = not self.flag, self.text + "x"
        return super().forward(value) * (1.5 if self.flag else 1.0) * len(self.text)


@pytest.mark.parametrize("block", [Recording, Toggling])
@pytest.mark.filterwarnings("ignore:.*runs eagerly", "ignore:The loss of .* may not be")
def test_what_is_reset_made_once_or_never_read_trains_as_in_pytorch(build: Build, block: type[Block]) -> None:
    check(build, lambda: Stack(block), batches(2), microbatches=2)


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[Any], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.generator = torch.Generator().manual_seed(1)
        self.draw = draw

    def forward(self, value: Tensor) -> Tensor:
        return value * (self.weight * self.draw(self.generator))


def by_data_and_python(_: Any) -> Any:
    return 1.0 + random.random() + np.random.rand() if torch.ones(1).item() else 1.0


@pytest.mark.parametrize("draw", [lambda own: torch.rand(8, generator=own), by_data_and_python])
@pytest.mark.filterwarnings("ignore:.*runs eagerly", "ignore:.*drew random numbers", "ignore:The loss of")
def test_a_recompute_draws_what_its_forward_drew_from_other_generators(build: Build, draw: Any) -> None:
    """With one weight as a factor, its gradient is the loss over the weight, for whatever was drawn."""
    layer = Drawing(draw)
    own = layer.generator.get_state()
    last = nn.Identity()
    trainer = build([layer, last], loss=lambda value, _: value.mean(), optimizer=relay.SGD(lr=0.5), microbatches=2)
    batch = torch.ones(4, 8), torch.zeros(4)
    losses = [trainer.step(batch).loss]
    states = random.getstate(), np.random.get_state()[1].tolist()
    losses.append(trainer.step(batch).loss)
    after_one = 1.0 - 0.5 * losses[0]
    expected = after_one - 0.5 * losses[1] / after_one
    assert layer.weight.item() == pytest.approx(expected, rel=1e-5)
    assert losses[0] * after_one != pytest.approx(losses[1], rel=1e-4)  # and each step draws anew
    assert torch.equal(layer.generator.get_state(), own)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


# **** what one layer leaves for another ****

SHARED: list[Tensor] = []


class Leaving(Block):
    """It appends a term of the loss to a list."""

    def __init__(self, terms: list[Tensor]) -> None:
        super().__init__()
        self.terms = terms

    def forward(self, value: Tensor) -> Tensor:
        value = super().forward(value)
        self.terms.append(value.square().mean())
        return value


class LeavingInAGlobal(Block):
    def forward(self, value: Tensor) -> Tensor:
        value = super().forward(value)
        SHARED.append(value.square().mean())
        return value


class Flagged(Block):
    """The first that runs sets a flag that the others look at."""

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, value: Tensor) -> Tensor:
        if self.shared.ran:
            value = value * 1.5
        self.shared.ran = True
        return super().forward(value)


class Resetting(Stack):
    def __init__(self) -> None:
        shared = SimpleNamespace(ran=False)
        super().__init__(lambda: Flagged(shared))
        self.shared = shared

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        self.shared.ran = False
        return super().forward(inputs, targets)


def listed(block: Callable[[], nn.Module]) -> tuple[list[nn.Module], tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    (batch,) = batches(1)
    return [block(), block()], (batch["inputs"], batch["targets"])


def test_terms_that_layers_of_a_list_leave_for_the_loss_are_refused_by_name(build: Build) -> None:
    terms: list[Tensor] = []

    def loss(value: Tensor, targets: Tensor) -> Tensor:
        found = nn.functional.mse_loss(value, targets) + sum(terms) + sum(SHARED)
        terms.clear()
        SHARED.clear()
        return found

    for block in (lambda: Leaving(terms), LeavingInAGlobal):
        modules, batch = listed(block)
        with pytest.raises(KeepsState, match=r"layer '0' changes '(terms|SHARED).*read by 'loss'.*Return it"):
            build(modules, loss=loss, microbatches=1).step(batch)
        terms.clear()
        SHARED.clear()


def test_a_flag_that_one_layer_sets_for_the_others_is_refused_by_name(build: Build) -> None:
    with pytest.raises(KeepsState, match=r"layer 'layers.0' changes '\w+', which is also held and read by"):
        build(Resetting(), microbatches=1).step(batches(1)[0])


def test_a_list_that_layers_share_and_nothing_reads_trains_as_in_pytorch(build: Build) -> None:
    check(build, lambda: Stack(functools.partial(Leaving, [])), batches(2), microbatches=2)
