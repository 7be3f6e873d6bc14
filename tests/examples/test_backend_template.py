"""The backend to copy, as `relay new-backend` writes it from the wheel: it conforms, and it is short."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from relay.authoring.new_backend import write_backend
from relay.cli import main
from tests.support.processes import packages

TEMPLATE = packages.ROOT / "examples" / "backend_template"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which Relay is installed from its wheel, which is built from a copy of the checkout."""
    source, site = (tmp_path_factory.mktemp(name) for name in ("source", "site"))
    for name in ("hal", "backends", "relay", "docs", "examples"):
        shutil.copytree(packages.ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(packages.ROOT / name, source / name)
    packages.run(["pip", "install", str(source)], source, site)
    shutil.rmtree(source)
    return site


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--samples", "1", "--only", "not test_training"], pytest.param([], marks=pytest.mark.exhaustive)]
)
def test_a_new_backend_conforms_at_once_from_the_wheel_alone(wheel: Path, tmp_path: Path, options: list[str]) -> None:
    where = packages.run(["python", "-c", "import relay; print(relay.__file__)"], tmp_path, wheel)
    assert where.startswith(str(wheel))
    answer = json.loads(packages.run(["relay", "new-backend", "chip_two", "--no-install", "--json"], tmp_path, wheel))
    assert answer["files"][0] == "GUIDE.md"
    packages.run(["pip", "install", str(tmp_path / "chip_two")], tmp_path, wheel)
    shutil.rmtree(tmp_path / "chip_two" / "chip_two_backend")
    words = ["relay", "conformance", "chip_two", "--verify-known-gaps", "--report", "report.md", "--json", *options]
    answer = json.loads(packages.run(words, tmp_path, wheel))
    assert answer["conforms"]
    assert answer["passed"] > 500
    gaps = [test for test in answer["tests"] if test["outcome"] == "known gap"]
    assert {test["reason"] for test in gaps} == {"the chip has no sorting network"}
    report = (tmp_path / "report.md").read_text()
    assert ("conforms: " in report) == (not options)
    assert ("left out the rest" in report) == bool(options)
    assert f"- {len(gaps)} tests: the chip has no sorting network" in report
    assert "GFLOP/s" in report


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("My-Chip", "small letters"), ("2chip", "a letter first"), ("", "small letters"), ("chip\n", "small letters"),
        ("numpy", "is installed already"), ("x" * 41, "at most 40"), ("relay", "Choose another name"),
    ],
)  # fmt: skip
def test_a_name_that_cannot_be_a_backends_is_refused_and_nothing_is_written(
    name: str, why: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(main, ["new-backend", name, "--into", str(tmp_path)])
    assert result.exit_code == 1
    assert why in str(result.output)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "chip").mkdir()
    (tmp_path / "chip" / "mine.py").write_text("my own")
    result = CliRunner().invoke(main, ["new-backend", "chip", "--into", str(tmp_path)])
    assert result.exit_code == 1
    assert "exists" in result.output
    assert [file.name for file in (tmp_path / "chip").iterdir()] == ["mine.py"]


def test_a_package_that_pip_refuses_stays_and_the_error_shows_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_RETRIES", "none")  # a configuration that pip refuses
    result = CliRunner().invoke(main, ["new-backend", "chip", "--into", str(tmp_path)])
    assert result.exit_code == 1
    assert f"pip install --no-deps -e {tmp_path / 'chip'}" in result.output
    assert (tmp_path / "chip" / "chip_backend" / "backend.py").exists()


def test_nothing_of_the_template_keeps_the_toys_name(tmp_path: Path) -> None:
    folder = write_backend("quad_core", tmp_path)
    texts = {file: file.read_text() for file in folder.rglob("*") if file.is_file() and file.name != "GUIDE.md"}
    assert len(texts) == 6
    assert not [file for file, text in texts.items() if "toy" in f"{file.name}{text}".lower()]
    assert "class QuadCoreDevice(Device)" in texts[folder / "quad_core_backend" / "backend.py"]
    assert "](../" not in (folder / "GUIDE.md").read_text()


def test_the_template_is_under_250_lines() -> None:
    """The pretend driver stands for the vendor's own and is counted apart: with it, empty lines are not."""
    files = {file.name: file.read_text().splitlines() for file in (TEMPLATE / "toychip_backend").glob("*.py")}
    assert set(files) == {"__init__.py", "backend.py", "chip.py", "known_gaps.py"}
    assert sum(len(lines) for name, lines in files.items() if name != "chip.py") < 250
    assert sum(bool(line.strip()) for lines in files.values() for line in lines) < 250
