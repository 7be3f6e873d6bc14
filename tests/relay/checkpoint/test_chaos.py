"""Training processes killed at random moments: every one goes on, and the run ends as if nothing had happened."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.processes import ready_processes

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")


def kill(folder: Path, kills: int, seed: int) -> dict[str, int]:
    script = Path(__file__).parents[2] / "support" / "processes" / "chaos.py"
    words = [sys.executable, str(script), str(folder), str(kills), str(seed)]
    done = ready_processes.run(words, folder, os.environ, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_five_kills_change_nothing(tmp_path: Path) -> None:
    assert kill(tmp_path, 5, 1)["kills"] == 5


@pytest.mark.exhaustive
def test_fifty_kills_change_nothing_also_in_the_middle_of_writing(tmp_path: Path) -> None:
    counted = kill(tmp_path, 50, 2)
    assert counted["kills"] == 50
    assert counted["while_writing"] > 0
