"""Layers that compute in unusual ways: gradients of their own, hooks, moving averages of weights, codebooks.

They are put into `odd_models.Layers`, and take and return what `plain_models.Block` does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.zoo.odd_models import Layers, Rounded
from tests.support.zoo.plain_models import WIDTH, Block, Output

functional = nn.functional


class StraightThrough(Block):
    def forward(self, value: Tensor) -> Tensor:
        value = super().forward(Rounded.apply(value * 4) / 4)
        if value.requires_grad:
            value.register_hook(lambda gradient: gradient * 0.5)
        return value


class Watched(Block):
    """Hooks its value without asking whether a gradient will flow: in training, one always does."""

    def forward(self, value: Tensor) -> Tensor:
        value = super().forward(value)
        value.register_hook(lambda gradient: gradient * 0.5)
        value.retain_grad()
        return value


class WatchedByData(Watched):
    """Runs eagerly."""

    def forward(self, value: Tensor) -> Tensor:
        value = super().forward(value)
        return value if value.detach().sum() < 1e9 else value * 2


class Fourier(Block):
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(torch.fft.fft2(value).real * 0.1)


class OldWeightNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.weight_norm(self.inner)


class Shadowed(nn.Module):
    """Follows its own weights with a moving average, which it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(self.inner.weight, 0.1)
        return value + self.inner(value) - functional.linear(value, self.average)


class Seen(Block):
    """Leaves what it made in an attribute for a look, and has a constant in another."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.full((WIDTH,), 0.5)

    def forward(self, value: Tensor) -> Tensor:
        self.seen = super().forward(value) * self.scale
        return self.seen


class Quantised(nn.Module):
    """A codebook between two lists of layers: nearest neighbours, a straight-through estimate, losses of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = Layers(), Layers()
        self.codes = nn.Embedding(7, WIDTH)

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        value = self.lower.run(inputs)
        nearest = torch.cdist(value.flatten(0, 1), self.codes.weight).argmin(-1)
        code = self.codes(nearest).view_as(value)
        extra = functional.mse_loss(code, value.detach()) + 0.25 * functional.mse_loss(value, code.detach())
        value = self.upper.run(value + (code - value).detach())
        return Output(functional.mse_loss(value, targets) + extra, value)


class Dropping(Block):
    """Stochastic depth: a whole row of the batch passes the layer by, or not."""

    def forward(self, value: Tensor) -> Tensor:
        kept = value.new_empty(len(value), 1, 1).bernoulli_(0.5)
        return value + (super().forward(value) - value) * kept / 0.5


class AsksWhatIsTrained(Layers):
    """It asks between layers whether what came so far is trained, and goes on in place."""

    def __init__(self, frozen: int) -> None:
        super().__init__()
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def run(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = layer(value)
            value += 0.1 if value.requires_grad else 0.2
        return value
