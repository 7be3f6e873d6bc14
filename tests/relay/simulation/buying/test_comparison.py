"""Machines side by side: what a run costs on each follows from its days, its energy and the prices that were given."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import relay
from relay.cli import main
from relay.simulation.buying.comparison import Row, differences
from relay.simulation.ranges.ranged import Ranged

MODEL = ["--layers", "2", "--hidden", "128", "--vocab", "512", "--seq", "64", "--batch", "2", "--slots", "2"]
TWO = ["--compare", "rtx-4090,t4", "--tokens", "1e9", "--state-dtype", "fp32"]


def plan(*words: str) -> Result:
    return CliRunner().invoke(main, ["plan", *MODEL, *words])


def rows(*words: str) -> dict[str, dict[str, Any]]:
    result = plan(*TWO, *words, "--json")
    assert result.exit_code == 0, result.stderr
    return {row["machine"]: row for row in json.loads(result.stdout)["machines"]}


def test_a_bought_machine_costs_its_days_and_its_power(tmp_path: Path) -> None:
    table, picture = tmp_path / "found.csv", tmp_path / "found.png"
    found = rows(
        "--buy", "rtx-4090=2000,t4=1000", "--years", "2", "--power-price", "0.30/kWh", "--grid", "400g/kWh",
        "--pue", "1.5", "--csv", str(table), "--picture", str(picture),
    )  # fmt: skip
    for name, price in (("rtx-4090", 2000), ("t4", 1000)):
        row = found[name]
        for end in ("low", "middle", "high"):
            power = 1.5 * row["kilowatt_hours"][end]
            assert row["cost"][end] == pytest.approx(price * row["days"][end] / (2 * 365.25) + 0.30 * power)
            assert row["co2_kilograms"][end] == pytest.approx(0.4 * power)
        assert row["days"]["middle"] == pytest.approx(1e9 / row["speed"]["middle"] / 86400)
    assert [row["machine"] for row in csv.DictReader(table.open())] == list(found)
    assert picture.read_bytes().startswith(b"\x89PNG")
    costs = [row["cost"]["middle"] for row in found.values()]
    assert costs == sorted(costs)


def test_rent_is_by_the_hour_and_without_prices_the_fastest_comes_first() -> None:
    rented = rows("--price", "0.5/h")
    for row in rented.values():
        assert row["cost"]["middle"] == pytest.approx(24 * 0.5 * row["days"]["middle"])
        assert row["co2_kilograms"] is None
    speeds = [row["speed"]["middle"] for row in rows().values()]
    assert speeds == sorted(speeds, reverse=True)


def test_chinchilla_is_twenty_tokens_a_parameter_and_a_machine_too_small_comes_last() -> None:
    words = ["--compare", "t4,h200-sxm", "--chinchilla", "--slots", "1", "--state-dtype", "fp32"]
    result = CliRunner().invoke(
        main, ["plan", "--layers", "2", "--hidden", "16384", "--host-memory", "200GB", "--batch", "1", *words, "--json"]
    )
    assert result.exit_code == 0, result.stderr
    fits, small = json.loads(result.stdout)["machines"]
    assert (fits["machine"], small["machine"]) == ("h200-sxm", "t4")
    assert "still lacks" in small["missing"]
    assert small["speed"] is None
    parameters = fits["tokens"] / 20
    assert parameters == int(parameters) > 6e9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--price", "2.5/h"], "--price is for a comparison"),
        ([*TWO, "--device", "t4"], "--device is for one machine"),
        ([*TWO, "--out", "plan.toml"], "--out is for one machine"),
        ([*TWO[:2]], "either --tokens COUNT or --chinchilla"),
        ([*TWO, "--chinchilla"], "either --tokens COUNT or --chinchilla"),
        ([*TWO, "--price", "2.5"], "--price '2.5' is not an amount above zero /h. Write it as 2.5/h"),
        ([*TWO, "--price", "1.2.3/h"], "'1.2.3/h' is not an amount"),
        ([*TWO, "--price", "1e400/h"], "'1e400/h' is not an amount"),
        ([*TWO, "--price", "0/h"], "'0/h' is not an amount"),
        ([*TWO, "--price", "-1/h"], "'-1/h' is not an amount"),
        ([*TWO, "--price", "nan/h"], "'nan/h' is not an amount"),
        ([*TWO, "--buy", "9000/h"], "'9000/h' is not an amount"),
        ([*TWO, "--price", "t4=1/h,t4=2/h"], "--price has two prices for t4"),
        ([*TWO, "--price", "t4=2.5/h"], "--price has no price for rtx-4090"),
        ([*TWO, "--price", "a100=2.5/h"], "'a100', which is not compared. Compared are rtx-4090, t4"),
        ([*TWO, "--price", "1/h", "--buy", "9000"], "Give one"),
        ([*TWO, "--price", "1/h", "--power-price", "0.3/kWh"], "--power-price is for a machine that is bought"),
        ([*TWO, "--price", "1/h", "--years", "2"], "--years is for a machine that is bought"),
        ([*TWO, "--pue", "1.2"], "--power-price or --grid beside it"),
        ([*TWO, "--grid", "400"], "--grid '400' is not an amount above zero g/kWh"),
        (["--compare", "t4,t4", "--tokens", "1e9"], "each machine once"),
        (["--compare", "0xt4,rtx-4090", "--tokens", "1e9"], "'0xt4' has 0 devices"),
        ([*TWO, "--calibration", "here.json"], "--calibration is for one machine"),
        ([*TWO, "--count", "2"], "--count is for one machine"),
        (["--tokens", "1e9"], "--tokens is for a comparison"),
        (["--compare", "t4,nothing", "--tokens", "1e9"], "nothing"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: list[str], message: str) -> None:
    result = plan(*words)
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")


def simulate(*words: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *MODEL, *words])


def test_simulate_compares_machines_at_the_same_settings(tmp_path: Path) -> None:
    table = tmp_path / "found.csv"
    result = simulate(
        "--microbatches", "2", "--precision", "fp16", "--compare", "t4,rtx-4090,2xrtx-4090", "--tokens", "1e9",
        "--price", "t4=.5/h,rtx-4090=1/h,2xrtx-4090=2/h", "--csv", str(table), "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    found = {row["machine"]: row for row in json.loads(result.stdout)["machines"]}
    sizes: dict[str, Any] = {"layers": 2, "hidden": 128, "vocabulary": 512, "seq": 64, "batch": 2, "microbatches": 2}
    for name, device, count, price in (
        ("t4", "t4", 1, 0.5), ("rtx-4090", "rtx-4090", 1, 1.0), ("2xrtx-4090", "rtx-4090", 2, 2.0),
    ):  # fmt: skip
        alone = relay.simulate(**sizes, precision="fp16", device=device, count=count)
        assert found[name]["speed"] == pytest.approx(alone.speed.as_json())
        assert found[name]["cost"]["middle"] == pytest.approx(24 * price * alone.days(1e9).middle)
    assert [row["machine"] for row in csv.DictReader(table.open())] == list(found)


def test_a_machine_without_the_asked_precision_is_a_row_that_gives_the_reason() -> None:
    for command in (plan, simulate):
        result = command("--compare", "v100-sxm2-16gb,rtx-4090", "--precision", "bf16", "--tokens", "1e9")
        assert result.exit_code == 0, result.stderr
        assert result.stdout.startswith("1. rtx-4090: ")
        assert "-. v100-sxm2-16gb: does not run\n   NVIDIA V100 SXM2 16 GB does not compute in bf16" in result.stdout
    nothing = simulate("--compare", "v100-sxm2-16gb,t4", "--precision", "bf16", "--tokens", "1e9")
    assert nothing.exit_code == 1


def test_runs_that_differ_in_precision_or_states_are_said_to() -> None:
    words = ["--compare", "v100-sxm2-16gb,rtx-4090", "--tokens", "1e9"]
    assert "note: The runs differ in precision: rtx-4090 bf16, v100-sxm2-16gb fp16." in simulate(*words).stdout
    assert "differ" not in simulate(*words, "--precision", "fp16").stdout
    rows = [Row(name, speed=Ranged(1, 2, 3), state_dtype=states) for name, states in (("a", "fp32"), ("b", "int8"))]
    assert differences(rows) == [
        "The runs differ in state dtype: a fp32, b int8. --state-dtype VALUE compares like with like."
    ]
