"""Models parts of which no gradient comes back to, for tests of what is trained: the rest, and nothing else.

All are `plain_models.Stack` with a forward of their own, or layers for it, and take and return what it does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.zoo.plain_models import WIDTH, Block, Output, Stack, output

functional = nn.functional


class Normalised(nn.Module):
    """With running statistics, which change also where nothing is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return value + torch.tanh(self.norm(self.inner(value).flatten(0, 1))).view_as(value)


class NoGradLayers(Stack):
    """The first layers are run as they are, around the second there are ops as well, and the rest is trained."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        value = self.first(inputs)
        with torch.no_grad():
            for layer in self.layers[:2]:
                value = layer(value) * 0.9
        return output(self.last(self.layers[2](value)), targets)


class SetGradEnabled(Stack):
    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        value = self.first(inputs)
        for number, layer in enumerate(self.layers):
            with torch.set_grad_enabled(number >= 1):
                value = layer(value)
        return output(self.last(value), targets)


class Inference(Stack):
    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        with torch.inference_mode():
            value = self.layers[0](self.first(inputs)) + 1
        value = self.layers[1](value.clone())
        with torch.inference_mode():
            shift = self.last(value).mean((1, 2), keepdim=True)
        return output(self.last(self.layers[2](value)) + shift.clone(), targets)


class HeadAlone(Stack):
    """An encoder that is there for its features: nothing but the head is trained."""

    @torch.no_grad()
    def features(self, value: Tensor) -> Tensor:
        value = self.first(value)
        for layer in self.layers:
            value = layer(value)
        return value

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        return output(self.last(self.features(inputs)), targets)


class OwnTarget(Stack):
    """The same layers make the target, without gradients, and what is held against it."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        with torch.no_grad():
            aim = self.first(targets)
            for layer in self.layers:
                aim = layer(aim)
        value = self.first(inputs)
        for layer in self.layers:
            value = layer(value)
        return output(self.last(value), aim + targets)


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor, bias: Tensor) -> Tensor:
        return value + torch.tanh(self.inner(value) + bias)


class GivenToBoth(Stack):
    """A parameter that layers are given, first without gradients and then with them."""

    def __init__(self) -> None:
        super().__init__(Given)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        value = self.first(inputs)
        with torch.no_grad():
            value = self.layers[0](value, self.bias)
        return output(self.last(self.layers[2](self.layers[1](value, self.bias), self.bias)), targets)


class DetachBetween(Stack):
    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        value = self.layers[1](self.layers[0](self.first(inputs))).detach()
        return output(self.last(self.layers[2](value)), targets)


class Unused(Stack):
    """What two layers make is shown, and not in the loss."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        value = self.first(inputs)
        shown = self.layers[1](self.layers[0](value))
        return Output(output(self.last(self.layers[2](value)), targets).loss, shown)


class DetachesInput(Block):
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value.detach())


class WithoutGradients(Block):
    @torch.no_grad()
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value)


class DetachedBranch(Block):
    """One part of it is used without gradients alone, and one not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.spare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) * torch.sigmoid(self.branch(value)).detach()


class Asking(Block):
    """It branches on what it is given, and so cannot be captured."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(-value if value.sum() > 0 else value)


class AskingDetached(Block):
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(-value.detach() if value.sum() > 0 else value.detach())


class SometimesDetached(Block):
    """Whether it lets gradients through its data decide, in each micro-batch anew."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value.detach() if value[0, 0, 0] > 0 else value)


class Recurrent(nn.Module):
    """A recurrent layer, which runs as PyTorch's own kernels have it, behind a detach."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, value: Tensor) -> Tensor:
        return value.detach() + self.inner(value.detach())[0]


class CheckpointedUntrained(Stack):
    """Checkpointed in the older way, which gives gradients only where the input has one."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        value = checkpoint(self.layers[0], inputs, use_reentrant=True)
        value = self.first(value)
        value = checkpoint(self.layers[1], value, use_reentrant=True)
        return output(self.last(self.layers[2](value)), targets)


class InTheMiddle(Stack):
    """One layer differs from those around it."""

    def __init__(self, middle: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers[1] = middle()


class TiedBefore(Stack):
    """Both layers before one that runs eagerly have one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].inner.weight = self.layers[0].inner.weight
        self.layers[2] = SometimesDetached()


class NoLoss(Stack):
    """Nothing that is trained is in its loss."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        found = super().forward(inputs, targets)
        return Output(found.loss.detach(), found.value)


class TakesFirst(nn.Module):
    """Of two outputs of the layer before it takes one."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0]


class Twofold(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.one(value)), self.other(value)
