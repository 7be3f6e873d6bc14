"""Machines side by side: what a run costs on each follows from its days, its energy and the prices that were given."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from relay.cli import main

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
        ([*TWO, "--price", "2.5"], "--price '2.5' is not an amount /h. Write it as 2.5/h"),
        ([*TWO, "--price", "t4=2.5/h"], "--price has no price for rtx-4090"),
        ([*TWO, "--price", "a100=2.5/h"], "'a100', which is not compared. Compared are rtx-4090, t4"),
        ([*TWO, "--price", "1/h", "--buy", "9000"], "Give one"),
        ([*TWO, "--price", "1/h", "--power-price", "0.3/kWh"], "--power-price is for a machine that is bought"),
        ([*TWO, "--price", "1/h", "--years", "2"], "--years is for a machine that is bought"),
        ([*TWO, "--pue", "1.2"], "--power-price or --grid beside it"),
        ([*TWO, "--grid", "400"], "--grid '400' is not an amount g/kWh"),
        (["--compare", "t4,t4", "--tokens", "1e9"], "each machine once"),
        (["--compare", "t4,nothing", "--tokens", "1e9"], "nothing"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: list[str], message: str) -> None:
    result = plan(*words)
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")
