"""The page of faults names tests for every row, and they exist."""

import ast
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.support.command_line import load_script

ROOT = Path(__file__).parents[2]
ROWS = [
    line.strip("|").split(" | ")
    for line in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| what"))
]


def defined_in(file: str) -> set[str]:
    """The tests of a file, by its text."""
    tree = ast.parse(next((ROOT / "tests").rglob(file)).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\W+", "-", row[0].strip())[:50])
def test_every_row_names_tests_that_exist(row: list[str]) -> None:
    assert len(row) == 3
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row[2])
    assert named
    assert len(named) == row[2].count("`") // 2, "something else than tests is named"
    missing = [f"{file}::{test}" for file, test in named if test not in defined_in(file)]
    assert not missing


def test_there_is_a_row_for_every_fault() -> None:
    assert len(ROWS) >= 25 + 24


def test_the_benchmark_of_speed_gives_no_figure_of_a_broken_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overhead = load_script(ROOT / "benchmarks" / "overhead.py")
    honest = overhead.plain_step
    monkeypatch.setattr(overhead, "plain_step", lambda *arguments: honest(*arguments) * (1 + 1e-6))
    options = ["--layers", "1", "--hidden", "16", "--sequence", "8", "--samples", "1", "--microbatches", "2"]
    monkeypatch.setattr(sys, "argv", ["overhead.py", *options])
    threads = torch.get_num_threads()
    try:
        with pytest.raises(SystemExit, match="is not plain PyTorch's"):
            overhead.main()
    finally:
        torch.set_num_threads(threads)
    assert "ratio" not in capsys.readouterr().out
