"""Optimizers that a user wrote, as a partial: equal to plain PyTorch, or refused for what they do across layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relay.optim.by_parameter import check_by_parameter
from tests.support import reference
from tests.support.zoo.plain_models import Build, perceptron, regression

MSE = nn.functional.mse_loss


class Own(torch.optim.Optimizer):
    """What these have in common: `direction` is a parameter's step."""

    def __init__(self, parameters: Any, lr: float = 0.05, **more: Any) -> None:
        super().__init__(parameters, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.begin(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.direction(parameter, parameter.grad, group), alpha=group["lr"])

    def begin(self, group: dict[str, Any]) -> None:
        pass

    def direction(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient


class SignOfMomentum(Own):
    def direction(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        return momentum.mul_(0.9).add_(gradient).sign()


class Decaying(Own):
    """It counts its own steps, as each layer's does as well."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.count = 0

    def begin(self, group: dict[str, Any]) -> None:
        self.count += 1

    def direction(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient / self.count


class Matrices(Own):
    def direction(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        if gradient.dim() != 2:
            raise ValueError("matrices only")
        return gradient / gradient.norm()


class Normalized(Own):
    """It divides by the norm of all gradients, as a clipping of its own does."""

    def begin(self, group: dict[str, Any]) -> None:
        self.norm = torch.stack([one.grad.norm() for one in group["params"] if one.grad is not None]).norm()

    def direction(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient / self.norm


class NormalizedMatrices(Normalized):
    direction = Matrices.direction

    def begin(self, group: dict[str, Any]) -> None:
        super().begin(group)
        group["params"][0].grad.div_(self.norm + group["params"][-1].grad.norm())
        group["params"][-1].grad.add_(group["params"][0].grad.norm())


class CountingInItsGroup(Own):
    """As schedule-free optimizers do."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, lr, k=0)

    def begin(self, group: dict[str, Any]) -> None:
        group["k"] += 1


class Noisy(Own):
    def direction(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient + torch.randn_like(gradient)


@pytest.mark.parametrize("kind", [SignOfMomentum, Decaying])
def test_an_optimizer_of_the_users_trains_as_in_pytorch(build: Build, kind: type[Own]) -> None:
    made, batches = functools.partial(kind, lr=0.02), [regression(seed=seed) for seed in range(3)]
    plain, mine = perceptron(), perceptron()
    losses = reference.train(plain, batches, 2, loss=MSE, optimizer=made)
    trainer = build(mine, loss=MSE, optimizer=made, microbatches=2)
    assert [trainer.step(batch).loss for batch in batches] == losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


@pytest.mark.parametrize("kind", [Normalized, NormalizedMatrices])
def test_an_optimizer_that_combines_parameters_is_refused(build: Build, kind: type[Own]) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} cannot run layer by layer: it combines.*clip_grad_norm="):
        build(perceptron(), loss=MSE, optimizer=functools.partial(kind, lr=0.02))


def test_an_optimizer_that_keeps_numbers_in_its_groups_is_refused(build: Build) -> None:
    with pytest.raises(TypeError, match=r"its step changes 'k' in param_groups.*state of each parameter"):
        build(perceptron(), loss=MSE, optimizer=functools.partial(CountingInItsGroup, lr=0.02))


class TakingClosures(Own):
    """Evaluates the loss twice for a step, as SAM does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is None:
            raise RuntimeError("TakingClosures needs a closure")


class OwnLBFGS(torch.optim.LBFGS):
    """Of another name than torch's."""


WITHOUT_A_FIRST_UPDATE = {
    "sparse gradients alone": (functools.partial(torch.optim.SparseAdam, lr=0.1), "does not support dense gradients"),
    "a closure": (functools.partial(TakingClosures, lr=0.1), "needs a closure"),
    "a closure, by torch's class": (functools.partial(OwnLBFGS, lr=0.1), "closure"),
    "a graph of CUDA's": (functools.partial(torch.optim.AdamW, lr=0.1, capturable=True), "supported devices"),
    "a graph of autograd's": (functools.partial(torch.optim.AdamW, lr=0.1, differentiable=True), "in-place"),
}


@pytest.mark.parametrize("case", WITHOUT_A_FIRST_UPDATE)
def test_an_optimizer_that_needs_more_than_dense_gradients_is_refused_when_the_trainer_is_built(
    build: Build, case: str
) -> None:
    made, why = WITHOUT_A_FIRST_UPDATE[case]
    modules = perceptron()
    before = [parameter.data_ptr() for module in modules for parameter in module.parameters()]
    with pytest.raises(TypeError, match=rf"cannot update .*, a parameter of shape .*{why}.*without a closure"):
        build(modules, loss=MSE, optimizer=made)
    assert [parameter.data_ptr() for module in modules for parameter in module.parameters()] == before


def test_an_optimizer_that_draws_is_warned_of_and_leaves_the_generator_alone(build: Build) -> None:
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match="Noisy draws random numbers. Layers are updated in another order"):
        build(perceptron(), loss=MSE, optimizer=functools.partial(Noisy, lr=0.02))
    assert torch.equal(torch.get_rng_state(), before)


def _classes() -> list[Callable[..., torch.optim.Optimizer]]:
    refused = {"Optimizer", "LBFGS", "Muon", "SparseAdam"}
    return [getattr(torch.optim, name) for name in torch.optim.__all__ if name not in refused and name[0].isupper()]


@pytest.mark.parametrize("kind", _classes(), ids=lambda kind: kind.__name__)
def test_no_class_of_torch_optim_combines_parameters(kind: Any) -> None:
    """They are not tried when a trainer is built, so they are here, under a name of our own."""
    own = type(f"Own{kind.__name__}", (kind,), {"__module__": "own"})
    check_by_parameter(functools.partial(own, lr=0.01))
