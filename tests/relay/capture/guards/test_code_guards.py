"""A change of anything that a capture has read: the next step is plain PyTorch's after the same change, or is refused.

`CHANGES` has one entry for each kind of change. Each is made to a model that has been trained for a step, and to a
plain one with the same weights; `REFUSED` names those that Relay does not train, with what the error must name.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import relay
from tests.support.zoo import code_readers
from tests.support.zoo.code_readers import (
    GLOBAL_DICT,
    LIBRARY,
    WIDTH,
    Base,
    Configuration,
    Mode,
    Out,
    Rich,
    Scaling,
    Whole,
    a_batch,
    a_pair,
    called_by_the_global_function,
    doubled_output,
    multiplied,
)
from tests.support.zoo.plain_models import Build

Change = Callable[[Any, pytest.MonkeyPatch], Any]


def setting(name: str, value: Any) -> Change:
    """Set an attribute of the second layer, or of what lies below it by a dotted name."""

    def change(model: Whole, patch: pytest.MonkeyPatch) -> None:
        *path, last = name.split(".")
        holder = functools.reduce(getattr, path, model.layers[1])
        setattr(holder, last, copy.deepcopy(value) if isinstance(value, nn.Module) else value)

    return change


def doing(action: Callable[[Any], Any]) -> Change:
    """Do something to the second layer."""
    return lambda model, patch: action(model.layers[1])


def on_model(action: Callable[[Any], Any]) -> Change:
    return lambda model, patch: action(model)


def patching(holder: Any, name: str, value: Any) -> Change:
    """Replace what a class, module or dict holds, until the test ends."""

    def change(model: Whole, patch: pytest.MonkeyPatch) -> None:
        if isinstance(holder, dict):
            patch.setitem(holder, name, value)
        else:
            patch.setattr(holder, name, value, raising=False)

    return change


def in_place(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(3.0)


def through_data(tensor: Tensor) -> None:
    tensor.data.mul_(3.0)


def doubled_input(module: nn.Module, given: Any) -> Any:
    return (given[0] * 2,)


def doubled_gradient(module: nn.Module, given: Any, made: Any) -> Any:
    return (given[0] * 2,)


def doubled_gradient_before(module: nn.Module, made: Any) -> Any:
    return (made[0] * 2,)


def hooking_its_output(module: nn.Module, given: Any, output: Any) -> None:
    output.register_hook(lambda gradient: gradient * 2)


def swap_ends(layer: Any) -> None:
    layer.ordered.move_to_end("one")


def change_closure(layer: Any) -> None:
    layer.function.change(3.0)


class Other(Rich):
    def method(self, value: Tensor) -> Tensor:
        return value * 3.0


def another_class(model: Whole) -> None:
    for layer in model.layers:
        layer.__class__ = Other


def freeze(layer: Any) -> None:
    layer.inner.weight.requires_grad_(False)


CHANGES: dict[str, Change] = {
    # Attributes of a module.
    "a number": setting("number", 3.0),
    "a flag": setting("flag", True),
    "a text": setting("text", "double"),
    "a member of an enum": setting("mode", Mode.DOUBLE),
    "something in the place of None": setting("optional", "there"),
    "a tuple": setting("sizes", (3.0, 2.0)),
    "a function": setting("act", torch.relu),
    "a module without parameters": setting("activation", nn.ReLU()),
    "a submodule's mode": doing(lambda layer: layer.activation.eval()),
    "an attribute that hides a method": setting("method", lambda value: value * 3.0),
    "an attribute that hides a class attribute": setting("class_scale", 3.0),
    "an attribute of a parameter": doing(lambda layer: setattr(layer.inner.weight, "gain", 3.0)),
    "the class of a module": on_model(another_class),
    "forward of a layer": setting("forward", lambda value: value * 3.0),
    "forward of a module within a layer": setting("inner.forward", lambda value: value * 3.0),
    "forward of the model": on_model(
        lambda model: setattr(model, "forward", lambda inputs, targets: Out(model.layers[0](inputs).square().mean()))
    ),
    # Containers, objects, arrays and tensors.
    "an item of a dict": doing(lambda layer: layer.cfg.update(scale=3.0)),
    "an item of a dict in a dict": doing(lambda layer: layer.cfg["deep"].update(scale=3.0)),
    "another dict": setting("cfg", {"scale": 3.0, "deep": {"scale": 1.0}}),
    "an item of a list": doing(lambda layer: layer.factors.__setitem__(0, 3.0)),
    "an item of a list in a list": doing(lambda layer: layer.factors[1].__setitem__(0, 3.0)),
    "the order of a dict": doing(swap_ends),
    "a member of a set": doing(lambda layer: layer.members.add("two")),
    "an item of a deque": doing(lambda layer: layer.queue.appendleft(3.0)),
    "a field of a dataclass": setting("settings.gain", 3.0),
    "a list in a dataclass": doing(lambda layer: layer.settings.names.append("two")),
    "a slot": setting("slotted.gain", 3.0),
    "an attribute of an object": setting("configuration.gain", 3.0),
    "an attribute of an object in an object": setting("configuration.inner.gain", 3.0),
    "a list in an object in an object": doing(lambda layer: layer.configuration.inner.table.__setitem__(0, 3.0)),
    "an attribute that hides one of the object's class": setting("configuration.shared", 3.0),
    "an attribute of a callable object": setting("scaling.factor", 3.0),
    "an attribute of an object within a decorator": doing(
        lambda layer: setattr(layer.wrapped.__wrapped__, "factor", 3.0)
    ),
    "an array, in place": doing(lambda layer: layer.array.__imul__(3.0)),
    "another array": setting("array", np.full(WIDTH, 3.0, dtype=np.float32)),
    "a plain tensor, in place": doing(lambda layer: in_place(layer.plain_tensor)),
    "a plain tensor, through .data": doing(lambda layer: through_data(layer.plain_tensor)),
    "another plain tensor": setting("plain_tensor", torch.full((WIDTH,), 3.0)),
    "a plain tensor in a list": doing(lambda layer: in_place(layer.tensors[0])),
    "a weight of a module in a list": doing(lambda layer: in_place(layer.hidden[0].weight)),
    "a buffer, in place": doing(lambda layer: layer.offset.add_(3.0)),
    "a parameter, in place": doing(lambda layer: in_place(layer.inner.weight)),
    "a parameter that is frozen": doing(freeze),
    # Functions.
    "a variable of a closure": doing(change_closure),
    "a dict in a closure": doing(lambda layer: layer.over_dict.__closure__[0].cell_contents.update(by=3.0)),
    "a keyword of a partial": doing(lambda layer: layer.partial.keywords.update(by=3.0)),
    "another partial": setting("partial", functools.partial(multiplied, by=3.0)),
    "a default": patching(multiplied, "__defaults__", (3.0,)),
    "a default of a keyword": patching(multiplied, "__kwdefaults__", {"again": 3.0}),
    "a default of a keyword, in place": patching(multiplied.__kwdefaults__, "again", 3.0),
    "the code of a function": patching(called_by_the_global_function, "__code__", (lambda value: 3.0).__code__),
    "the object of a bound method": doing(lambda layer: setattr(layer.method_of_object.__self__, "shared", 3.0)),
    # Globals and classes.
    "a global": patching(code_readers, "GLOBAL_SCALE", 3.0),
    "an item of a global dict": patching(GLOBAL_DICT, "scale", 3.0),
    "a global function": patching(code_readers, "global_function", lambda value: value * 3.0),
    "a function that a global function calls": patching(
        code_readers, "called_by_the_global_function", lambda value: 3.0
    ),
    "a name of a module": patching(LIBRARY, "scale", 3.0),
    "a function of a module in a module": patching(LIBRARY.inner, "scale", lambda value: value * 3.0),
    "a function of PyTorch": patching(nn.functional, "linear", lambda value, weight, bias: value @ weight * 3.0),
    "a class attribute": patching(Rich, "class_scale", 3.0),
    "an attribute of a base class": patching(Base, "inherited", 3.0),
    "an attribute that hides one of a base class": patching(Rich, "inherited", 3.0),
    "an attribute of an object's class": patching(Configuration, "shared", 3.0),
    "a property": patching(Rich, "as_property", property(lambda self: 3.0)),
    "a property of an object's class": patching(Configuration, "doubled", property(lambda self: 3.0)),
    "a static method": patching(Rich, "as_static", staticmethod(lambda value: value * 3.0)),
    "a method": patching(Rich, "method", lambda self, value: value * 3.0),
    "a method of an object's class": patching(Configuration, "scale", lambda self, value: value * 3.0),
    "__call__ of an object's class": patching(Scaling, "__call__", lambda self, value: value * 3.0),
    "forward of a class": patching(Rich, "forward", lambda self, value: value * 3.0),
    "forward of a base class": patching(Base, "forward", lambda self, value: value * 3.0),
    "forward of one of PyTorch's classes": patching(nn.Tanh, "forward", lambda self, value: value * 3.0),
    # The model around the layers.
    "an option of the model": on_model(lambda model: model.options.update(weight=3.0)),
    "how many layers the model calls": on_model(lambda model: model.options.update(layers=1)),
    "a function between the layers": on_model(lambda model: model.between.append(torch.tanh)),
    "the model's criterion": on_model(lambda model: setattr(model, "criterion", nn.functional.l1_loss)),
    "a method of the model": patching(Whole, "head", lambda self, value: self.last(value) * 3.0),
    "a class attribute of the model": patching(Whole, "weight", 3.0),
    "the class of the model's output": patching(
        Out, "__init__", lambda self, loss, weight: setattr(self, "loss", loss * 3.0)
    ),
    # Hooks.
    "a forward hook on a layer": doing(lambda layer: layer.register_forward_hook(doubled_output)),
    "a forward hook with keywords": doing(
        lambda layer: layer.register_forward_hook(lambda module, args, kwargs, output: output * 2, with_kwargs=True)
    ),
    "a forward hook within a layer": doing(lambda layer: layer.inner.register_forward_hook(doubled_output)),
    "a forward hook on the model": on_model(lambda model: model.register_forward_hook(doubled_output)),
    "a forward hook outside of layers": on_model(lambda model: model.last.register_forward_hook(doubled_output)),
    "a pre-hook on a layer": doing(lambda layer: layer.register_forward_pre_hook(doubled_input)),
    "a pre-hook within a layer": doing(lambda layer: layer.inner.register_forward_pre_hook(doubled_input)),
    "a backward hook within a layer": doing(lambda layer: layer.inner.register_full_backward_hook(doubled_gradient)),
    "a backward pre-hook within a layer": doing(
        lambda layer: layer.inner.register_full_backward_pre_hook(doubled_gradient_before)
    ),
    "a hook that hooks a tensor within a layer": doing(
        lambda layer: layer.inner.register_forward_hook(hooking_its_output)
    ),
}

REFUSED: dict[str, tuple[Change, str]] = {
    "a hook on a parameter": (
        doing(lambda layer: layer.inner.weight.register_hook(lambda gradient: gradient * 2)),
        r"layers\.1\.inner\.weight.*hook",
    ),
    "a hook after accumulation": (
        doing(lambda layer: layer.inner.weight.register_post_accumulate_grad_hook(lambda parameter: None)),
        r"layers\.1\.inner\.weight.*hook",
    ),
    "a backward hook on a layer": (
        doing(lambda layer: layer.register_full_backward_hook(doubled_gradient)),
        r"layers\.1.*backward hook",
    ),
    "a backward hook on the model": (
        on_model(lambda model: model.register_full_backward_hook(lambda module, given, made: None)),
        r"model.*backward hook",
    ),
    "a hook that hooks a tensor outside of layers": (
        on_model(lambda model: model.last.register_forward_hook(hooking_its_output)),
        r"register_hook",
    ),
    "another parameter": (
        doing(lambda layer: setattr(layer.inner, "weight", nn.Parameter(torch.zeros(WIDTH, WIDTH)))),
        r"layers\.1\.inner\.weight.*new\s+trainer",
    ),
    "another buffer": (
        doing(lambda layer: setattr(layer, "offset", torch.ones(WIDTH))),
        r"layers\.1\.offset.*new\s+trainer",
    ),
    "a parameter that is gone": (doing(lambda layer: setattr(layer.inner, "bias", None)), r"layers\.1\.inner\.bias"),
    "another layer": (on_model(lambda model: model.layers.__setitem__(1, Rich())), r"layers\.1\."),
    "a layer less": (on_model(lambda model: model.layers.pop(1)), r"layers\.1\."),
    "a layer more": (on_model(lambda model: model.layers.append(Rich())), r"layers\.2\."),
    "layers in another order": (
        on_model(lambda model: model.layers.insert(0, model.layers.pop(1))),
        r"layers\.\d\.",
    ),
}


def a_plain_step(model: nn.Module, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return float(loss.item())


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.sample(7)
def test_a_step_after_a_change_is_plain_pytorchs_after_the_same_change(
    name: str, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model, plain), batch = a_pair(), a_batch()
    trainer = build(model, microbatches=1, optimizer=relay.SGD(lr=0.1))
    before = trainer.step(batch).loss
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for changed in (model, plain):
        CHANGES[name](changed, monkeypatch)
    for _ in range(2):
        assert trainer.step(batch).loss == a_plain_step(plain, batch, optimizer)
        for key, tensor in plain.state_dict().items():
            assert torch.equal(model.state_dict()[key], tensor), key
    assert trainer.step(batch).loss != before


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.sample(3)
def test_a_change_that_cannot_be_trained_is_refused_by_name(
    name: str, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, what = REFUSED[name]
    model, _ = a_pair()
    batch = a_batch()
    trainer = build(model, microbatches=1, optimizer=relay.SGD(lr=0.1))
    trainer.step(batch)
    change(model, monkeypatch)
    with pytest.raises(relay.RelayError, match=what):
        trainer.step(batch)
