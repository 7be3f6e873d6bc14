"""A thousand steps more take no more memory, files or threads, with checkpoints and without."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ready_processes

STREAMING = {"device": "cpu:discrete", "stash": "host", "clip_grad_norm": 1.0}
NARROW = {"precision": "bf16", "state_dtype": "int8"}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("options", "saves"), [({}, False), (STREAMING | NARROW, False), ({}, True), (STREAMING, True)]
)
@pytest.mark.sample("options3-True")
def test_memory_threads_and_files_stay_the_same_over_a_thousand_steps(
    tmp_path: Path, options: dict[str, Any], saves: bool
) -> None:
    figures = ready_processes.run_script("thousand_steps.py", json.dumps(options), str(tmp_path) if saves else "")
    (resident, *before), (resident_after, *after) = figures
    assert after == before
    assert resident_after - resident < 2_000_000
