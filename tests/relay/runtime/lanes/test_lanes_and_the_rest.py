"""What else a run does, on several devices: edits, checkpoints, a head over the batch or in chunks, verify, traces."""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relay
from backends import cpu
from hal import registry
from hal.device import Device, KernelCall
from hal.errors import DeviceLost, Unavailable
from hal.event import Event
from relay.models import GPT
from tests.support import reference

TWO = ["cpu:discrete", "cpu:discrete"]
Build = Callable[..., relay.Trainer]


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=64, layers=3, hidden=16, heads=2, sequence=12, tied=False)


@pytest.mark.parametrize("options", [{"loss_over": "batch"}, {"head_chunk_tokens": 7}], ids=str)
def test_a_head_of_another_cut_gives_the_same_bits(build: Build, options: dict[str, Any]) -> None:
    trainers = [build(gpt(), device=device, **options) for device in ("cpu:discrete", TWO)]
    for batch in reference.text_batches(2):
        one, two = (trainer.step(batch) for trainer in trainers)
        assert (one.loss, one.grad_norm) == (two.loss, two.grad_norm)
    reference.assert_same_state(trainers[1].state_dict(), reference.copy_of(trainers[0].state_dict()))


def test_layers_come_and_go_and_a_checkpoint_fits_any_number_of_devices(build: Build, tmp_path: Path) -> None:
    first, second, third = reference.text_batches(3)
    one, two = build(gpt(), device="cpu:discrete"), build(gpt(), device=TWO)
    for trainer in (one, two):
        trainer.step(first)
        trainer.remove(1)
        trainer.step(second)
    two.save(tmp_path / "checkpoint")
    three = build(gpt(), device=["cpu:discrete"] * 3, stash="host")
    three.remove(1)
    three.load(tmp_path / "checkpoint")
    losses = [trainer.step(third).loss for trainer in (one, two, three)]
    assert losses[0] == losses[1] == losses[2]
    for trainer in (two, three):
        reference.assert_same_state(trainer.state_dict(), reference.copy_of(one.state_dict()))


def test_several_devices_are_verified_and_each_has_tracks_of_its_own(build: Build, tmp_path: Path) -> None:
    trainer = build(gpt(), device=TWO)
    found = trainer.verify(reference.text_batches(1))
    assert found.equal
    assert found.tolerance == 0
    trace = trainer.start_trace()
    trainer.step(reference.text_batches(1)[0])
    trainer.stop_trace()
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {f"{number}: cpu:discrete {what}" for number in (0, 1) for what in ("compute", "load", "drain")} <= tracks


class Lost(cpu.CpuQueue):
    """The queue of a device that is lost at its first call."""

    def run(self, call: KernelCall, wait: Sequence[Event] = ()) -> Event:
        def fail() -> None:
            raise DeviceLost("The device fell off the bus.")

        return self.worker.submit(fail, wait, "kernel")


def test_the_step_is_repeated_without_a_device_that_is_lost(
    build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = reference.text_batches(2)
    one = build(gpt(), device="cpu:discrete")
    two = build(gpt(), device=["cpu:discrete", "sim"], device_speeds=(1, 0.5), on_device_lost="retry")
    opened = registry.open

    def without_sim(name: str, capacity: int | None = None) -> Device:
        if name == "sim":
            raise Unavailable("'sim' fell off the bus.")
        return opened(name, capacity)

    losses = [trainer.step(first).loss for trainer in (one, two)]
    lost = Lost("compute")
    two._session.lanes[1].compute = lost
    monkeypatch.setattr(registry, "open", without_sim)
    losses += [trainer.step(second).loss for trainer in (one, two)]
    lost.worker.close()
    assert losses[::2] == losses[1::2]
    assert two.device_name == "cpu:discrete"
    assert any("is left out" in record.message for record in caplog.records)
    reference.assert_same_state(two.state_dict(), reference.copy_of(one.state_dict()))


def test_too_few_micro_batches_are_said_once(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    trainer = build(layers, nn.functional.mse_loss, device=["cpu:discrete"] * 3, microbatches=2)
    with caplog.at_level(logging.WARNING, logger="relay"):
        for _ in range(2):
            trainer.step((torch.randn(4, 4), torch.randn(4, 4)))
    assert sum("2 micro-batches cannot keep 3 devices busy" in record.message for record in caplog.records) == 1
