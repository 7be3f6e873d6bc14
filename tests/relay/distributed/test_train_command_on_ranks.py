"""`relay train` on several ranks: the losses of one process, one progress bar, one log and one summary."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import pytest

from tests.support.ranks.jobs import run_command
from tests.support.ranks.start import run_ranks

ROOT = Path(__file__).parents[3]
RUN = (
    "train --layers 2 --hidden 16 --heads 2 --seq 16 --batch 5 --microbatches 1 --steps 3 --no-sample --json "
    "--checkpoint-every 2"
)


def test_two_ranks_train_with_one_log_and_one_summary_and_go_on_from_their_checkpoint(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 40)
    words = [*RUN.split(), "--data", str(text)]
    ((code, alone, _),) = run_ranks(1, run_command, [*words, "--out", str(tmp_path / "alone")])
    assert code == 0
    first, second = run_ranks(2, run_command, [*words, "--out", str(tmp_path / "run")])
    assert first[0] == second[0] == 0, (first, second)
    assert second[1:] == ("", "")
    assert "training:" in first[2]
    expected, found = json.loads(alone), json.loads(first[1])
    for name in ("loss_first", "loss_last", "held_out_before", "held_out_after"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-000000002", "step-000000003",
    ]  # fmt: skip
    ((code, ended, _),) = run_ranks(1, run_command, [*words, "--out", str(tmp_path / "run"), "--resume"])
    assert code == 0
    assert json.loads(ended)["held_out_after"] == pytest.approx(found["held_out_after"], rel=1e-5)


@pytest.mark.exhaustive
def test_torchrun_starts_all_ranks_again_after_one_was_killed_and_the_run_goes_on(tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_bytes(bytes(range(32, 127)) * 40)
    words = ["torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "relay"]
    words[0] = str(Path(sys.executable).parent / "torchrun")
    command = [*words, *RUN.replace("--steps 3", "--steps 60").split(), "--data", str(text), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = monotonic() + 200
        while not (out / "checkpoints" / "step-000000004").exists():
            assert monotonic() < deadline
            assert run.poll() is None
            sleep(0.05)
        os.kill(process_of_rank(1, str(out)), signal.SIGKILL)
        printed, errors = run.communicate(timeout=200)
    finally:
        run.kill()
    assert run.returncode == 0, errors
    assert "rank 1 of 2" in errors
    assert "Continuing after step" in errors
    # The attempt that failed has printed its error.
    assert json.loads(printed.splitlines()[-1])["steps"] == 60


def process_of_rank(rank: int, mark: str) -> int:
    """The process that torchrun started as that rank, by a word of its command line."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                variables = (folder / "environ").read_bytes().split(b"\0")
                if mark.encode() in words and f"RANK={rank}".encode() in variables:
                    return int(folder.name)
    raise AssertionError(f"no process of rank {rank}")
