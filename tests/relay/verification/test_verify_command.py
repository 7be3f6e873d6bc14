"""`relay train --verify N`: the comparison comes before training, changes nothing of it, and decides the exit code."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from relay.cli import main
from relay.eps.updates.updater import Updater

TINY = ["--layers", "2", "--hidden", "16", "--heads", "2", "--seq", "16", "--batch", "4", "--microbatches", "2"]
TINY += ["--steps", "3", "--no-sample", "--dropout", "0.1"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    return file


def train(text: Path, out: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["train", *TINY, "--data", str(text), "--out", str(out), *options])


def test_a_verified_run_prints_what_was_compared_and_trains_as_an_unverified_one(text: Path, tmp_path: Path) -> None:
    verified = train(text, tmp_path / "one", "--verify", "5", "--json", "--clip-grad-norm", "1")
    plain = train(text, tmp_path / "two", "--json", "--clip-grad-norm", "1")
    assert verified.exit_code == plain.exit_code == 0
    ours, other = json.loads(verified.stdout), json.loads(plain.stdout)
    assert ours["verification"]["equal"]
    assert ours["verification"]["steps"] == 3, "the run has no more"
    assert other["verification"] is None
    assert "Verified: 3 steps on 'cpu'" in verified.stderr
    for name in ("loss_first", "loss_last", "held_out_before", "held_out_after"):
        assert ours[name] == other[name]
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("one", "two")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.sample("True")
def test_a_difference_ends_the_command_with_1_before_training(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    update = Updater.update

    def wrong(server: Any, plan: Any, gradients: Any, groups: Any, *rest: Any) -> None:
        groups = [{**group, "lr": group["lr"] * (1.1 if plan.name == "blocks.1" else 1)} for group in groups]
        update(server, plan, gradients, groups, *rest)

    monkeypatch.setattr(Updater, "update", wrong)
    result = train(text, tmp_path / "out", "--verify", "2", *(["--json"] if as_json else []))
    assert result.exit_code == 1
    assert "Not equal: 1 step on 'cpu'" in result.stderr
    assert "in layer 'blocks.1'" in result.stderr
    assert not (tmp_path / "out" / "model.safetensors").exists()
    if as_json:
        answer = json.loads(result.stdout)
        assert answer["type"] == "NotEqual"
        assert answer["verification"]["first"]["layer"] == "blocks.1"
        assert answer["verification"]["first"]["kind"] == "update"
    else:
        assert result.stdout == ""
