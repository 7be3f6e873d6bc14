"""Whatever fails in a step, wherever it does: never a wrong parameter, never a hang, and a word on how to go on."""

import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relay
from hal import registry
from hal.conformance.faults import Faults, FaultyQueue, faulty
from hal.errors import DeviceLost, HalError, OutOfMemory
from relay.errors import InconsistentState, NonFiniteLoss
from relay.runtime.step_guard import DeferredInterrupt
from tests.support import devices, reference
from tests.support.shared_captures import share

Make = Callable[..., relay.Trainer]
BATCH = 6


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, faults: Faults) -> Iterator[Make]:
    """Makes trainers on devices with `faults`, and closes them after the test."""
    monkeypatch.setattr(registry, "open", faulty(registry.open, faults))
    made: list[relay.Trainer] = []

    def build(**options: Any) -> relay.Trainer:
        made.append(share(relay.Trainer(layers(), nn.functional.mse_loss, **{"microbatches": 2, **options})))
        return made[-1]

    yield build
    for trainer in made:
        faults.restart()
        faults.slow.clear()
        trainer.close()


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    middle = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(2)]
    return [nn.Linear(4, 4), *middle, nn.Linear(4, 2)]


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(BATCH, 4, generator=generator), torch.randn(BATCH, 2, generator=generator)


def spoiled() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((BATCH, 4), float("nan")), torch.zeros(BATCH, 2)


def state(trainer: relay.Trainer) -> dict[str, torch.Tensor]:
    """Weights, buffers and optimizer states, read without waiting for anything."""
    result = reference.copy_of(trainer._model.state_dict())
    for name, _ in trainer._model.named_parameters():
        for label, value in trainer._session.server.optimizer.state(name).items():
            result[f"{name} {label}"] = value.clone()
    return result


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in right)


# **** one fault at every place ****

RUNS: dict[str, dict[str, Any]] = {
    "eager": {},
    "eager, discrete, streaming": {"device": "cpu:discrete", "stash": "host"},
    "clipped, discrete": {"device": "cpu:discrete", "clip_grad_norm": 0.1, "slots": 3},
    "fp16": {"precision": "fp16"},
    "deferred, fp16": {"precision": "fp16", "defer_updates": True},
    "Muon, discrete": {"optimizer": relay.Muon(), "device": "cpu:discrete"},
    "Muon, deferred": {"optimizer": relay.Muon(), "clip_grad_norm": 0.1, "defer_updates": True, "slots": 1},
    "torch's Adam": {"device": "cpu:discrete", "optimizer": functools.partial(torch.optim.Adam, lr=0.01)},
}


@pytest.mark.parametrize("how", ["skip", "after", "submit"])
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.sample(
    "eager-skip", "eager, discrete, streaming-after", "clipped, discrete-submit", "deferred, fp16-after",
    "torch's Adam-skip",
)  # fmt: skip
def test_a_fault_at_any_call_of_a_step_leaves_it_whole_or_undone_or_is_owned_up_to(
    make: Make, faults: Faults, tmp_path: Path, kind: str, how: str
) -> None:
    trainer = make(**RUNS[kind])
    while sum(trainer.step(batch(number)).skipped for number in range(3)):  # until the loss scale of fp16 fits
        pass
    trainer.save(tmp_path / "c")
    before, steps = state(trainer), trainer.steps
    trainer.step(batch(1))
    trainer.synchronize()
    after = state(trainer)
    trainer.step(batch(2))
    trainer.synchronize()
    final = state(trainer)
    trainer.load(tmp_path / "c", verify=False)
    faults.restart()
    trainer.step(batch(1))
    trainer.synchronize()
    calls = len(faults.calls)
    assert calls > 30
    outcomes = set()
    for number in range(calls):
        trainer.load(tmp_path / "c", verify=False)
        faults.restart(fail_at=number, how=how)
        failed = None
        try:
            trainer.step(batch(1))
            trainer.synchronize()
        except HalError as error:
            failed = error
        where = f"call {number} of {calls}, {faults.calls[number]}"
        faults.restart()
        assert failed is not None, f"{where}: the fault went unnoticed"
        assert "injected fault" in str(failed), where
        if trainer._session.guard.broken is not None:
            outcomes.add("refuses")
            with pytest.raises(InconsistentState, match=str(tmp_path / "c")):
                trainer.step(batch(2))
            with pytest.raises(InconsistentState):
                trainer.save(tmp_path / "broken")
            continue
        found = state(trainer)
        assert same(found, before), f"{where}: neither undone nor owned up to"
        assert trainer.steps == steps
        outcomes.add("undone")
        trainer.step(batch(1))
        trainer.step(batch(2))
        trainer.synchronize()
        assert same(state(trainer), final), f"{where}: going on from it ends elsewhere"
    assert "undone" in outcomes
    assert not same(before, after)


def test_a_failed_update_that_runs_behind_is_not_forgotten_by_the_next_step(
    make: Make, faults: Faults, tmp_path: Path
) -> None:
    trainer = make(clip_grad_norm=0.1, device="cpu:discrete", defer_updates=True)
    trainer.step(batch(0))
    trainer.synchronize()
    trainer.save(tmp_path / "c")
    faults.restart()
    trainer.step(batch(1))
    last = max(number for number, call in enumerate(faults.calls) if "update" in call)
    trainer.load(tmp_path / "c")
    faults.restart(fail_at=last)
    trainer.step(batch(1))
    faults.fail_at = None
    with pytest.raises(HalError, match="injected fault"):
        trainer.step(batch(2))
    with pytest.raises(InconsistentState, match=r"Continue with trainer\.load"):
        trainer.step(batch(2))


# **** Ctrl-C ****


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
def test_ctrl_c_at_any_moment_of_a_step_takes_effect_when_the_step_has_ended(
    make: Make, faults: Faults, tmp_path: Path, device: str
) -> None:
    trainer = make(device=device)
    trainer.step(batch(0))
    trainer.save(tmp_path / "c")
    trainer.step(batch(1))
    after = state(trainer)
    calls = len(faults.calls)

    class Pressed(list):  # type: ignore[type-arg]
        """Presses Ctrl-C as a call is submitted."""

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def append(self, call: Any) -> None:
            super().append(call)
            if len(self) == self.number:
                signal.raise_signal(signal.SIGINT)

    for number in range(3, calls // 2, 5):
        trainer.load(tmp_path / "c", verify=False)
        faults.calls = Pressed(number)
        with pytest.raises(KeyboardInterrupt):
            trainer.step(batch(1))
        assert trainer.steps == 2
        assert same(state(trainer), after)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_again_and_again_ends_a_step_that_does_not_end(make: Make, faults: Faults) -> None:
    trainer = make(device="cpu:discrete")
    trainer.step(batch(0))
    faults.restart()
    faults.slow = {"drain": 0.5}

    def press() -> None:
        """Twice, the second once the first was noticed: two at once would be one."""
        while not isinstance(step := getattr(signal.getsignal(signal.SIGINT), "__self__", None), DeferredInterrupt):
            time.sleep(0.01)
        for number in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(3000):
                if step.count > number:
                    break
                time.sleep(0.01)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        trainer.step(batch(1))
    pressing.join()
    with pytest.raises(InconsistentState):
        trainer.step(batch(1))


# **** devices ****


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
def test_a_lost_device_is_opened_again_and_the_step_repeated_on_request(
    make: Make, faults: Faults, device: str
) -> None:
    plain = make(device=device)
    for number in range(3):
        plain.step(batch(number))
    for resident in (0, 2):
        trainer = make(device=device, on_device_lost="retry", stash="host", resident_layers=resident)
        trainer.step(batch(0))
        faults.restart(fail_at=9, how="lost")
        for number in (1, 2):
            trainer.step(batch(number))
        assert same(state(trainer), state(plain)), resident


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete", "opencl", "onnx:cpu", "numpy", "sim"])
@pytest.mark.sample("cpu", "onnx:cpu", "sim")
def test_a_lost_device_is_an_error_otherwise_and_what_the_host_holds_is_whole(
    make: Make, faults: Faults, tmp_path: Path, device: str
) -> None:
    devices.require(device)
    trainer = make(device=device)
    trainer.step(batch(0))
    before = state(trainer)
    faults.restart(fail_at=5, how="lost")
    for _ in range(2):
        with pytest.raises(DeviceLost, match=rf"'{device}.*' was lost in step 2: .* No parameter was changed"):
            trainer.step(batch(1))
    assert same(state(trainer), before)
    trainer.save(tmp_path / "saved")
    faults.restart()
    elsewhere = make(device="cpu")
    elsewhere.load(tmp_path / "saved")
    assert same(state(elsewhere), before)
    trainer.reopen()
    assert abs(trainer.step(batch(1)).loss - elsewhere.step(batch(1)).loss) < 1e-5


def test_a_device_lost_early_in_a_long_step_says_so_at_once() -> None:
    lost = Faults(fail_at=0, how="lost")
    device = faulty(registry.open, Faults())("cpu:discrete")
    queues = [FaultyQueue(device.queue(name), lost) for name in ("load", "compute")]
    view = device.alloc(16).view(0, (4,), torch.float32)
    events = [queue.fill(view, 0.0) for queue in queues]
    for _ in range(60):  # by two ways to the one before: 2 to the power of 60 ways in all
        events = [queue.fill(view, 0.0, events) for queue in queues]
    assert all(event.done() for event in events)
    for event in events:
        with pytest.raises(DeviceLost):
            event.wait()
    device.close()


def test_a_device_that_somebody_else_fills_gives_advice_and_can_be_tried_again(make: Make, faults: Faults) -> None:
    trainer = make(device="cpu:discrete")
    faults.capacity = 1000
    with pytest.raises(OutOfMemory, match=r"What reduces it: stash='host'.*slots=1.*micro-batches") as caught:
        trainer.step(batch(0))
    assert caught.value.capacity == 1000
    assert trainer.steps == 0
    faults.capacity = None
    trainer.step(batch(0))
    other = make(device="cpu:discrete")
    other.step(batch(0))
    assert same(state(trainer), state(other))


def test_slow_queues_change_no_bit(make: Make, faults: Faults) -> None:
    plain = make(device="cpu:discrete")
    for number in range(2):
        plain.step(batch(number))
    for queue in ("load", "drain", "host", "compute"):
        trainer = make(device="cpu:discrete")
        faults.slow = {queue: 0.001}
        for number in range(2):
            trainer.step(batch(number))
        assert same(state(trainer), state(plain)), queue
        faults.slow = {}


def test_the_watchdog_says_what_a_step_waits_for(make: Make, faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    earlier = set(threading.enumerate())
    trainer = make(device="cpu:discrete", stall_timeout=0.05)
    with caplog.at_level(logging.ERROR, "relay"):
        trainer.step(batch(0))
        faults.slow = {"drain": 0.05}
        trainer.step(batch(1))
    for part in ("has been waited for", "updates: ", "slot 0: ", "bytes in use"):
        assert part in caplog.text
    assert not [thread for thread in set(threading.enumerate()) - earlier if thread.name == "relay-watchdog"]


# **** NaN ****


def test_a_loss_that_is_no_number_stops_is_skipped_or_is_logged(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    plain = make()
    plain.step(batch(0))
    plain.step(batch(1))
    for policy in ("stop", "skip", "log"):
        trainer = make(on_nonfinite=policy)
        trainer.step(batch(0))
        before = state(trainer)
        caplog.clear()
        if policy == "stop":
            with pytest.raises(NonFiniteLoss):
                trainer.step(spoiled())
            assert trainer.steps == 1
        else:
            metrics = trainer.step(spoiled())
            assert metrics.skipped == (policy == "skip")
            assert trainer.steps == 2
            assert "The loss of step 1 is nan" in caplog.text
        if policy == "log":
            assert not same(state(trainer), before)
            continue
        assert same(state(trainer), before)
        trainer.step(batch(1))
        assert same(state(trainer), state(plain))


def test_a_poisoned_gradient_is_seen_by_the_norm_and_skipped(make: Make, faults: Faults) -> None:
    trainer = make(device="cpu:discrete", clip_grad_norm=1.0)
    trainer.step(batch(0))
    trainer.synchronize()
    before = state(trainer)
    faults.restart()
    trainer.predict(batch(0)[0])
    faults.restart()
    trainer.step(batch(1))
    trainer.synchronize()
    backward = max(number for number, call in enumerate(faults.calls) if call.startswith("compute"))
    after = state(trainer)
    assert not same(after, before)
    faults.restart(poison_at=backward)
    assert trainer.step(batch(2)).skipped
    trainer.synchronize()
    assert same(
        state(trainer), {name: value for name, value in after.items() if "running" not in name and "num_" not in name}
    )
