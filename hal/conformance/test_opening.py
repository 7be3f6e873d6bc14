"""Probing, opening and closing a device, and its DeviceInfo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hal import registry
from hal.conformance.conftest import OpenDevice
from hal.device import UNIFIED, Device
from hal.errors import HalError, Unavailable, Unsupported
from hal.kit.program_builder import QUEUE, fetch, upload


def test_probing_finds_the_device_and_says_that_it_works(name: str, device: Device) -> None:
    family = name.partition(":")[0]
    probes = [probe for probe in registry.devices() if probe.name.partition(":")[0] == family]
    assert any(probe.available and probe.description for probe in probes), probes
    assert all(probe.available or probe.reason for probe in probes), "what is not there keeps its reason"
    named = [probe for probe in probes if probe.name == name]
    assert all(probe.available for probe in named), named


def test_probing_twice_finds_the_same(name: str) -> None:
    backend = registry.backends()[0][name.partition(":")[0]]
    first, second = backend.probe(), backend.probe()
    assert [(probe.name, probe.available) for probe in first] == [(probe.name, probe.available) for probe in second]


def test_probing_runs_a_kernel(name: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that copies memory and runs nothing is not a device that works (contract 10)."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise HalError("no kernel runs")

    monkeypatch.setattr(type(device.queue(QUEUE)), "run", refuse)
    probes = registry.backends()[0][name.partition(":")[0]].probe()
    assert all(not probe.available for probe in probes), "probing calls a device available that runs no kernel"
    assert any("no kernel runs" in probe.reason for probe in probes), "what is not there keeps its reason"


def test_its_device_info_is_complete(device: Device) -> None:
    info = device.info
    assert info.name
    assert info.description
    assert {torch.float32, torch.int64, torch.bool, torch.uint8} <= info.storage, "every device holds these"
    assert any(dtype.is_floating_point for dtype in info.compute)
    assert info.memory is None or info.memory > 0
    assert all(isinstance(tag, str) for tag in info.tags)
    assert info.unified == (UNIFIED in info.tags)


def test_it_opens_and_closes_twice(open_device: OpenDevice) -> None:
    for number in range(2):
        device = open_device()
        buffer, views = upload(device, [torch.full((5,), float(number))])
        assert torch.equal(fetch(device, views)[0], torch.full((5,), float(number)))
        buffer.free()
        device.close()
        device.close()


def test_a_closed_device_says_that_it_is_closed(open_device: OpenDevice) -> None:
    device = open_device()
    device.queue(QUEUE)
    device.close()
    with pytest.raises(HalError, match="closed"):
        device.alloc(64)
    with pytest.raises(HalError, match="closed"):
        device.queue("another")


def test_a_queue_of_a_closed_device_takes_no_more_work(open_device: OpenDevice) -> None:
    device = open_device()
    queue = device.queue(QUEUE)
    view = device.alloc(64).view(0, (4,), torch.float32)
    device.close()
    with pytest.raises(HalError):
        queue.fill(view, 1.0).wait()


def test_closing_waits_for_what_is_queued(open_device: OpenDevice) -> None:
    device = open_device()
    numbers, back = torch.arange(100_000, dtype=torch.float32), torch.zeros(100_000)
    view = device.alloc(400_000).view(0, (100_000,), torch.float32)
    queue = device.queue(QUEUE)
    event = queue.read(back, view, [queue.write(view, numbers)])
    device.close()
    assert event.done()
    assert torch.equal(back, numbers)


def test_closing_gives_all_memory_back(open_device: OpenDevice) -> None:
    device = open_device()
    device.alloc(1000)
    device.close()
    assert device.memory().in_use == 0


def test_a_queue_is_made_once_for_a_name(device: Device) -> None:
    assert device.queue("one") is device.queue("one")
    assert device.queue("one") is not device.queue("two")


def test_a_device_that_is_not_there_is_unavailable(name: str) -> None:
    with pytest.raises(Unavailable):
        registry.open(f"{name.partition(':')[0]}:there-is-no-such-device")


def test_only_a_unified_device_aliases_host_memory(device: Device) -> None:
    numbers = torch.arange(64, dtype=torch.float32)
    if not device.info.unified:
        with pytest.raises(Unsupported):
            device.adopt(numbers)
        return
    view = device.adopt(numbers)
    assert device.host_tensor(view).data_ptr() == numbers.data_ptr()
    device.queue(QUEUE).fill(view, 3.0).wait()
    assert torch.equal(numbers, torch.full((64,), 3.0))
    with pytest.raises(ValueError, match="contiguous"):
        device.adopt(torch.zeros(4, 4).t())
