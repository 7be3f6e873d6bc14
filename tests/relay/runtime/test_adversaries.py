"""The relay gives the CPU's results under every order of execution that its events allow, over poisoned memory."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from hal import registry
from hal.event import Event
from tests.support.scenarios import SCENARIOS, differences

ORDERS = ["order=eager", "order=late", *(f"order=random,seed={seed}" for seed in range(10))]
UNIFIED = Path(__file__).parents[2] / "support" / "machines" / "unified.toml"

pytestmark = pytest.mark.filterwarnings("ignore:layer")  # experts run eagerly, which is what is wanted


def cases() -> list[Any]:
    """Each scenario with orders on the machine with a link, and on the unified one, where there are fewer calls. In
    `make test` these are the latest order and one drawn at random, by the ten seeds in turn; in `make test-full` all
    others."""
    found = []
    for number, scenario in enumerate(SCENARIOS):
        seed = 2 + number % 10
        others = [order for order in ORDERS if order not in ("order=late", ORDERS[seed])]
        found.append(pytest.param(scenario, ["order=late", ORDERS[seed]], [ORDERS[seed]][: number % 2], id=scenario))
        thorough = scenario, others, ["order=late", *others[1:4]]
        found.append(pytest.param(*thorough, id=f"{scenario}, thorough", marks=pytest.mark.exhaustive))
    return found


@pytest.mark.parametrize(("scenario", "apart", "unified"), cases())
def test_a_run_is_the_cpus_in_every_order(scenario: str, apart: list[str], unified: list[str]) -> None:
    devices = [f"sim:generic,{order},poison=on" for order in apart]
    devices += [f"sim:{UNIFIED},{order},poison=on" for order in unified]
    wrong = {device: found for device in devices if (found := differences(scenario, device))}
    assert not wrong


@pytest.mark.parametrize("device", ["sim", "sim:m2-ultra-76c", "sim:v100-sxm2-16gb,order=late"])
def test_a_preset_changes_the_time_and_not_the_numbers(device: str) -> None:
    assert not differences("activations on the device", device)


# **** the adversaries find what they are there to find ****


def test_late_shows_a_read_that_does_not_wait() -> None:
    device = registry.open("sim:generic,order=late,poison=on")
    view = device.alloc(64).view(0, (16,), torch.float32)
    written = device.queue("load").write(view, torch.ones(16))
    hasty, patient = torch.zeros(16), torch.zeros(16)
    device.queue("drain").read(hasty, view).wait()
    device.queue("drain").read(patient, view, [written]).wait()
    assert bool(hasty.isnan().all())
    assert torch.equal(patient, torch.ones(16))
    device.close()


def overwritten_too_early(seed: int, with_wait: bool) -> bool:
    device = registry.open(f"sim:generic,order=random,seed={seed}")
    view = device.alloc(64).view(0, (16,), torch.float32)
    first = device.queue("load").write(view, torch.ones(16))
    target = torch.zeros(16)
    read = device.queue("drain").read(target, view, [first])
    device.queue("load").write(view, torch.full((16,), 2.0), [read] if with_wait else [])
    read.wait()
    device.close()
    return not torch.equal(target, torch.ones(16))


def test_random_shows_an_overwrite_that_does_not_wait_in_some_seeds() -> None:
    assert any(overwritten_too_early(seed, with_wait=False) for seed in range(20))
    assert not any(overwritten_too_early(seed, with_wait=True) for seed in range(20))


def test_freed_memory_is_poisoned_after_the_last_call_that_uses_it() -> None:
    device = registry.open("sim:generic,order=late,poison=on")
    buffer = device.alloc(64)
    view = buffer.view(0, (16,), torch.float32)
    written = device.queue("load").write(view, torch.ones(16))
    before, after = torch.zeros(16), torch.zeros(16)
    read = device.queue("drain").read(before, view, [written])
    buffer.free()
    read.wait()
    assert torch.equal(before, torch.ones(16))
    stale = device.queue("other").read(after, view)
    device.close()
    stale.wait()
    assert bool(after.isnan().all())


def test_an_error_travels_along_events_and_stops_nothing_else() -> None:
    for order in ORDERS:
        device = registry.open(f"sim:generic,{order}")
        host = device.host()

        def fail() -> None:
            raise ValueError("broken on purpose")

        failed = host.run(fail, label="the task")
        buffer = device.alloc(64)
        view = buffer.view(0, (16,), torch.float32)
        after = device.queue("load").write(view, torch.ones(16), [failed])
        other = device.queue("other").fill(view, 3.0)
        with pytest.raises(RuntimeError, match="broken on purpose") as caught:
            after.wait()
        assert isinstance(caught.value.__cause__, ValueError)
        other.wait()
        device.close()


class InterruptedOnce(Event):
    """Somebody presses Ctrl-C when it is waited for; from then on it has ended."""

    def __init__(self) -> None:
        self.pressed = False

    def done(self) -> bool:
        return self.pressed

    def wait(self) -> None:
        if not self.pressed:
            self.pressed = True
            signal.raise_signal(signal.SIGINT)

    def span(self) -> tuple[float, float]:
        return 0.0, 0.0


@pytest.mark.parametrize("order", ORDERS[:3])
def test_ctrl_c_while_something_elsewhere_is_awaited_is_not_lost_and_one_can_wait_again(order: str) -> None:
    device = registry.open(f"sim:generic,{order}")
    view = device.alloc(64).view(0, (16,), torch.float32)
    written = device.queue("load").write(view, torch.ones(16), [InterruptedOnce()])
    with pytest.raises(KeyboardInterrupt):
        written.wait()
    written.wait()
    device.close()
