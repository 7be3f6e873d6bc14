"""The option `calibration`: measured rates take the place of a preset's, and the range narrows by what is printed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import relay
from hal.spec import SpecError, machine
from relay.cli import main
from relay.simulation.ranges.software_factors import is_calibrated, kind_of

MODEL = ["--layers", "2", "--hidden", "64", "--vocab", "100", "--seq", "32", "--batch", "2"]
SIZES: dict[str, Any] = {"layers": 2, "hidden": 64, "vocabulary": 100, "seq": 32, "batch": 2}


def measured(value: str) -> dict[str, Any]:
    return {"value": value, "source": "calibrated on 2026-01-01", "verified": True}


@pytest.fixture
def file(tmp_path: Path) -> str:
    """As `relay calibrate` writes it for a card like an RTX 4090, in bf16."""
    watts = {"power_idle": "10W", "power_busy": "65W"}
    rates = {"bandwidth": "900GB/s", "bandwidth_achieved": "900GB/s", "achieved_bf16": "150TFLOPS", "launch": "5us"}
    link = {"peak": "25GB/s", "down": "25GB/s", "up": "24GB/s", "both": "40GB/s", "latency": "9us"}
    host = {"memory": "64GB", "bandwidth": "60GB/s", "bandwidth_achieved": "50GB/s", "optimizer_bandwidth": "30GB/s"}
    tables = {
        "device": {"name": "here", "memory": measured("24GB"), **{k: measured(v) for k, v in rates.items()}, **watts},
        "link": {"name": "here", **{name: measured(value) for name, value in link.items()}},
        "host": {"name": "here", **{name: measured(value) for name, value in host.items()}, **watts},
    }
    path = tmp_path / "here.json"
    path.write_text(json.dumps(tables))
    return str(path)


def run(command: str, *words: str) -> Result:
    return CliRunner().invoke(main, [command, *MODEL, *words])


def test_a_calibration_gives_its_rates_and_a_narrower_range(file: str) -> None:
    before = relay.simulate(**SIZES, device="rtx-4090")
    after = relay.simulate(**SIZES, device="rtx-4090", calibration=file)
    device = after.machine.device
    assert device.sustained("bf16") == 150e12
    assert device["launch"] == 5e-6
    assert device["peak_bf16"] == before.machine.device["peak_bf16"]
    assert device["power_busy"] == before.machine.device["power_busy"]
    assert after.device_capacity == before.device_capacity
    assert (after.machine.link["down"], after.machine.host["memory"]) == (25e9, 64e9)
    assert before.narrowing is None
    assert after.narrowing is not None
    without, width = after.narrowing
    assert width == pytest.approx(after.step_time.width)
    assert width < before.step_time.width
    assert without > width
    alone = relay.simulate(**SIZES, calibration=file)
    assert alone.step_time == relay.simulate(**SIZES, device=file).step_time


def test_the_commands_print_by_how_much_a_calibration_narrows_the_range(file: str, tmp_path: Path) -> None:
    single = run("simulate", "--calibration", file)
    assert single.exit_code == 0, single.stderr
    line = next(line for line in single.stdout.splitlines() if line.startswith("calibration "))
    found = relay.simulate(**SIZES, calibration=file).narrowing
    assert found is not None
    assert line.endswith(f"narrows the range of the step from a factor of {found[0]:.2f} to one of {found[1]:.2f}")
    assert single.stdout.rstrip().endswith("figures         calibrated")
    planned = run("plan", "--slots", "2", "--state-dtype", "fp32", "--calibration", file)
    assert "the calibration narrows the range of the step from a factor of " in planned.stdout
    table = tmp_path / "sweep.csv"
    swept = run("sweep", "--over", "slots=1,2", "--calibration", file, "--no-maps", "--out", str(table), "--json")
    assert swept.exit_code == 0, swept.stderr
    for point in json.loads(swept.stdout)["points"]:
        assert point["step_width_without_calibration"] > point["step_seconds"]["high"] / point["step_seconds"]["low"]


def test_all_that_decides_the_speed_is_measured_or_nothing_is_calibrated(file: str) -> None:
    whole = machine(file)
    assert kind_of(whole, "bf16") == "calibrated"
    for other in (machine(file, link="pcie-4-x16"), machine(file, host="laptop")):
        assert not is_calibrated(other, "bf16")
        found = relay.simulate(**SIZES, device=other)
        assert found.narrowing is None
        assert "figures         calibrated" not in str(found)
    assert not is_calibrated(replace(whole, others=(machine("rtx-4090"),)), "bf16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp16"}, "measured products in bf16, and this run computes in fp16"),
        ({"device": "h100-sxm"}, "measured a device with 2.4e\\+10 bytes"),
        ({"device": "rtx-3090"}, "above the peak_bf16 of NVIDIA GeForce RTX 3090"),
        ({"device": "m2-ultra-76c"}, "a memory of its own"),
        ({"link": "pcie-4-x16"}, "Leave link and host out"),
    ],
)
def test_a_calibration_of_something_else_is_refused(file: str, options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"device": "rtx-4090", **options}
    if "link" in options:
        given.pop("device")
    with pytest.raises((SpecError, ValueError), match=message):
        relay.simulate(**SIZES, **given, calibration=file)


def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path) -> None:
    assert "ends in .json" in run("simulate", "--calibration", "rtx-4090").stderr.replace("\n", " ")
    assert "cannot be read" in run("plan", "--calibration", str(tmp_path / "none.json")).stderr
