"""Clipping by norm and by value is torch.nn.utils' to the last bit, with updates hidden under the next forward."""

import copy
import functools
import math
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import matrix
import mixed_reference
import pytest
import reference
import torch
from torch import Tensor, nn

import relay
from hal.worker import WorkerEvent
from relay.models import GPT
from relay.trace import Span

STEPS = 6
PATIENCE = 30  # seconds until a test that hangs is a failure
NORM = 0.05
VALUE = 2e-3
CLIPPINGS = {"norm": {"norm": NORM}, "value": {"value": VALUE}, "both": {"norm": NORM, "value": VALUE}}

Build = Callable[..., relay.Trainer]


def gpt(layers: int = 3, **changes: Any) -> GPT:
    torch.manual_seed(0)
    settings = {"vocabulary": 64, "layers": layers, "hidden": 16, "heads": 2, "sequence": 12, "tied": False}
    return GPT(**{**settings, **changes})


def linears(count: int = 4, width: int = 8) -> list[nn.Module]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]
    return [nn.Linear(6, width), *layers, nn.Linear(width, 3)]


DEVICES = ["cpu", "cpu:discrete"]


def regression(batch: int = 10, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 6, generator=generator), torch.randn(batch, 3, generator=generator)


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
def test_losses_norms_and_parameters_are_those_of_torch_clipping_to_the_last_bit(
    build: Build, device: str, clipping: str, precision: str
) -> None:
    plain, state = plainly_trained(precision, clipping)
    assert not any(plain.skipped)
    trainer = build(gpt(), device=device, precision=precision, **ours(clipping))
    metrics = [trainer.step(batch) for batch in reference.text_batches(STEPS)]
    assert [one.loss for one in metrics] == plain.losses
    assert [one.grad_norm for one in metrics] == plain.norms
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
def test_every_optimizer_takes_clipped_gradients_as_torch_optim_does(
    build: Build, device: str, precision: str, name: str
) -> None:
    mine, torchs = OPTIMIZERS[name]
    modules = linears()
    plain = copy.deepcopy(modules)
    batches = [regression(seed=seed) for seed in range(STEPS)]
    options = {"loss": nn.functional.mse_loss, "precision": precision}
    found = mixed_reference.train(plain, batches, optimizer=torchs, clip_norm=0.3, **options)
    trainer = build(modules, optimizer=mine, clip_grad_norm=0.3, device=device, **options)
    metrics = [trainer.step(batch) for batch in batches]
    assert [one.loss for one in metrics] == found.losses
    assert [one.grad_norm for one in metrics] == found.norms
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
def test_tied_weights_are_clipped_by_the_norm_of_their_summed_gradient(build: Build, device: str) -> None:
    model, plain = gpt(tied=True), gpt(tied=True)
    batches = reference.text_batches(STEPS)
    found = mixed_reference.train(plain, batches, 1, clip_norm=NORM)
    trainer = build(model, clip_grad_norm=NORM, device=device, microbatches=1)
    metrics = [trainer.step(batch) for batch in batches]
    assert [one.loss for one in metrics] == found.losses
    assert [one.grad_norm for one in metrics] == found.norms
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())


def test_frozen_parameters_do_not_count_in_the_norm(build: Build) -> None:
    model, plain = gpt(), gpt()
    for one in (model, plain):
        one.blocks[1].feed_in.weight.requires_grad_(False)
    batches = reference.text_batches(3)
    found = mixed_reference.train(plain, batches, clip_norm=NORM)
    trainer = build(model, clip_grad_norm=NORM)
    assert [trainer.step(batch).grad_norm for batch in batches] == found.norms
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())


# **** when updates run ****


def named(spans: list[Span], track: str, kind: str = "") -> list[Span]:
    return [span for span in spans if span.track == track and kind in span.label]


class Gated(torch.optim.SGD):
    """Holds the last layer's update of a step until a test opens the gate."""

    gate = threading.Event()
    layers = 6
    calls = 0

    def step(self, closure: Any = None) -> Any:
        Gated.calls += 1
        if Gated.calls % Gated.layers == 0:
            Gated.gate.wait(PATIENCE)
        return super().step(closure)


def open_when_running(trace: relay.trace.Trace, label: str) -> threading.Thread:
    """Opens the gate once a call of that label has ended in the trace; gives up in the end."""

    def look() -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if any(found == label and event.done() for _, found, event in list(trace._marks)):
                break
            time.sleep(0.001)
        Gated.gate.set()

    thread = threading.Thread(target=look)
    thread.start()
    return thread


def test_updates_run_in_forward_order_under_the_next_forward_and_each_load_waits_for_its_own(build: Build) -> None:
    torch.manual_seed(0)
    Gated.gate.clear()
    Gated.calls = 0
    modules = [nn.Linear(8, 8) for _ in range(Gated.layers)]
    batch = (torch.randn(8, 8), torch.randn(8, 8))
    trainer = build(
        modules,
        loss=nn.functional.mse_loss,
        device="cpu:discrete",
        clip_grad_norm=0.1,
        optimizer=functools.partial(Gated, lr=0.1),
    )
    first = trainer.start_trace()
    trainer.step(batch)
    second = trainer.start_trace()
    waiting = open_when_running(second, "4 forward 3")
    trainer.step(batch)
    waiting.join()
    updates, following = named(first.spans(), "update"), second.spans()
    assert [span.label for span in updates] == ["0", "1", "2", "3", "4", "5"]
    # The last layer's update ended after the forward of the layer before it had: it was under it.
    under = [span for span in named(following, "compute", "forward") if span.end < updates[-1].end]
    assert [span.label for span in under] == [f"{layer} forward {piece}" for layer in range(5) for piece in range(4)]
    ended = {span.label: span.end for span in updates}
    first_load: dict[str, float] = {}
    for span in named(following, "load"):
        first_load.setdefault(span.label, span.start)
    assert list(first_load) == list(ended)
    assert all(first_load[label] >= ended[label] for label in ended)
    # No update before the last gradient of its own step is there.
    assert updates[0].start >= max(span.end for span in named(first.spans(), "drain"))


def test_without_clipping_layers_are_updated_from_the_last_to_the_first_before_the_step_returns(build: Build) -> None:
    torch.manual_seed(0)
    modules = [nn.Linear(8, 8) for _ in range(6)]
    trainer = build(modules, loss=nn.functional.mse_loss, device="cpu:discrete")
    trace = trainer.start_trace()
    trainer.step((torch.randn(8, 8), torch.randn(8, 8)))
    assert all(event.done() for _, _, event in trace._marks)
    assert [span.label for span in named(trace.spans(), "update")] == ["5", "4", "3", "2", "1", "0"]


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
def test_the_state_dict_right_after_a_clipped_step_is_that_of_after_the_step(build: Build, device: str) -> None:
    model, plain = gpt(), gpt()
    stepper = reference.adamw(list(plain.parameters()))
    trainer = build(model, clip_grad_norm=NORM, device=device)
    for batch in reference.text_batches(3):
        mixed_reference.train(plain, [batch], optimizer=stepper, clip_norm=NORM)
        trainer.step(batch)
        reference.assert_same_state(trainer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
def test_evaluating_right_after_a_clipped_step_sees_the_updated_weights(build: Build, device: str) -> None:
    modules = linears()
    plain = copy.deepcopy(modules)
    batches = [regression(seed=seed) for seed in range(3)]
    stepper = reference.adamw(list(reference.parameters_of(plain)))
    loss = nn.functional.mse_loss
    trainer = build(modules, loss=loss, clip_grad_norm=0.1, device=device, microbatches=1)
    for batch in batches:
        mixed_reference.train(plain, [batch], 1, optimizer=stepper, clip_norm=0.1, loss=loss)
        trainer.step(batch)
        expected = loss(nn.Sequential(*plain)(batches[0][0]), batches[0][1]).item()
        assert trainer.evaluate(batches[0]).loss == expected


# **** when something goes wrong ****


def everything(trainer: relay.Trainer) -> dict[str, Tensor]:
    held = reference.copy_of(trainer.state_dict())
    bound = trainer._session.server.optimizer
    for name, _ in trainer._model.named_parameters():
        held.update({f"{name}: {label}": tensor.clone() for label, tensor in bound.state(name).items()})
    return held


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
def test_a_loss_that_is_not_finite_leaves_everything_and_training_goes_on(
    build: Build, device: str, clipping: str
) -> None:
    modules = linears()
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
def test_a_held_update_that_fails_surfaces_and_ends_the_training(build: Build, then: str, device: str) -> None:
    Failing.calls = 0
    trainer = build(
        linears(),
        loss=nn.functional.mse_loss,
        clip_grad_norm=0.1,
        device=device,
        optimizer=functools.partial(Failing, lr=0.1),
    )
    trainer.step(regression())
    trainer.state_dict()
    with pytest.raises(Exception, match="the optimizer broke"):  # noqa: PT012
        trainer.step(regression(seed=2))
        if then == "step":
            trainer.step(regression(seed=3))
        else:
            getattr(trainer, then)()
    for _ in range(2):
        with pytest.raises(relay.InconsistentState, match="so some layers have taken that"):
            trainer.step(regression(seed=4))


def test_an_interrupt_while_a_clipped_step_is_under_way_comes_after_the_whole_step(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = linears()
    plain = copy.deepcopy(modules)
    batches = [regression(seed=seed) for seed in range(3)]
    loss = nn.functional.mse_loss
    losses = mixed_reference.train(plain, batches, loss=loss, clip_norm=0.1).losses
    trainer = build(modules, loss=loss, clip_grad_norm=0.1, device="cpu:discrete")
    assert trainer.step(batches[0]).loss == losses[0]
    wait = WorkerEvent.wait
    interrupted = []

    def interrupted_once(event: WorkerEvent) -> None:
        if not interrupted:
            interrupted.append(event)
            signal.raise_signal(signal.SIGINT)
        wait(event)

    monkeypatch.setattr(WorkerEvent, "wait", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        trainer.step(batches[1])
    monkeypatch.undo()
    assert trainer.step(batches[2]).loss == losses[2]
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


@pytest.mark.parametrize("option", ["clip_grad_norm", "clip_grad_value"])
@pytest.mark.parametrize("limit", [0, -1.0, math.nan])
def test_a_limit_that_is_not_above_zero_is_refused(build: Build, option: str, limit: float) -> None:
    with pytest.raises(ValueError, match=option):
        build(linears(), loss=nn.functional.mse_loss, **{option: limit})
