"""Every benchmark runs: `--quick` ends without an error, prints its figures and writes them with `--json`.

The scripts are found by their names, so one without `--quick` fails here. How fast anything is, no test asserts; what a
benchmark compares with plain PyTorch is asserted to be equal where the benchmark promises it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ready_processes

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)
REQUIRES = {"blocks_on_onnx": "onnxruntime", "partition": "transformers"}


def numbers_in(figures: Any) -> Iterator[float]:
    """Every number of a JSON value; what is true or false is none."""
    if isinstance(figures, dict):
        figures = list(figures.values())
    if isinstance(figures, list):
        for value in figures:
            yield from numbers_in(value)
    elif isinstance(figures, (int, float)) and not isinstance(figures, bool):
        yield figures


def check_gpu(figures: dict[str, Any]) -> None:
    assert not [section for section, found in figures.items() if "failed" in found]
    assert figures["equal, fp32"]["equal"]
    assert figures["equal, bf16"]["equal"]
    assert figures["step"]["losses"]["relay"] == figures["step"]["losses"]["plain"]
    assert figures["attention"]["attention"]
    (row,) = figures["predictions"]["rows"]
    for kind in ("device bytes", "host bytes"):
        measured, predicted = row[kind]
        assert measured == predicted


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {"gpu": check_gpu}
"""What the figures of a benchmark must show besides being there."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_benchmark_runs_in_its_quick_size_and_writes_its_figures(script: Path, tmp_path: Path) -> None:
    if script.stem in REQUIRES and importlib.util.find_spec(REQUIRES[script.stem]) is None:
        pytest.skip(f"needs {REQUIRES[script.stem]}")
    path = tmp_path / "figures.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = ready_processes.run(
        [sys.executable, str(script), "--quick", "--json", str(path)], tmp_path, environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert any(character.isdigit() for character in done.stdout)
    figures = json.loads(path.read_text(encoding="utf-8"))
    numbers = list(numbers_in(figures))
    assert numbers
    assert all(math.isfinite(number) for number in numbers)
    CHECKS.get(script.stem, lambda figures: None)(figures)


def test_there_are_benchmarks_to_run() -> None:
    assert {"overhead", "eps", "gpu"} <= {script.stem for script in SCRIPTS}
