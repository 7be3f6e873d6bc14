"""The parts of benchmarks/gpu.py that its quick run on the CPU does not reach: a mistake would cost the GPU's time."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from backends.torch_device.device import TorchDevice
from hal import registry
from tests.support.command_line import load_script
from tests.support.stubs.stub_accelerator import StubAccelerator

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    return load_script(BENCHMARKS / "gpu.py")


def test_a_trace_of_a_step_is_written_where_one_is_asked_for(gpu: ModuleType, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    assert gpu.main(["--quick", "--trace", str(trace), "--only", "step"]) == 0
    assert json.loads(trace.read_text(encoding="utf-8"))


def test_recorded_launches_are_compared_where_the_device_records(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = StubAccelerator()
    monkeypatch.setattr(
        registry,
        "open",
        lambda name, capacity=None: TorchDevice(name, stub, capacity, record=not name.endswith("plain")),
    )
    found = gpu.run_here("recorded launches", gpu.Setting("stub:0", True, None))
    assert "failed" not in found, found
    assert stub.recorded > 0
    assert found["ratio"] > 0


def test_a_section_that_fails_does_not_stop_the_others(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(setting: object) -> dict[str, object]:
        raise ArithmeticError("wrong")

    monkeypatch.setitem(gpu.SECTIONS, "attention", gpu.SECTIONS["attention"].__class__(fail, 25))
    path = tmp_path / "gpu.json"
    words = ["--quick", "--json", str(path), "--only", "attention", "copies, GB/s"]
    assert gpu.main(words) == 1
    results = json.loads(path.read_text(encoding="utf-8"))
    assert "ArithmeticError: wrong" in results["attention"]["failed"]
    assert results["copies, GB/s"]["down, page-locked"] > 0


def test_a_section_runs_in_a_process_of_its_own_and_is_ended_when_its_time_is_up(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpu.json"
    section = gpu.SECTIONS["recorded launches"]
    monkeypatch.setitem(gpu.SECTIONS, "recorded launches", section.__class__(section.run, 900))  # on a busy machine
    words = ["--device", "cpu", "--seconds", "1000", "--json", str(path), "--only", "recorded launches"]
    assert gpu.main(words) == 0
    assert json.loads(path.read_text(encoding="utf-8"))["recorded launches"]["not here"]
    section = gpu.SECTIONS["step"]
    monkeypatch.setitem(gpu.SECTIONS, "step", section.__class__(section.run, 0.2))
    assert gpu.main(["--device", "cpu", "--json", str(path), "--only", "step"]) == 1
    assert "not done after" in json.loads(path.read_text(encoding="utf-8"))["step"]["failed"]
