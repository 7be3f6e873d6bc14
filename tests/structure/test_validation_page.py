"""docs/validation.md is the page that benchmarks/validate_literature.py writes, and leaves no published row out."""

import re
from pathlib import Path
from typing import Any

import pytest

from relay.simulation.ranges.software_factors import FACTORS
from tests.support.command_line import load_script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")


def benchmark() -> Any:
    return load_script(ROOT / "benchmarks" / "validate_literature.py")


def printed(case: str) -> float:
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {case} |"))
    return float(line.split("|")[4])


def test_every_published_row_is_on_the_page() -> None:
    missing = [case for case in benchmark().rows_of_data() if f"| {case} |" not in PAGE and f"* {case}:" not in PAGE]
    assert not missing


@pytest.mark.parametrize("title", ["Adam on two Xeon 8168", "DeepBench matrix products on V100"])
def test_predictions_without_a_factor_are_those_of_the_simulator_as_it_is(title: str) -> None:
    module = benchmark()
    family, published = next(found for found in module.FAMILIES if found.title == title), module.rows_of_data()
    for case in family.rows:
        assert printed(case) == pytest.approx(family.simulate(published[case]).seconds, rel=0.001)


def test_a_prediction_with_its_familys_factor_is_that_of_the_simulator_as_it_is() -> None:
    section = PAGE.split("## llm.c on eight A100")[1]
    factor = float(re.search(r"Factor ([0-9.]+)\.", section).group(1))  # type: ignore[union-attr]
    module = benchmark()
    family = next(found for found in module.FAMILIES if found.title.startswith("llm.c"))
    found = family.simulate(module.rows_of_data()["gpt2-350m-a100"])
    assert printed("gpt2-350m-a100") == pytest.approx(1 / found.speed(factor), rel=0.01)


def test_the_printed_ranges_of_software_are_those_of_the_page() -> None:
    for kind in ("eager", "compiled", "fused"):
        row = "eager" if kind == "compiled" else kind  # no published row is of compiled software
        line = next(line for line in PAGE.splitlines() if line.startswith(f"| {row} |"))
        low, middle, high = (float(cell) for cell in line.split("|")[2:5])
        compute = FACTORS[kind].compute
        assert (compute.low, compute.middle, compute.high) == pytest.approx((low, middle, high), abs=0.011)


def test_a_range_without_the_family_holds_nine_rows_in_ten_and_errors_with_one_row_are_small() -> None:
    mean = re.search(r"mean error \*\*([0-9.]+)%\*\*", PAGE)
    held = re.search(r"rows \(\*\*([0-9.]+)%\*\*\)", PAGE)
    assert mean is not None
    assert held is not None
    assert float(mean.group(1)) <= 10
    assert float(held.group(1)) >= 90


def test_the_window_of_a_factor_of_two_weighs_families_alike_and_leaves_an_outlier_out() -> None:
    low, middle, high = benchmark().window({"one": [0.9, 1.0, 1.1], "other": [0.8], "outlier": [0.1, 0.1]})
    assert high == pytest.approx(2 * low)
    assert low < 0.8 < 1.1 < high
    assert low <= middle <= high
