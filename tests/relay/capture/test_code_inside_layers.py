"""Layers that use torch.func, nested tensors, torch.compile or checkpoints train as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import relay
from tests.support import reference
from tests.support.zoo.plain_models import WIDTH, Build, Output, output

pytestmark = pytest.mark.filterwarnings("ignore:layer", "ignore:The loss of .* cannot be followed")

Function = Callable[[nn.Linear, Tensor], Tensor]


class Layer(nn.Module):
    """A residual layer: a function of a linear layer and of its input."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, value: Tensor) -> Tensor:
        return value + self.function(self.linear, value)


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(function) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        value = self.first(inputs)
        for layer in self.layers:
            value = layer(value)
        return output(self.last(value), targets)


def tanh(linear: nn.Module, value: Tensor) -> Tensor:
    return torch.tanh(linear(value))


@torch.compile(backend="eager")
def compiled_tanh(value: Tensor) -> Tensor:
    return torch.tanh(value)


def jagged(linear: nn.Linear, value: Tensor) -> Tensor:
    rows = torch.nested.as_nested_tensor([value[:2], value[2:]], layout=torch.jagged)
    return tanh(linear, rows).values()


def checkpointed(linear: nn.Linear, value: Tensor, **options: Any) -> Tensor:
    return checkpoint(tanh, linear, value, **options)


FUNCTIONS: dict[str, Function] = {
    "vmap over weights": lambda linear, value: torch.vmap(lambda row: torch.tanh(value @ row))(linear.weight).T,
    "vmap over samples": lambda linear, value: torch.vmap(lambda row: tanh(linear, row))(value),
    "grad": lambda linear, value: torch.func.grad(lambda given: tanh(linear, given).sum())(value),
    "jvp": lambda linear, value: torch.func.jvp(lambda x: tanh(linear, x), (value,), (torch.ones_like(value),))[1],
    "vjp": lambda linear, value: torch.func.vjp(lambda x: tanh(linear, x), value)[1](torch.ones_like(value))[0],
    "jacobian": lambda linear, value: torch.vmap(torch.func.jacrev(lambda x: tanh(linear, x)))(value).sum(1),
    "hessian": lambda linear, value: torch.vmap(torch.func.hessian(lambda x: tanh(linear, x).sum()))(value).sum(1),
    "functional_call": lambda linear, value: torch.func.functional_call(linear, dict(linear.named_parameters()), value),
    "a jagged tensor": jagged,
    "a compiled function": lambda linear, value: compiled_tanh(linear(value)),
    "a reentrant checkpoint": lambda linear, value: checkpointed(linear, value, use_reentrant=True),
    "a checkpoint": lambda linear, value: checkpointed(linear, value, use_reentrant=False),
    "reentrant, eager": lambda linear, value: checkpointed(linear, value * value.mean().item(), use_reentrant=True),
    "a sequence of checkpoints": lambda linear, value: checkpoint_sequential(
        [linear, nn.Tanh(), nn.Sigmoid()], 2, value, use_reentrant=True
    ),
}
SAMPLE = {"vmap over samples", "jvp", "a jagged tensor", "a compiled function", "reentrant, eager"}


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{name: torch.randn(6, WIDTH, generator=generator) for name in ("inputs", "targets")} for _ in range(2)]


def check(build: Build, ours: nn.Module, plain: nn.Module, microbatches: int) -> None:
    with torch.no_grad():
        for own, other in zip(plain.parameters(), ours.parameters(), strict=True):
            own.copy_(other)
    losses = reference.train(plain, batches(), microbatches)
    trainer = build(ours, microbatches=microbatches)
    assert [trainer.step(batch).loss for batch in batches()] == losses
    assert all(map(torch.equal, ours.parameters(), plain.parameters()))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.exhaustive) for name in FUNCTIONS]
)
def test_a_layer_of_a_whole_model_trains_as_in_pytorch(build: Build, name: str) -> None:
    check(build, Model(FUNCTIONS[name]), Model(FUNCTIONS[name]), microbatches=2)


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def layers_in_place(model: nn.Module) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.compile(backend="eager")  # type: ignore[union-attr,operator]
    return model


def wrapped_layers(model: nn.Module) -> nn.Module:
    for number, layer in enumerate(model.layers):  # type: ignore[arg-type]
        model.layers[number] = torch.compile(layer, backend="eager")  # type: ignore[index,operator]
    return model


@pytest.mark.parametrize("compiled", [in_place, layers_in_place, wrapped_layers])
def test_a_compiled_model_trains_as_the_model_that_was_compiled(
    build: Build, compiled: Callable[[nn.Module], nn.Module]
) -> None:
    ours, plain = Model(tanh), Model(tanh)
    check(build, compiled(ours), plain, microbatches=1)
    value = torch.randn(3, WIDTH)
    assert torch.equal(ours(value, value).value, plain(value, value).value)


def test_a_model_wrapped_by_compile_trains_under_the_names_that_it_has_in_pytorch(build: Build) -> None:
    model = Model(tanh)
    wrapped: Any = torch.compile(model, backend="eager")
    trainer = build(wrapped, microbatches=1)
    trainer.step(batches()[0])
    reference.assert_same_state(trainer.state_dict(), wrapped.state_dict())


def test_compilers_and_checkpoints_are_as_before_after_a_step(build: Build) -> None:
    trainer = build(Model(FUNCTIONS["reentrant, eager"]), microbatches=1)
    trainer.step(batches()[0])
    ran: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        ran.append("compiled")
        return graph.forward

    value = torch.ones(2, requires_grad=True)
    assert torch.equal(torch.compile(lambda x: x * 2, backend=backend)(value), value * 2)
    assert ran == ["compiled"]
    counted: list[None] = []
    checkpoint(lambda x: (counted.append(None), x * 2)[1], value, use_reentrant=True).sum().backward()
    assert len(counted) == 2


@pytest.mark.filterwarnings("ignore:layer")
def test_a_layer_built_on_torch_func_is_not_taken_for_one_that_is_free_of_the_batch() -> None:
    """What such a layer computes is unknown to the analysis of the loss, and that is said."""
    trainer = relay.Trainer(Model(FUNCTIONS["jvp"]), microbatches=2)
    with trainer, pytest.warns(UserWarning, match=r"cannot be followed: .*layers\.0"):
        trainer.step(batches()[0])
