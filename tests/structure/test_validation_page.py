"""docs/validation.md is the page that benchmarks/validate_literature.py writes, and leaves no published row out."""

import csv
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")


def benchmark() -> Any:
    path = ROOT / "benchmarks" / "validate_literature.py"
    found = importlib.util.spec_from_file_location("validate_literature", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["validate_literature"] = module
    found.loader.exec_module(module)
    return module


def rows() -> dict[str, dict[str, str]]:
    with (ROOT / "benchmarks" / "data" / "validation.csv").open(encoding="utf-8") as file:
        return {row["case"]: row for row in csv.DictReader(file)}


def printed(case: str) -> float:
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {case} |"))
    return float(line.split("|")[4])


def test_every_published_row_is_on_the_page() -> None:
    missing = [case for case in rows() if f"| {case} |" not in PAGE and f"* {case}:" not in PAGE]
    assert not missing


@pytest.mark.parametrize("title", ["Adam on two Xeon 8168", "DeepBench matrix products on V100"])
def test_predictions_without_a_factor_are_those_of_the_simulator_as_it_is(title: str) -> None:
    family = next(found for found in benchmark().FAMILIES if found.title == title)
    published = rows()
    for case in family.rows:
        assert printed(case) == pytest.approx(family.predict(published[case], 1.0), rel=0.001)


def test_a_prediction_with_its_familys_factor_is_that_of_the_simulator_as_it_is() -> None:
    section = PAGE.split("## llm.c on eight A100")[1]
    factor = float(re.search(r"Factor ([0-9.]+)\.", section).group(1))  # type: ignore[union-attr]
    family = next(found for found in benchmark().FAMILIES if found.title.startswith("llm.c"))
    assert printed("gpt2-350m-a100") == pytest.approx(family.predict(rows()["gpt2-350m-a100"], factor), rel=0.01)


def test_the_mean_error_of_predicted_rows_is_under_twenty_per_cent() -> None:
    found = re.search(r"mean error\s+\*\*([0-9.]+)%\*\*", PAGE)
    assert found is not None
    assert float(found.group(1)) < 20
