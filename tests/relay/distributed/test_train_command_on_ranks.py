"""`relay train` on several ranks: the losses of one process, one progress bar, one log and one summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.ranks.jobs import run_command
from tests.support.ranks.start import run_ranks

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
