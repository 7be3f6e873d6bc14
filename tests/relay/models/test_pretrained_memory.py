"""A folder is loaded, moved into the store and saved without the host ever holding the model twice."""

from pathlib import Path

import pytest

from tests.support.processes import ready_processes

pytest.importorskip("transformers")
PROCESS = Path("/proc/self/status")


@pytest.mark.skipif(not PROCESS.exists() or "VmData:" not in PROCESS.read_text(), reason="needs Linux's /proc")
def test_loading_and_saving_take_the_ledger_and_one_layer_under_a_hard_limit(tmp_path: Path) -> None:
    found = ready_processes.run_script("pretrained_memory.py", str(tmp_path))
    assert found["refused"], "the limit would have let a second copy of the model pass"
    assert found["weights"] <= found["ledger"] < found["weights"] + 4096
    assert found["saving"] < found["layer"] + (17 << 20)  # files are read back through a buffer of 16 MiB
