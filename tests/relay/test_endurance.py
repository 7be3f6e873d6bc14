"""A thousand steps more take no more memory, files or threads, with checkpoints and without."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ready_processes

ROOT = Path(__file__).parents[2]
STREAMING = {"device": "cpu:discrete", "stash": "host", "clip_grad_norm": 1.0}
NARROW = {"precision": "bf16", "state_dtype": "int8"}


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("options", "saves"), [({}, False), (STREAMING | NARROW, False), ({}, True), (STREAMING, True)]
)
def test_memory_threads_and_files_stay_the_same_over_a_thousand_steps(
    tmp_path: Path, options: dict[str, Any], saves: bool
) -> None:
    script = str(ROOT / "tests" / "support" / "processes" / "thousand_steps.py")
    words = [sys.executable, script, json.dumps(options), str(tmp_path) if saves else ""]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = ready_processes.run(words, ROOT, environment, timeout=300)
    assert done.returncode == 0, done.stderr
    (resident, *before), (resident_after, *after) = json.loads(done.stdout)
    assert after == before
    assert resident_after - resident < 2_000_000
