"""Models whose layers are stored and called in unusual ways.

All are made of `Layers`, and take and return what `plain_models` does. Models whose layers take and return unusual
values are in `odd_values`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.zoo.plain_models import WIDTH, Block, Output, output

functional = nn.functional


class Layers(nn.Module):
    """Layers called one after the other; models below differ in the layers, or in how they are called."""

    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(count))

    def run(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = layer(value)
        return value

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        return output(self.run(inputs), targets)


class Universal(Layers):
    """One layer, called four times; what is added to its input depends on which call it is."""

    def __init__(self) -> None:
        super().__init__(count=1)
        self.steps = nn.Embedding(4, WIDTH)

    def run(self, value: Tensor) -> Tensor:
        for number in range(4):
            value = self.layers[0](value + self.steps.weight[number])
        return value


class ThereAndBack(Layers):
    """Layers in order, and then in reverse."""

    def run(self, value: Tensor) -> Tensor:
        for layer in [*self.layers, *reversed(self.layers)]:
            value = layer(value)
        return value


class Backwards(Layers):
    def run(self, value: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            value = layer(value)
        return value


class Siamese(Layers):
    """Both the inputs and the targets pass through the layers, and are compared."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        first, second = (functional.normalize(self.run(value), dim=-1) for value in (inputs, targets))
        return Output(-(first * second).sum(-1).mean(), first)


class InModuleDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"layer{number}": Block() for number in range(3)})

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        for layer in self.layers.values():
            inputs = layer(inputs)
        return output(inputs, targets)


class Stages(nn.Module):
    """Lists in a list, with a list of what comes between, and a loss at the end of each."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        losses = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            for layer in stage:
                inputs = layer(inputs)
            scores = head(inputs)
            losses.append(functional.mse_loss(scores, targets))
        return Output(losses[0] * 0.25 + losses[1] * 0.75, scores)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        first, second = self.inner(value).chunk(2, -1)
        return value + first * torch.sigmoid(second)


class Hybrid(Layers):
    """Layers of two classes in turn, and one without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Gated(), Block(), Gated(), nn.Identity()])


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH // 2, WIDTH // 2), nn.Linear(WIDTH // 2, WIDTH // 2)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        right = right + torch.tanh(self.one(left))
        return left + torch.tanh(self.other(right)), right


class Reversible(Layers):
    """Two streams, as in RevNets, exchanged between layers."""

    def __init__(self) -> None:
        super().__init__(Coupling)

    def run(self, value: Tensor) -> Tensor:
        left, right = value.chunk(2, -1)
        for layer in self.layers:
            right, left = layer(left, right)
        return torch.cat([left, right], -1)


class Slices(nn.Module):
    """Parts of a Sequential, called as Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        return output(self.layers[2:](self.layers[:2](inputs).flip(1)), targets)


class Biased(Block):
    def forward(self, value: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(value) + bias


class ParametersGiven(Layers):
    """Layers that are given a parameter and a buffer of the model, and weights that a network makes."""

    def __init__(self) -> None:
        super().__init__(Biased)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("table", torch.randn(WIDTH))
        self.codes = nn.Parameter(torch.randn(3, 4))
        self.make = nn.Linear(4, WIDTH)

    def run(self, value: Tensor) -> Tensor:
        value = self.layers[0](value, self.bias)
        value = self.layers[1](value, self.table)
        return self.layers[2](value, self.make(self.codes[2]) + self.bias)


class Checkpointed(Layers):
    """Layers that are checkpointed already."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def run(self, value: Tensor) -> Tensor:
        value = self.first(value)
        for layer in self.layers:
            value = checkpoint(layer, value, use_reentrant=self.reentrant)
        return value


class Hooked(Layers):
    """Forward hooks on layers and within, and a backward hook within."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_hook(lambda module, inputs, result: result * 1.5)
        self.layers[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
        self.layers[0].inner.register_forward_hook(lambda module, inputs, result: result.clamp(-1, 1))
        self.layers[2].inner.register_full_backward_hook(lambda module, given, _: tuple(grad * 0.5 for grad in given))


class Rounded(torch.autograd.Function):
    """A gradient of its own, which is not that of what it computes."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.round()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def of(block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Layers(block)
