"""A thousand steps take no more memory, files or threads than ten."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import ready_processes

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize("options", [{}, {"device": "cpu:discrete", "stash": "host", "clip_grad_norm": 1.0}])
def test_a_thousand_steps_with_checkpoints_stay_as_they_began(tmp_path: Path, options: dict[str, Any]) -> None:
    words = [sys.executable, str(ROOT / "tests" / "thousand_steps.py"), str(tmp_path), json.dumps(options)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = ready_processes.run(words, ROOT, environment, timeout=300)
    assert done.returncode == 0, done.stderr
    (memory, files, threads, ledger), after = json.loads(done.stdout)
    assert after[1:] == [files, threads, ledger]
    assert after[0] - memory < 2 * 2**20, f"{after[0] - memory:,} bytes more"
