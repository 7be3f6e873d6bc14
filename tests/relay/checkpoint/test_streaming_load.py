"""A checkpoint is read tensor by tensor into what is there already: resuming needs no second copy of it."""

from pathlib import Path

import pytest

from tests.support.processes import ready_processes

PROCESS = Path("/proc/self/status")


@pytest.mark.skipif(not PROCESS.exists() or "RssAnon:" not in PROCESS.read_text(), reason="needs Linux's /proc")
def test_a_checkpoint_is_loaded_without_holding_it_a_second_time(tmp_path: Path) -> None:
    found = ready_processes.run_script("streaming_load.py", str(tmp_path))
    assert found["size"] > 100_000_000
    assert found["peak"] < found["size"] / 4
