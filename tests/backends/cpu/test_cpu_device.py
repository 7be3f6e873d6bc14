"""The CPU devices from opening to closing, and what their probe tells of the machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from backends.cpu import CpuBackend
from hal.conformance.gate import Gate
from hal.device import Device
from hal.errors import HalError, Unavailable
from hal.kit.program_builder import GraphBuilder, run
from hal.program import Program
from hal.registry import open as open_device
from relay.capture import CaptureRequest, capture
from tests.support.cpu_devices import NAMES, fetch, opened, upload
from tests.support.device_programs import captured_from, module_and_inputs

# **** life ****


def test_closing_finishes_queued_work_and_frees_everything(device: Device, gate: Gate) -> None:
    view, back = upload(device, torch.zeros(3)), torch.empty(3)
    device.compile(captured_from("attention").forward)
    buffer = device.alloc(100)
    written = device.queue("load").write(view, torch.ones(3), [gate.event])
    device.queue("drain").read(back, view, [written])
    closing = threading.Thread(target=device.close)
    closing.start()
    gate.open()
    closing.join()
    assert torch.equal(back, torch.ones(3))
    assert device.memory().in_use == 0
    buffer.free()
    assert device.memory().in_use == 0


def test_closing_twice_is_harmless_and_use_after_it_is_an_error(device: Device) -> None:
    queue, view = device.queue("any"), upload(device, torch.zeros(3))
    module, inputs = module_and_inputs("linear")
    program = capture(CaptureRequest(module, inputs, "linear")).forward
    device.close()
    device.close()
    uses: list[Callable[[], object]] = [
        lambda: device.alloc(1),
        lambda: device.queue("any"),
        lambda: device.queue("new"),
        lambda: device.compile(program),
        lambda: device.host(),
        lambda: queue.fill(view, 0.0),
        lambda: queue.write(view, torch.ones(3)),
        lambda: queue.read(torch.ones(3), view),
        lambda: queue.copy(view, view),
    ]
    for use in uses:
        with pytest.raises(HalError, match="closed"):
            use()


def test_a_device_can_be_opened_again(device: Device) -> None:
    device.alloc(10)
    device.close()
    with opened(device.info.name) as again:
        assert again.memory().in_use == 0
        assert torch.equal(fetch(again, upload(again, torch.ones(2))), torch.ones(2))


def test_two_devices_have_their_own_memory_and_can_wait_for_each_other(gate: Gate) -> None:
    with opened("cpu:discrete", capacity=100) as limited, opened("cpu:discrete") as other:
        first, second, between = limited.alloc(12), other.alloc(12), torch.empty(3)
        written = limited.queue("any").write(first.view(0, (3,), torch.float32), torch.arange(3.0), [gate.event])
        read = limited.queue("any").read(between, first.view(0, (3,), torch.float32), [written])
        crossed = other.queue("any").write(second.view(0, (3,), torch.float32), between, [read])
        assert not crossed.done()
        gate.open()
        crossed.wait()
        other.alloc(1000)
        assert torch.equal(fetch(other, second.view(0, (3,), torch.float32)), torch.arange(3.0))
        assert (limited.memory().in_use, limited.memory().capacity) == (12, 100)
        assert (other.memory().in_use, other.memory().capacity) == (1012, None)
        limited.close()
        assert torch.equal(fetch(other, second.view(0, (3,), torch.float32)), torch.arange(3.0))


def test_an_unknown_cpu_says_what_there_is() -> None:
    with pytest.raises(Unavailable, match="'cpu' or 'cpu:discrete'"):
        open_device("cpu:unified")


# **** what the probe tells ****


def probe_notes() -> tuple[str, ...]:
    probes = CpuBackend().probe()
    assert [probe.name for probe in probes] == NAMES
    assert len({probe.notes for probe in probes}) == 1
    return probes[0].notes


def test_the_probe_tells_threads_and_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2}, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert probe_notes()[0] == "3 threads on 3 usable cores"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert "set OMP_NUM_THREADS=3" in probe_notes()[0]


@pytest.mark.parametrize("count", [0, 1, 2, 8])
def test_the_probe_tells_numa_nodes_where_there_are_several(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ["online", "possible", *(f"node{number}" for number in range(count))]:
        (tmp_path / name).mkdir()
    monkeypatch.setattr("backends.cpu.NUMA_NODES", tmp_path)
    found = [note for note in probe_notes() if "NUMA" in note]
    assert len(found) == (count > 1)
    for note in found:
        assert note.startswith(f"{count} NUMA nodes")
        assert "numactl" in note


def test_the_probe_tells_how_much_memory_may_be_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    assert "page-locked memory: at most 65.54 kB (`ulimit -l`)" in probe_notes()
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert "page-locked memory: no limit (`ulimit -l`)" in probe_notes()


def test_a_kernel_whose_constants_were_changed_serves_no_other_program(device: Device) -> None:
    """Two layers alike have equal programs, with constants of their own: plain tensors that one may write to."""

    def adding(constant: torch.Tensor) -> Program:
        builder = GraphBuilder("adding")
        return builder.program([builder.call("aten.add.Tensor", builder.input((4,)), builder.constant(constant))])

    of_one, of_other = torch.ones(4), torch.ones(4)
    first, second = adding(of_one), adding(of_other)
    assert first.fingerprint == second.fingerprint
    kernel = device.compile(first)
    assert device.compile(second) is kernel
    of_one.fill_(5.0)
    assert torch.equal(run(device, second, [torch.zeros(4)])[0], torch.ones(4))
    assert device.compile(first) is not device.compile(second)
