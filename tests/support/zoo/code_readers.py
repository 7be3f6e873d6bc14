"""A model whose layers read all that code can read: attributes, containers, objects, functions, globals and classes.

Tests change one of these at a time (`tests/relay/capture/guards`). Each factor that is read is 1, so a change shows in
the loss; most are multiplied in Python, which keeps traces short.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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


def doubled_output(module: nn.Module, given: Any, output: Any) -> Any:
    return Out(output.loss * 2) if isinstance(output, Out) else output * 2


def a_batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"inputs": torch.randn(4, WIDTH), "targets": torch.randn(4, WIDTH)}


def a_pair() -> tuple[Whole, Whole]:
    torch.manual_seed(0)
    model, plain = Whole(), Whole()
    for layer, other in zip(model.layers, plain.layers, strict=True):
        other.hidden[0].load_state_dict(layer.hidden[0].state_dict())
    return model, plain
