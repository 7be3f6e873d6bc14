"""With `defer_updates=True` clipped updates run under the next forward, in its order; what reads the model waits."""

import copy
import functools
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import relay
from relay.runtime.trace import Span
from tests.support import mixed_reference, reference
from tests.support.zoo.plain_models import Build, gpt, perceptron, regression

PATIENCE = 30  # seconds until a test that hangs is a failure
NORM = 0.05


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


def open_when_running(trace: relay.Trace, label: str) -> threading.Thread:
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
    Gated.gate.set()  # the class is tried on a few tensors
    modules = [nn.Linear(8, 8) for _ in range(Gated.layers)]
    batch = (torch.randn(8, 8), torch.randn(8, 8))
    trainer = build(
        modules,
        loss=nn.functional.mse_loss,
        device="cpu:discrete",
        clip_grad_norm=0.1,
        defer_updates=True,
        optimizer=functools.partial(Gated, lr=0.1),
    )
    Gated.gate.clear()
    Gated.calls = 0
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
    trainer = build(model, clip_grad_norm=NORM, defer_updates=True, device=device)
    for batch in reference.text_batches(3):
        mixed_reference.train(plain, [batch], optimizer=stepper, clip_norm=NORM)
        trainer.step(batch)
        reference.assert_same_state(trainer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
def test_evaluating_right_after_a_clipped_step_sees_the_updated_weights(build: Build, device: str) -> None:
    modules = perceptron(count=4)
    plain = copy.deepcopy(modules)
    batches = [regression(seed=seed) for seed in range(3)]
    stepper = reference.adamw(list(reference.parameters_of(plain)))
    loss = nn.functional.mse_loss
    trainer = build(modules, loss=loss, clip_grad_norm=0.1, defer_updates=True, device=device, microbatches=1)
    for batch in batches:
        mixed_reference.train(plain, [batch], 1, optimizer=stepper, clip_norm=0.1, loss=loss)
        trainer.step(batch)
        expected = loss(nn.Sequential(*plain)(batches[0][0]), batches[0][1]).item()
        assert trainer.evaluate(batches[0]).loss == expected
