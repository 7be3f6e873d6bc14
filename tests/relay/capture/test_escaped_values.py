"""Values that hooks and other code record in containers of their own, outside of what the model returns."""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from tests.support import reference
from tests.support.zoo.plain_models import Block, Build, Stack, batches, perceptron, regression

MSE = nn.functional.mse_loss
LIST: list[Any] = []
LAST: Any = None


class Extractor:
    """Keeps features in its attributes, as feature extractors do."""

    def __init__(self) -> None:
        self.last: Any = None
        self.by_name: dict[str, Any] = {}
        self.pairs: deque[Any] = deque()

    def hook(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.last = output
        self.by_name["layer"] = output.detach()
        self.pairs.append((inputs, output))

    def held(self) -> list[Any]:
        return [self.last, *self.by_name.values(), *self.pairs]


def in_a_list(layer: nn.Module) -> Callable[[], list[Any]]:
    store: list[Any] = []
    layer.register_forward_hook(lambda module, inputs, output: store.append(output))
    return lambda: store


def in_a_dict_before(layer: nn.Module) -> Callable[[], list[Any]]:
    store: dict[str, Any] = {"input": None}

    def hook(module: nn.Module, inputs: Any) -> None:
        store["input"] = inputs[0]

    layer.register_forward_pre_hook(hook)
    return lambda: list(store.values())


def in_an_object(layer: nn.Module) -> Callable[[], list[Any]]:
    extractor = Extractor()
    layer.register_forward_hook(extractor.hook)
    return extractor.held


def by_a_partial(layer: nn.Module) -> Callable[[], list[Any]]:
    store: set[Any] = set()

    def hook(found: set[Any], module: nn.Module, inputs: Any, output: Any) -> None:
        found.add(output)

    layer.register_forward_hook(functools.partial(hook, store))
    return lambda: list(store)


def in_a_variable(layer: nn.Module) -> Callable[[], list[Any]]:
    last: Any = None

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal last
        last = output

    layer.register_forward_hook(hook)
    return lambda: [last]


def in_globals(layer: nn.Module) -> Callable[[], list[Any]]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        global LAST
        LAST = output
        LIST.append(output)

    layer.register_forward_hook(hook)
    return lambda: [LAST, *LIST]


def in_an_attribute(layer: nn.Module) -> Callable[[], list[Any]]:
    layer.register_forward_hook(lambda module, inputs, output: setattr(module, "features", output))
    return lambda: [vars(layer).get("features")]


def of_gradients(layer: nn.Module) -> Callable[[], list[Any]]:
    store: list[Any] = []
    layer.register_full_backward_hook(lambda module, inputs, outputs: store.append(outputs[0].norm()))
    return lambda: store


HOOKS = [
    in_a_list, in_a_dict_before, in_an_object, by_a_partial, in_a_variable, in_globals, in_an_attribute, of_gradients,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _empty_globals() -> Iterator[None]:
    global LAST
    yield
    LAST = None
    LIST.clear()


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.filterwarnings("ignore:The loss of .* may not be")
def test_what_a_hook_records_is_named_and_no_tensor_of_a_trace_is_left_in_it(
    build: Build, hook: Callable[[nn.Module], Callable[[], list[Any]]]
) -> None:
    modules, plain = perceptron(), perceptron()
    held = hook(modules[1])
    trainer = build(modules, loss=MSE, microbatches=2)
    with pytest.warns(UserWarning, match=r"is written to by the model's code.*step\(batch, outputs=\[\.\.\.\]\)"):
        loss = trainer.step(regression()).loss
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # it is said once
        assert [loss, trainer.step(regression()).loss] == reference.train(plain, [regression()] * 2, 2, loss=MSE)
    trainer.evaluate(regression())
    assert not [value for value in held() if value is not None]
    nn.Sequential(*modules)(regression()[0])  # between steps its hooks run as ever
    if hook is not of_gradients:
        assert all(type(value) in (Tensor, tuple) for value in held())
        assert held()


def test_hooks_of_a_whole_model_in_and_around_its_layers_are_named(build: Build) -> None:
    model, store = Stack(), list[Any]()
    for module in (model, model.first, model.layers[0], model.layers[1].inner):
        module.register_forward_hook(lambda module, inputs, output: store.append(output))
    trainer = build(model, microbatches=2)
    with pytest.warns(UserWarning, match="store .*_forward_hooks.* is written to by the model's code"):
        trainer.step(batches(1)[0])
    assert not store


class Remembering(Block):
    """It keeps its result for inspection, and a table that it makes once and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []
        self.table: Tensor | None = None

    def forward(self, value: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.full((value.shape[1], 1), 0.5)
        value = super().forward(value) * self.table
        self.history.append(value)
        return value


def test_attributes_that_are_never_read_are_named_and_caches_are_not(build: Build) -> None:
    model = Stack(Remembering)
    trainer = build(model, microbatches=1)
    with pytest.warns(UserWarning, match="history") as said:
        trainer.step(batches(1)[0])
    assert not [one for one in said if "table" in str(one.message) and "is written to" in str(one.message)]
    assert not model.layers[0].history


def test_a_loss_that_records_is_named(build: Build) -> None:
    store: list[Tensor] = []

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        store.append(output)
        return MSE(output, targets)

    trainer = build(perceptron(), loss=loss, microbatches=1, optimizer=relay.SGD(lr=0.1))
    with pytest.warns(UserWarning, match=r"store \(in the closure of loss\) is written to"):
        trainer.step(regression())
    assert not store


@pytest.mark.filterwarnings("ignore:.*runs eagerly, op by op")
def test_a_hook_that_makes_its_layer_run_eagerly_is_named_with_what_it_gets(build: Build) -> None:
    modules, store = perceptron(), list[float]()
    modules[1].register_forward_hook(lambda module, inputs, output: store.append(output.mean().item()))
    trainer = build(modules, loss=MSE, microbatches=1)
    with pytest.warns(UserWarning, match=r"store .*hook of 1\) is written to by code that runs eagerly.*recompute"):
        trainer.step(regression())
