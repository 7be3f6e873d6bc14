"""The relay gives the CPU's results under every order of execution that its events allow, over poisoned memory."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from torch import Tensor, nn

import relay
from hal import registry
from relay.models import GPT
from relay.program_cache import ProgramCache

ORDERS = ["order=eager", "order=late", *(f"order=random,seed={seed}" for seed in range(10))]
STEPS = 3


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    settings = {"vocabulary": 64, "layers": 4, "hidden": 16, "heads": 2, "sequence": 12, "tied": False}
    return GPT(**{**settings, **changes})


def with_batchnorm() -> list[nn.Module]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)]
    return [nn.Linear(6, 8), *layers, nn.Linear(8, 3)]


def regression(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(12, 6, generator=generator), torch.randn(12, 3, generator=generator)


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "activations on the device": (gpt, {}),
    "activations on the host, one slot": (gpt, {"stash": "host", "slots": 1}),
    "clipped, tied, three slots": (functools.partial(gpt, tied=True), {"clip_grad_norm": 0.1, "slots": 3}),
    "clipped, activations on the host": (gpt, {"clip_grad_norm": 0.1, "stash": "host"}),
    "dropout": (functools.partial(gpt, dropout=0.3), {"stash": "host"}),
    "bf16": (gpt, {"precision": "bf16"}),
    "fp16 with a loss scale": (gpt, {"precision": "fp16", "slots": 3}),
    "kept on the device": (functools.partial(gpt, dropout=0.3), {"recompute": False, "slots": 1}),
    "kept on the host, two layers a slot": (gpt, {"recompute": 1, "layers_per_slot": 2, "stash": "host"}),
    "running statistics, kept on the host": (
        with_batchnorm, {"loss": nn.functional.mse_loss, "slots": 1, "recompute": False, "stash": "host"}
    ),
    "running statistics": (with_batchnorm, {"loss": nn.functional.mse_loss, "slots": 1}),
}


@functools.cache
def captures(case: str) -> ProgramCache:
    """What was captured of a case's model, for all its trainers: tracing takes ten times as long as the steps."""
    return ProgramCache(32)


def trained(case: str, device: str) -> tuple[list[float], dict[str, Tensor]]:
    make, options = CASES[case]
    batches = [regression(seed) for seed in range(STEPS)] if "loss" in options else reference.text_batches(STEPS)
    trainer = relay.Trainer(make(), device=device, **options)
    trainer._recorder.cache = captures(case)
    losses = [trainer.step(batch).loss for batch in batches]
    state = reference.copy_of(trainer.state_dict())
    trainer.close()
    return losses, state


@functools.cache
def on_the_cpu(case: str) -> tuple[list[float], dict[str, Tensor]]:
    return trained(case, "cpu:discrete")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order", ORDERS)
def test_losses_and_weights_are_the_cpus_in_every_order(case: str, order: str) -> None:
    losses, state = on_the_cpu(case)
    ours, our_state = trained(case, f"sim:generic,{order},poison=on")
    assert ours == losses
    reference.assert_same_state(our_state, state)


@pytest.mark.parametrize("device", ["sim", "sim:m2-ultra-76c", "sim:v100-sxm2-16gb,order=late"])
def test_a_preset_changes_the_time_and_not_the_numbers(device: str) -> None:
    losses, state = on_the_cpu("activations on the device")
    ours, our_state = trained("activations on the device", device)
    assert ours == losses
    reference.assert_same_state(our_state, state)


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
