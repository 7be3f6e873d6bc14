"""`import relay` refuses another package in place of `hal` or `backends`, imports no torch, and has no `open`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import relay

ROOT = Path(__file__).parents[3]


def import_relay(folder: Path) -> subprocess.CompletedProcess[str]:
    """`import relay` in a process whose own folder comes before Relay's, as with `python script.py`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, "-c", "import relay, sys; print('torch' in sys.modules)"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("package", ["hal", "backends"])
@pytest.mark.parametrize("file", ["__init__.py", ""])
def test_a_folder_that_hides_one_of_our_packages_is_named_in_one_line(package: str, file: str, tmp_path: Path) -> None:
    folder = tmp_path / package
    if file:
        folder.mkdir()
        (folder / file).write_text("")
    else:
        (tmp_path / f"{package}.py").write_text("")
        folder = tmp_path / f"{package}.py"
    result = import_relay(tmp_path)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: Relay's own package '{package}' is hidden by '{folder}'")


def test_a_folder_of_another_name_hides_nothing_and_torch_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "hal_of_mine").mkdir()
    result = import_relay(tmp_path)
    assert (result.returncode, result.stdout.strip()) == (0, "False"), result.stderr


def test_the_public_names_are_those_of_the_package_and_none_of_them_is_open() -> None:
    assert not hasattr(relay, "open")
    assert all(hasattr(relay, name) for name in relay.__all__)
