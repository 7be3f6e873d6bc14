"""Models of which a capture would lose something are refused by name; for random numbers it would freeze, it warns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from relay.errors import CaptureError, PartitionError
from tests.support import reference
from tests.support.zoo.odd_models import Layers, of
from tests.support.zoo.plain_models import WIDTH, Block, Build, Output, batches


class HookOutside(Layers):
    def run(self, value: Tensor) -> Tensor:
        value = super().run(value)
        value.register_hook(lambda gradient: gradient * 0.5)
        return value


class HookWhereTrained(Layers):
    """What is trained before the hook is the layers alone, and they are one op to the trace."""

    def run(self, value: Tensor) -> Tensor:
        value = super().run(value)
        if value.requires_grad:
            value.register_hook(lambda gradient: gradient * 0.5)
        return value


class HooksOfSeveral(Layers):
    def run(self, value: Tensor) -> Tensor:
        value = super().run(value)
        torch.autograd.graph.register_multi_grad_hook([value], lambda gradients: None)
        return value


class HookOfTheBackward(Layers):
    def run(self, value: Tensor) -> Tensor:
        value = super().run(value)
        if value.grad_fn is not None:
            value.grad_fn.register_hook(lambda given, _: tuple(gradient * 0.5 for gradient in given))
        return value


class HookOfParameterEachTime(Layers):
    def run(self, value: Tensor) -> Tensor:
        self.layers[0].inner.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        return super().run(value)


class HookOfParameter(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].inner.weight.register_hook(lambda gradient: gradient * 0.5)


class HookAfterAccumulation(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].inner.weight.register_post_accumulate_grad_hook(lambda parameter: None)


class BackwardHookOfLayer(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_full_backward_hook(lambda module, given, _: tuple(gradient * 0.5 for gradient in given))


class LossLeft(Block):
    def forward(self, value: Tensor) -> Tensor:
        self.extra = value.square().mean()
        return super().forward(value)


class LossInAttributes(Layers):
    """Auxiliary losses that layers leave in attributes."""

    def __init__(self) -> None:
        super().__init__(LossLeft)

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        found = super().forward(inputs, targets)
        return Output(found.loss + sum(layer.extra for layer in self.layers), found.value)


class DataBetween(Layers):
    def run(self, value: Tensor) -> Tensor:
        value = super().run(value)
        return value - value.data.mean()


class DataReplaced(Layers):
    def run(self, value: Tensor) -> Tensor:
        value = super().run(value)
        value.data = value.data * 2
        return value


class GradientPenalty(Layers):
    """Its slope comes past the layers and through them; the first part alone would be found."""

    def run(self, value: Tensor) -> Tensor:
        found = super().run(value)
        (slope,) = torch.autograd.grad(found.square().sum() + value.square().sum(), value, create_graph=True)
        return found + slope


class BackwardOfItsOwn(Layers):
    def run(self, value: Tensor) -> Tensor:
        value = super().run(value)
        value.square().sum().backward(retain_graph=True)
        return value


class Remembering(Block):
    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        value = super().forward(value) - self.average
        self.average = 0.9 * self.average + 0.1 * value.detach().mean((0, 1))
        return value


class RememberingOutside(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(WIDTH)

    def run(self, value: Tensor) -> Tensor:
        value = super().run(value - self.average)
        self.average = 0.9 * self.average + 0.1 * value.detach().mean((0, 1))
        return value


class DropsLayers(Layers):
    def run(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) >= 0.5:
                value = layer(value)
        return value


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (HookOutside, "register_hook"),
        (HookWhereTrained, "register_hook"),
        (HooksOfSeveral, "grad_fn"),
        (HookOfTheBackward, "grad_fn"),
        (HookOfParameterEachTime, "register_post_accumulate_grad_hook"),
        (HookOfParameter, r"layers\.1\.inner\.weight.*hook"),
        (HookAfterAccumulation, r"layers\.1\.inner\.weight.*hook"),
        (BackwardHookOfLayer, r"layers\.1.*backward hook, and is one of the repeated layers itself.*list of modules"),
        (LossInAttributes, "stored in an attribute"),
        (DataBetween, r"reads or sets \.data"),
        (DataReplaced, r"reads or sets \.data"),
        (GradientPenalty, r"torch\.autograd\.grad"),
        (BackwardOfItsOwn, r"backward\(\)"),
        (of(Remembering), r"average.*register_buffer"),
        (RememberingOutside, r"average.*register_buffer"),
        (DropsLayers, r"layerdrop.*active_layers="),
        (lambda: Layers(lambda: torch.jit.script(Block())), r"layers\.0.*torch\.jit"),
    ],
)
def test_what_a_capture_would_lose_is_refused_by_name_and_changes_nothing(
    build: Build, make: Callable[[], nn.Module], message: str
) -> None:
    torch.manual_seed(0)
    model = make()
    before = reference.copy_of(model.state_dict())
    attributes = {name: value for name, value in vars(model).items() if isinstance(value, Tensor)}
    trainer = build(model, microbatches=2)
    with pytest.raises((PartitionError, CaptureError), match=message):
        trainer.step(batches(1)[0])
    reference.assert_same_state(model.state_dict(), before)
    assert all(vars(model)[name] is value for name, value in attributes.items())
