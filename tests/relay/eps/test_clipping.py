"""Clipping by norm and by value is torch.nn.utils' to the last bit."""

import copy
import functools
import math
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from backends.simulator.clock import SimulatedEvent
from hal.event import Event
from hal.worker import WorkerEvent
from tests.support import matrix, mixed_reference, reference
from tests.support.zoo.plain_models import Build, everything, gpt, perceptron, regression

STEPS = 6
NORM = 0.05
VALUE = 2e-3
CLIPPINGS = {"norm": {"norm": NORM}, "value": {"value": VALUE}, "both": {"norm": NORM, "value": VALUE}}
DEVICES = ["cpu", "cpu:discrete"]


def ours(clipping: str) -> dict[str, float]:
    """The trainer's options for one of CLIPPINGS."""
    return {f"clip_grad_{name}": limit for name, limit in CLIPPINGS[clipping].items()}


def plains(clipping: str) -> dict[str, float]:
    """The reference's options for one of CLIPPINGS."""
    return {f"clip_{name}": limit for name, limit in CLIPPINGS[clipping].items()}


@functools.cache
def plainly_trained(precision: str, clipping: str) -> tuple[mixed_reference.Plain, dict[str, Tensor]]:
    model = gpt()
    found = mixed_reference.train(model, reference.text_batches(STEPS), precision=precision, **plains(clipping))
    return found, reference.state_of(model)


@pytest.mark.parametrize(
    ("precision", "clipping", "device"), matrix.in_turn(DEVICES, ["fp32", "bf16", "fp16"], CLIPPINGS)
)
@pytest.mark.sample("fp32-value-cpu:discrete", "bf16-both-cpu:discrete", "fp16-norm-cpu")
def test_losses_norms_and_parameters_are_those_of_torch_clipping_to_the_last_bit(
    build: Build, device: str, clipping: str, precision: str
) -> None:
    plain, state = plainly_trained(precision, clipping)
    assert not any(plain.skipped)
    trainer = build(gpt(), device=device, precision=precision, **ours(clipping))
    metrics = [trainer.step(batch) for batch in reference.text_batches(STEPS)]
    assert [step.loss for step in metrics] == plain.losses
    assert [step.grad_norm for step in metrics] == plain.norms
    reference.assert_same_state(trainer.state_dict(), state)


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_each_clipping_changes_the_training(clipping: str) -> None:
    model = gpt()
    unclipped = mixed_reference.train(model, reference.text_batches(STEPS))
    found, _ = plainly_trained("fp32", clipping)
    assert found.losses[0] == unclipped.losses[0]
    assert found.losses[2:] != unclipped.losses[2:]
    if "norm" in CLIPPINGS[clipping]:
        assert min(found.norms) > NORM, "the limit is one that clips"


def test_a_norm_below_the_limit_changes_nothing(build: Build) -> None:
    plain = gpt()
    losses = reference.train(plain, reference.text_batches(STEPS))
    trainer = build(gpt(), clip_grad_norm=1e3)
    assert [trainer.step(batch).loss for batch in reference.text_batches(STEPS)] == losses
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())


OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "AdamW": (relay.AdamW(lr=1e-2), functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)),
    "Adam": (
        relay.Adam(lr=1e-2, weight_decay=0.1),
        functools.partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1, fused=True),
    ),
    "SGD with momentum": (
        relay.SGD(lr=0.1, momentum=0.9),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    ),
    "SGD with Nesterov's": (
        relay.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    ),
    **{
        f"torch.optim.{made.func.__name__}": (made, made)
        for made in (
            functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            functools.partial(torch.optim.RMSprop, lr=1e-3),
            functools.partial(torch.optim.Adagrad, lr=1e-2),
        )
    },
}


@pytest.mark.parametrize(("name", "precision", "device"), matrix.in_turn(DEVICES, OPTIMIZERS, ["fp32", "bf16"]))
@pytest.mark.sample(3)
def test_every_optimizer_takes_clipped_gradients_as_torch_optim_does(
    build: Build, device: str, precision: str, name: str
) -> None:
    mine, torchs = OPTIMIZERS[name]
    modules = perceptron(count=4)
    plain = copy.deepcopy(modules)
    batches = [regression(seed=seed) for seed in range(STEPS)]
    options = {"loss": nn.functional.mse_loss, "precision": precision}
    found = mixed_reference.train(plain, batches, optimizer=torchs, clip_norm=0.3, **options)
    trainer = build(modules, optimizer=mine, clip_grad_norm=0.3, device=device, **options)
    metrics = [trainer.step(batch) for batch in batches]
    assert [step.loss for step in metrics] == found.losses
    assert [step.grad_norm for step in metrics] == found.norms
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
def test_tied_weights_are_clipped_by_the_norm_of_their_summed_gradient(build: Build, device: str) -> None:
    model, plain = gpt(tied=True), gpt(tied=True)
    batches = reference.text_batches(STEPS)
    found = mixed_reference.train(plain, batches, clip_norm=NORM)
    trainer = build(model, clip_grad_norm=NORM, device=device)
    metrics = [trainer.step(batch) for batch in batches]
    assert [step.loss for step in metrics] == found.losses
    assert [step.grad_norm for step in metrics] == found.norms
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())


def test_frozen_parameters_do_not_count_in_the_norm(build: Build) -> None:
    model, plain = gpt(), gpt()
    for changed in (model, plain):
        changed.blocks[1].feed_in.weight.requires_grad_(False)
    batches = reference.text_batches(3)
    found = mixed_reference.train(plain, batches, clip_norm=NORM)
    trainer = build(model, clip_grad_norm=NORM)
    assert [trainer.step(batch).grad_norm for batch in batches] == found.norms
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.sample(4)
def test_a_loss_that_is_not_finite_leaves_everything_and_training_goes_on(
    build: Build, device: str, clipping: str
) -> None:
    modules = perceptron(count=4)
    plain = copy.deepcopy(modules)
    batches = [regression(seed=seed) for seed in range(4)]
    loss = nn.functional.mse_loss
    losses = mixed_reference.train(plain, batches, loss=loss, **plains(clipping)).losses
    trainer = build(modules, loss=loss, device=device, **ours(clipping))
    found = []
    for number, batch in enumerate(batches):
        if number == 2:
            before = everything(trainer)
            with pytest.raises(relay.NonFiniteLoss):
                trainer.step((batch[0], torch.full_like(batch[1], math.inf)))
            after = everything(trainer)
            assert [name for name in after if not torch.equal(after[name], before[name])] == []
        found.append(trainer.step(batch).loss)
    assert found == losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


class RootOfZero(nn.Module):
    """A layer whose output is finite and whose gradient is not: the root at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, value: Tensor) -> Tensor:
        return value + torch.sqrt((value * 0).abs() * self.scale)


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
def test_a_gradient_norm_that_is_not_finite_applies_nothing_and_says_so(build: Build, device: str) -> None:
    torch.manual_seed(0)
    modules = [nn.Linear(6, 8), RootOfZero(), RootOfZero(), nn.Linear(8, 3)]
    trainer = build(modules, loss=nn.functional.mse_loss, clip_grad_norm=1.0, device=device)
    trainer.prepare(regression())
    before = everything(trainer)
    metrics = trainer.step(regression())
    assert math.isfinite(metrics.loss)
    assert not math.isfinite(metrics.grad_norm)
    assert metrics.skipped
    after = everything(trainer)
    assert [name for name in after if not torch.equal(after[name], before[name])] == []


class Failing(torch.optim.SGD):
    """Fails at its second step, from its second layer on."""

    calls = 0
    lock = threading.Lock()

    def step(self, closure: Any = None) -> Any:
        with Failing.lock:
            Failing.calls += 1
            count = Failing.calls
        if count > 6 + 2:
            raise RuntimeError("the optimizer broke")
        return super().step(closure)


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.parametrize("then", ["synchronize", "state_dict", "step"])
def test_a_deferred_update_that_fails_surfaces_and_ends_the_training(build: Build, then: str, device: str) -> None:
    Failing.calls = -1000  # the class is tried on a few tensors first
    trainer = build(
        perceptron(count=4),
        loss=nn.functional.mse_loss,
        clip_grad_norm=0.1,
        defer_updates=True,
        device=device,
        optimizer=functools.partial(Failing, lr=0.1),
    )
    Failing.calls = 0
    trainer.step(regression())
    trainer.state_dict()
    with pytest.raises(Exception, match="the optimizer broke"):  # noqa: PT012
        trainer.step(regression(seed=2))
        if then == "step":
            trainer.step(regression(seed=3))
        else:
            getattr(trainer, then)()
    for _ in range(2):
        with pytest.raises(relay.InconsistentState, match="so some layers are updated"):
            trainer.step(regression(seed=4))


def _interrupting(wait: Callable[[Event], None], interrupted: list[Event]) -> Callable[[Event], None]:
    """A `wait` that is interrupted the first time that anything is waited for."""

    def interrupted_once(event: Event) -> None:
        if not interrupted:
            interrupted.append(event)
            signal.raise_signal(signal.SIGINT)
        wait(event)

    return interrupted_once


def test_an_interrupt_while_a_clipped_step_is_under_way_comes_after_the_whole_step(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = perceptron(count=4)
    plain = copy.deepcopy(modules)
    batches = [regression(seed=seed) for seed in range(3)]
    loss = nn.functional.mse_loss
    losses = mixed_reference.train(plain, batches, loss=loss, clip_norm=0.1).losses
    trainer = build(modules, loss=loss, clip_grad_norm=0.1, device="cpu:discrete")
    assert trainer.step(batches[0]).loss == losses[0]
    interrupted = []
    for kind in (WorkerEvent, SimulatedEvent):
        monkeypatch.setattr(kind, "wait", _interrupting(kind.wait, interrupted))
    with pytest.raises(KeyboardInterrupt):
        trainer.step(batches[1])
    monkeypatch.undo()
    assert interrupted
    assert trainer.step(batches[2]).loss == losses[2]
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


@pytest.mark.parametrize("option", ["clip_grad_norm", "clip_grad_value"])
@pytest.mark.parametrize("limit", [0, -1.0, math.nan])
def test_a_limit_that_is_not_above_zero_is_refused(build: Build, option: str, limit: float) -> None:
    with pytest.raises(ValueError, match=option):
        build(perceptron(count=4), loss=nn.functional.mse_loss, **{option: limit})
