"""`relay calibrate`: any device here becomes a description that the simulator takes, and no half of one is left."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hal.program import Program
from hal.spec import COLUMNS
from relay.cli import main
from relay.simulation import calibrate
from relay.simulation.described.transformer_shape import ModelShape, compiled_model_of


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which a calibration says little and takes no time."""
    monkeypatch.setattr(calibrate, "SHAPES", ((64, 32, 2), (96, 32, 1)))
    monkeypatch.setattr(calibrate, "LARGE", ())
    monkeypatch.setattr(calibrate, "CHUNK", 2**20)
    monkeypatch.setattr(calibrate, "REPEATS", 1)


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize("device", ["cpu:discrete", "numpy", "onnx:cpu"])
@pytest.mark.sample(2)
def test_what_it_writes_of_any_device_the_simulator_takes(tmp_path: Path, device: str) -> None:
    if device.startswith("onnx"):
        pytest.importorskip("onnxruntime")
    path = tmp_path / "here.json"
    measured = invoke("calibrate", "--device", device, "--out", path, "--json")
    assert measured.exit_code == 0, measured.output
    assert json.loads(measured.stdout)["file"] == str(path)
    shape = ("--layers", 2, "--hidden", 64, "--vocab", 100, "--seq", 32)
    found = invoke("simulate", *shape, "--precision", "fp32", "--device", path, "--json")
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)
    assert answer["tier"] == "calibrated"
    assert answer["step_seconds"]["low"] > 0
    if device == "cpu:discrete":
        elsewhere = invoke(
            "simulate", *shape, "--precision", "fp32", "--device", path, "--link", "pcie-3-x16", "--host", "laptop"
        )
        assert elsewhere.exit_code == 0, elsewhere.output


@pytest.mark.parametrize("failure", [OSError("no space left"), KeyboardInterrupt()])
def test_a_calibration_that_does_not_get_to_its_end_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    path = tmp_path / "here.json"
    path.write_text("what was there")

    def fail(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(Path, "replace" if isinstance(failure, OSError) else "write_text", fail)
    assert invoke("calibrate", "--out", path).exit_code != 0
    monkeypatch.undo()
    assert path.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("out", ["nowhere/here.json", "here.txt"])
def test_a_place_that_cannot_be_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.setattr(calibrate, "calibrate", None)
    result = invoke("calibrate", "--out", tmp_path / out)
    assert result.exit_code == 2
    assert "ends in .json" in result.output


@given(seconds=st.lists(st.floats(1e-6, 1.0), min_size=6, max_size=6))
@example(seconds=[1.0, 1e-06, 0.3125, 1e-06, 0.625, 1.0])  # leaves next to no time to arithmetic
@settings(max_examples=60, deadline=None)
def test_whatever_is_measured_the_constants_are_some_that_a_device_may_have(seconds: list[float]) -> None:
    constants = calibrate.fit(kernels(), seconds)
    assert 0.01 <= constants["attention"] <= 1
    rates = COLUMNS["device"]["achieved_fp32"]
    assert rates.low <= constants["rate"] <= rates.high
    assert all(constants[name] >= 0 for name in ("call", "launch", "ramp"))
    assert all(type(value) is float for value in constants.values())  # as a description takes them


@functools.cache
def kernels() -> list[Program]:
    found = []
    for hidden in (32, 96):
        compiled = compiled_model_of(ModelShape(2, hidden, 2, 64), 2, 32, torch.float32).stages
        passes = [compiled[1].forward, compiled[1].backward, compiled[-1].backward]
        found += [stage_program.program for stage_program in passes if stage_program is not None]
    return found
