"""The backend to copy: built and installed as a stranger's package, it conforms; and it is short."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.processes import packages

TEMPLATE = packages.ROOT / "examples" / "backend_template"


@pytest.mark.slow
def test_the_template_installs_by_itself_and_conforms(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(TEMPLATE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    packages.run(["pip", "install", str(source)], tmp_path, site)
    shutil.rmtree(source)
    words = ["relay", "conformance", "toychip", "--verify-known-gaps", "--json"]
    answer = json.loads(packages.run(words, tmp_path, site))
    assert answer["conforms"]
    assert answer["passed"] > 500
    gaps = [test for test in answer["tests"] if test["outcome"] == "known gap"]
    assert {test["reason"] for test in gaps} == {"the chip has no sorting network"}


def test_the_template_is_under_250_lines() -> None:
    """The pretend driver stands for the vendor's own and is counted apart: with it, empty lines are not."""
    files = {file.name: file.read_text().splitlines() for file in (TEMPLATE / "toychip_backend").glob("*.py")}
    assert set(files) == {"__init__.py", "backend.py", "chip.py", "known_gaps.py"}
    assert sum(len(lines) for name, lines in files.items() if name != "chip.py") < 250
    assert sum(bool(line.strip()) for lines in files.values() for line in lines) < 250
