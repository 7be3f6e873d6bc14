"""Every device that needs no accelerator passes the conformance suite, and the suite fails devices that are broken."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hal.known_gaps import KnownGap
from relay.cli import main
from tests.support import devices
from tests.support.processes import ready_processes
from tests.support.stubs import broken_backends

ROOT = Path(__file__).parents[3]
DEVICES: dict[str, list[str]] = {
    "numpy": ["--samples", "1"],
    # Training on these is tested by itself, and each new kernel takes OpenCL's compiler a tenth of a second.
    "cpu:discrete": ["--samples", "1", "--only", "not test_training"],
    "onnx:cpu": ["--samples", "1", "--only", "not test_training"],
    "opencl": ["--only", "not test_ops and not test_training"],
}
THOROUGH: dict[str, list[str]] = {
    "cpu": [],
    "cpu:discrete": ["--samples", "1"],
    "numpy": [],
    "numpy:float64": [],
    "onnx:cpu": [],
    "sim": ["--samples", "1"],
    "sim:generic,order=late,poison=on": ["--only", "not test_ops"],
    "sim:t4": ["--only", "not test_ops"],
    # Each op once, in float32, int64 and bool.
    "opencl": ["--samples", "1", "--only", "not (test_ops and (float64 or float16 or int32))"],
}
"""What `make test-full` asks of devices besides."""
CASES = [
    *(pytest.param(*case, id=case[0]) for case in DEVICES.items()),
    *(pytest.param(*case, id=f"{case[0]}, thorough", marks=pytest.mark.exhaustive) for case in THOROUGH.items()),
]
WITHOUT_FLOAT64 = {"numpy", "sim", "sim:generic,order=late,poison=on"}


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    environment.pop("PYTEST_ADDOPTS", None)
    return ready_processes.run([sys.executable, *words], folder, environment, timeout=900)


def answer(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Standard output must be one JSON object and nothing else."""
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("device", "options"), CASES)
def test_a_device_conforms_and_every_known_gap_still_fails(device: str, options: list[str], tmp_path: Path) -> None:
    devices.require(device)
    words = ["relay", "conformance", device, "--verify-known-gaps", "--json", *options]
    result = run("-m", *words, folder=tmp_path)
    found = answer(result)
    wrong = [(test["test"], test["reason"]) for test in found["tests"] if test["outcome"] == "failed"]
    assert (result.returncode, wrong) == (0, []), result.stderr[-2000:]
    assert found["conforms"]
    assert found["passed"] > (70 if options else 500)
    assert all(test["reason"] for test in found["tests"] if test["outcome"] in ("known gap", "skipped"))
    allowed = {"float64 is not in DeviceInfo.compute"} if device in WITHOUT_FLOAT64 else set()
    skipped = {test["reason"].removeprefix("torch.") for test in found["tests"] if test["outcome"] == "skipped"}
    if device != "opencl":  # whose devices may have no double
        assert skipped <= allowed


COUNTING = """
import json, sys
from backends.numpy_device import NumpyDevice
from relay.cli.conformance import run

def compiled(samples):
    count = 0
    def counting(self, program):
        nonlocal count
        count += 1
        return original(self, program)
    NumpyDevice.compile = counting
    run("numpy", "test_ops and mm.default-float32 and not addmm and not bmm", False, sys.stderr, samples)
    return count

original = NumpyDevice.compile
print(json.dumps([compiled(samples) for samples in (None, 1, 2, 99)]))
"""


def test_as_many_samples_of_an_op_are_tried_as_were_asked_for(tmp_path: Path) -> None:
    result = run("-c", COUNTING, folder=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    of_all, of_1, of_2, of_99 = json.loads(result.stdout)
    assert (of_1, of_2) == (1, 2)
    assert of_99 == of_all > 2


@pytest.mark.slow
def test_the_suite_catches_every_fault_and_a_known_gap_that_passes(tmp_path: Path) -> None:
    result = run(str(ROOT / "tests" / "support" / "stubs" / "broken_backends.py"), folder=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    found = answer(result)
    assert found["exit code"] == 1
    assert "✗ test_transfers.py::test_filling" in found["told"]
    assert "broken:half-fills does not conform" in found["told"]
    failed = found["failed"]
    assert failed.keys() == broken_backends.FAULTS.keys()
    assert failed.pop("none")[0] == 0
    assert failed["closed-gap"] == [1, 10]
    assert failed["writes-early"] == [2, 3], "that a write waits for the host's tasks is right even there"
    assert failed["frees-early"] == [7, 7], "for each kind of call"
    assert [fault for fault, (count, _) in failed.items() if count == 0] == []


def test_pytest_runs_the_suite_when_its_plugin_is_loaded(tmp_path: Path) -> None:
    suite = [
        "-m",
        "pytest",
        "-p",
        "hal.conformance.plugin",
        "--pyargs",
        "hal.conformance",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    result = run(*suite, "--device", "numpy:float64", "-k", "test_order or half_precision", folder=tmp_path)
    assert result.returncode == 0, result.stdout[-2000:]
    assert "2 xfailed" in result.stdout
    nameless = run(*suite, "-k", "test_order", folder=tmp_path)
    assert nameless.returncode != 0
    assert "--device NAME" in nameless.stdout + nameless.stderr


def test_no_other_pytest_run_imports_hal_or_has_its_options(tmp_path: Path) -> None:
    """Where a user's own folder is called hal, their tests import theirs."""
    (tmp_path / "hal").mkdir()
    (tmp_path / "hal" / "__init__.py").write_text("OWNER = 'the user'\n")
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--device')\n")
    (tmp_path / "test_mine.py").write_text(
        "import hal\n\n\ndef test_mine(request):\n"
        "    assert request.config.getoption('device') == 'x'\n    assert hal.OWNER == 'the user'\n"
    )
    result = run("-m", "pytest", "-q", "--device", "x", "-p", "no:cacheprovider", folder=tmp_path)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nonsense"], 1, "no backend is called 'nonsense'"),
        (["numpy:float16"], 1, "no device 'numpy:float16'"),
        ([], 2, "Missing argument"),
        ([" "], 2, "The suite needs a device"),
    ],
)
def test_what_cannot_be_run_is_said_with_its_exit_code(words: list[str], code: int, message: str) -> None:
    result = CliRunner().invoke(main, ["conformance", *words, "--json"])
    assert result.exit_code == code
    assert message in json.loads(result.stdout)["error"]


def test_a_pattern_that_no_test_has_was_asked_wrongly(tmp_path: Path) -> None:
    result = run("-m", "relay", "conformance", "numpy", "--only", "no_test_is_called_so", "--json", folder=tmp_path)
    assert result.returncode == 2
    assert "No test has 'no_test_is_called_so'" in answer(result)["error"]


def test_a_known_gap_has_a_reason_and_brackets_are_themselves() -> None:
    with pytest.raises(ValueError, match="reason"):
        KnownGap("test_ops.py::*", " ")
    known_gap = KnownGap("test_ops.py::*[aten.topk.default-*]", "no sorting network yet", "onnx:*")
    test = "test_ops.py::test_an_op_gives_what_the_oracle_gives[aten.topk.default-float32]"
    assert known_gap.covers(test, "onnx:cpu")
    assert not known_gap.covers(test, "opencl")
    assert not known_gap.covers(test.replace("[", "-").replace("]", "-"), "onnx:cpu")
