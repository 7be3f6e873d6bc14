"""A process ends when its script does, whatever was left open: on every device, well or badly, and with what was asked.

Each test is one process (`unclosed`) that forks a child for each way to end.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from relay.checkpoint.format import Checkpoint
from tests.support.devices import probes

SCRIPT = Path(__file__).parents[2] / "support" / "processes" / "unclosed.py"
LOST = ("failing to save", "failing unseen")
TRAINING = ("cpu", "cpu:discrete")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_script_that_closes_nothing_ends_as_it_would_have(tmp_path: Path) -> None:
    queueing = [probe.name for probe in probes() if probe.available]
    command = [sys.executable, str(SCRIPT), str(tmp_path), ",".join(TRAINING), ",".join(queueing)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    expected = {"end": 0, "raise": 1, "exit": 3, "stored exception": 0, "saving": 0}
    assert json.loads(ran.stdout) == expected | dict.fromkeys(LOST, 0), ran.stderr
    assert "RuntimeError: the script failed" in ran.stderr
    assert "Exception ignored" not in ran.stderr
    Checkpoint(tmp_path / "checkpoint").verify()  # which was still being written when the script ended
    for name in LOST:
        assert ran.stderr.count(f"relay: the checkpoint {str(tmp_path / name)!r} was not written. CheckpointError") == 1
    assert "File too large" in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]  # and nothing half written
