"""A change of anything that a capture has read: the next step is plain PyTorch's after the same change, or is refused.

`CHANGES` has one entry for each kind of change. Each is made to a model that has been trained for a step, and to a
plain one with the same weights; `REFUSED` names those that Relay does not train, with what the error must name.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import os
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import relay
from tests.support.zoo.plain_models import Build

WIDTH = 8
GLOBAL_SCALE = 1.0
GLOBAL_DICT = {"scale": 1.0}
LIBRARY = types.ModuleType("library")
LIBRARY.scale = 1.0  # type: ignore[attr-defined]
LIBRARY.inner = types.ModuleType("inner")  # type: ignore[attr-defined]
LIBRARY.inner.scale = lambda value: value * 1.0  # type: ignore[attr-defined]


def global_function(value: Tensor) -> Tensor:
    return value * called_by_the_global_function(value)


def called_by_the_global_function(value: Tensor) -> float:
    return 1.0


def multiplied(value: Tensor, by: float = 1.0, *, again: float = 1.0) -> Tensor:
    return value * by * again


def closure_over(factor: Any) -> Callable[[Tensor], Tensor]:
    def scaled(value: Tensor) -> Tensor:
        return value * (factor["by"] if isinstance(factor, dict) else factor)

    def change(new: float) -> None:
        nonlocal factor
        factor = new

    scaled.change = change  # type: ignore[attr-defined]
    return scaled


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@dataclasses.dataclass
class Settings:
    gain: float = 1.0
    names: list[str] = dataclasses.field(default_factory=lambda: ["one"])


class Slotted:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


class Configuration:
    """An object as libraries have them: attributes, a property, and objects within."""

    shared = 1.0

    def __init__(self) -> None:
        self.gain = 1.0
        self.inner = types.SimpleNamespace(gain=1.0, table=[1.0, 2.0])

    @property
    def doubled(self) -> float:
        return self.gain * 2

    def scale(self, value: Tensor) -> Tensor:
        return value * self.shared


class Scaling:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, value: Tensor) -> Tensor:
        return value * self.factor


class Mode(enum.Enum):
    PLAIN = 1
    DOUBLE = 2


class Base(nn.Module):
    inherited = 1.0

    def forward(self, value: Tensor) -> Tensor:
        return value * 1.0


class Rich(Base):
    """Reads all that a layer can read."""

    class_scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.activation = nn.Tanh()
        self.act = torch.tanh
        self.number = 1.0
        self.flag = False
        self.text = "plain"
        self.mode = Mode.PLAIN
        self.optional: Any = None
        self.sizes = (1.0, 2.0)
        self.factors = [1.0, [1.0]]
        self.cfg = {"scale": 1.0, "deep": {"scale": 1.0}}
        self.ordered = collections.OrderedDict(one=1.0, two=2.0)
        self.queue = collections.deque([1.0])
        self.members = {"one"}
        self.settings = Settings()
        self.slotted = Slotted()
        self.configuration = Configuration()
        self.array = np.ones(WIDTH, dtype=np.float32)
        self.plain_tensor = torch.ones(WIDTH)
        self.tensors = [torch.ones(WIDTH)]
        self.scaling = Scaling(1.0)
        self.function = closure_over(1.0)
        self.over_dict = closure_over({"by": 1.0})
        self.partial = functools.partial(multiplied, by=1.0)
        self.method_of_object = self.configuration.scale
        self.wrapped = decorated(Scaling(1.0))
        self.hidden = [nn.Linear(WIDTH, WIDTH)]
        self.register_buffer("offset", torch.zeros(WIDTH))

    @property
    def as_property(self) -> float:
        return self.number

    @staticmethod
    def as_static(value: Tensor) -> Tensor:
        return value * 1.0

    def method(self, value: Tensor) -> Tensor:
        return value * 1.0

    def containers(self, value: Tensor) -> Tensor:
        factor = self.sizes[0] * self.factors[0] * self.factors[1][0]  # type: ignore[index,operator]
        factor *= self.cfg["scale"] * self.cfg["deep"]["scale"] * self.queue[0]  # type: ignore[index,operator]
        factor *= (2.0 if next(iter(self.ordered)) == "two" else 1.0) * (2.0 if "two" in self.members else 1.0)
        return value * (factor * self.settings.gain * len(self.settings.names) * self.slotted.gain)

    def objects(self, value: Tensor) -> Tensor:
        inner = self.configuration.inner
        value = value * (self.configuration.doubled * inner.gain * inner.table[0])
        value = self.configuration.scale(self.scaling(self.function(self.over_dict(self.partial(value)))))
        return self.wrapped(self.method_of_object(value))  # type: ignore[no-any-return]

    def tensors_of_all_kinds(self, value: Tensor) -> Tensor:
        value = value * torch.from_numpy(self.array.copy()) * self.plain_tensor * self.tensors[0]
        return value + self.hidden[0](value).detach() * 0.1 + self.offset

    def elsewhere(self, value: Tensor) -> Tensor:
        factor = GLOBAL_SCALE * GLOBAL_DICT["scale"] * LIBRARY.scale * self.class_scale * type(self).class_scale
        value = LIBRARY.inner.scale(global_function(multiplied(value))) * (factor * Rich.inherited * self.as_property)
        return self.as_static(self.method(value))

    def forward(self, value: Tensor) -> Tensor:
        new = super().forward(self.act(self.activation(self.inner(value))))
        new = self.elsewhere(self.tensors_of_all_kinds(self.objects(self.containers(new))))
        if self.flag or self.text == "double" or self.mode is Mode.DOUBLE or self.optional is not None:
            new = new * 2
        gain = getattr(self.inner.weight, "gain", 1.0)
        return value + new * 0.5 * gain * (2.0 if not self.activation.training else 1.0)


class Out:
    def __init__(self, loss: Tensor, weight: float = 1.0) -> None:
        self.loss = loss * weight


class Whole(nn.Module):
    weight = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Rich() for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.between: list[Callable[[Tensor], Tensor]] = []
        self.criterion: Callable[..., Tensor] = nn.functional.mse_loss
        self.options = {"layers": 2, "weight": 1.0}

    def head(self, value: Tensor) -> Tensor:
        return self.last(value)  # type: ignore[no-any-return]

    def forward(self, inputs: Tensor, targets: Tensor) -> Out:
        value = self.first(inputs)
        for layer in list(self.layers)[: self.options["layers"]]:  # type: ignore[misc]
            value = layer(value)
            for function in self.between:
                value = function(value)
        return Out(self.criterion(self.head(value), targets) * self.options["weight"], self.weight * GLOBAL_SCALE)


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


def doubled_output(module: nn.Module, given: Any, output: Any) -> Any:
    return Out(output.loss * 2) if isinstance(output, Out) else output * 2


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
    "a global": patching(__import__(__name__, fromlist=["x"]), "GLOBAL_SCALE", 3.0),
    "an item of a global dict": patching(GLOBAL_DICT, "scale", 3.0),
    "a global function": patching(__import__(__name__, fromlist=["x"]), "global_function", lambda value: value * 3.0),
    "a function that a global function calls": patching(
        __import__(__name__, fromlist=["x"]), "called_by_the_global_function", lambda value: 3.0
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


def a_batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"inputs": torch.randn(4, WIDTH), "targets": torch.randn(4, WIDTH)}


def a_pair() -> tuple[Whole, Whole]:
    torch.manual_seed(0)
    model, plain = Whole(), Whole()
    for layer, other in zip(model.layers, plain.layers, strict=True):
        other.hidden[0].load_state_dict(layer.hidden[0].state_dict())
    return model, plain


def a_plain_step(model: nn.Module, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return float(loss.item())


@pytest.mark.parametrize("name", CHANGES)
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


class LossObject:
    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target) * self.weight


def loss_over(options: dict[str, float]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: nn.functional.mse_loss(output, target) * options["weight"]


def weighted_loss(output: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
    return nn.functional.mse_loss(output, target) * weight * GLOBAL_SCALE


OPTIONS = {"weight": 1.0}
LOSSES: dict[str, tuple[Callable[[], Any], Callable[[Any, pytest.MonkeyPatch], None]]] = {
    "an attribute of an object": (LossObject, lambda loss, patch: setattr(loss, "weight", 3.0)),
    "a dict in a closure": (lambda: loss_over(OPTIONS), lambda loss, patch: patch.setitem(OPTIONS, "weight", 3.0)),
    "a keyword of a partial": (
        lambda: functools.partial(weighted_loss, weight=1.0),
        lambda loss, patch: loss.keywords.update(weight=3.0),
    ),
    "a default": (
        lambda: weighted_loss,
        lambda loss, patch: patch.setattr(weighted_loss, "__defaults__", (3.0,)),
    ),
    "a number of a module": (lambda: nn.HuberLoss(delta=0.1), lambda loss, patch: setattr(loss, "delta", 1.0)),
    "a bound method": (lambda: LossObject().__call__, lambda loss, patch: setattr(loss.__self__, "weight", 3.0)),
    "a hook of a module": (nn.MSELoss, lambda loss, patch: loss.register_forward_hook(doubled_output)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_changes_is_seen(name: str, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    make, change = LOSSES[name]
    torch.manual_seed(0)
    modules = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    loss, inputs, targets = make(), torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    trainer = build(modules, loss=loss, microbatches=1, optimizer=relay.SGD(lr=0.0))
    assert trainer.step((inputs, targets)).loss == float(loss(nn.Sequential(*modules)(inputs), targets))
    change(loss, monkeypatch)
    expected = float(loss(nn.Sequential(*modules)(inputs), targets))
    assert trainer.step((inputs, targets)).loss == expected


class Counting(nn.Module):
    """Counts and collects in every way that a forward can, and computes nothing from it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        self.seen: list[Any] = []
        self.table: dict[str, Any] = {}
        self.statistics = types.SimpleNamespace(calls=0, latest=None)

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(value.shape)
        self.table[f"call {len(self.table)}"] = value
        self.statistics.calls += 1
        self.statistics.latest = value
        if not hasattr(self, "first_shape"):
            self.first_shape = str(value.shape)
        return value + torch.tanh(self.inner(value))


def test_a_model_that_counts_its_calls_is_compiled_once(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    modules = [Counting() for _ in range(3)]
    trainer = build(modules, loss=nn.functional.mse_loss, microbatches=1)
    batches = [(torch.randn(size, WIDTH), torch.randn(size, WIDTH)) for size in (4, 6)]
    for batch in batches * 2:
        trainer.step(batch)
    with caplog.at_level("INFO", logger="relay"):
        for batch in batches * 3:
            trainer.step(batch)
    assert not [record for record in caplog.records if "compiling" in record.message]


def test_a_change_that_is_undone_finds_the_program_of_before(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    (model, _), batch = a_pair(), a_batch()
    trainer = build(model, microbatches=1, optimizer=relay.SGD(lr=0.0))
    first = trainer.step(batch).loss
    model.layers[1].cfg["scale"] = 3.0  # type: ignore[index,union-attr]
    second = trainer.step(batch).loss
    model.layers[1].cfg["scale"] = 1.0  # type: ignore[index,union-attr]
    with caplog.at_level("INFO", logger="relay"):
        assert trainer.step(batch).loss == first
        model.layers[1].cfg["scale"] = 3.0  # type: ignore[index,union-attr]
        assert trainer.step(batch).loss == second
    assert not [record for record in caplog.records if "compiling" in record.message]


def test_what_nothing_can_see_is_taken_in_by_recompile(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, value: Tensor) -> Tensor:
            return self.inner(value) * float(os.environ["SCALE_OF_A_TEST"])

    monkeypatch.setenv("SCALE_OF_A_TEST", "1.0")
    torch.manual_seed(0)
    modules = [Reading() for _ in range(2)]
    batch = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    with relay.Trainer(modules, nn.functional.mse_loss, microbatches=1, optimizer=relay.SGD(lr=0.0)) as trainer:
        trainer.step(batch)
        monkeypatch.setenv("SCALE_OF_A_TEST", "3.0")
        trainer.recompile()
        expected = float(nn.functional.mse_loss(nn.Sequential(*modules)(batch[0]), batch[1]))
        assert trainer.step(batch).loss == expected
