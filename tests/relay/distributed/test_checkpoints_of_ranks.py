"""Checkpoints that several ranks write: read by as many, by fewer, and by one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import relay
from relay.checkpoint.format import Checkpoint
from tests.support.ranks.jobs import load_state, train_and_save
from tests.support.ranks.models import batch, shares
from tests.support.ranks.start import run_ranks

OPTIONS = {"optimizer": relay.AdamW(lr=1e-2), "microbatches": 2}
SPLIT = {"precision": "bf16", "master_weights": "split"}
SIZES = (3, 2, 3)
BATCHES = [shares(batch(step, sum(SIZES)), SIZES) for step in range(5)]


@pytest.mark.parametrize("more", [{}, pytest.param(SPLIT, marks=pytest.mark.exhaustive)])
def test_a_run_resumes_exactly_at_the_same_number_and_its_state_is_exact_at_another(
    more: dict[str, str], tmp_path: Path
) -> None:
    options = {**OPTIONS, **more}
    whole = run_ranks(3, train_and_save, BATCHES, options, str(tmp_path / "whole"), 5)
    run_ranks(3, train_and_save, BATCHES, options, str(tmp_path / "cut"), 3)
    resumed = run_ranks(3, train_and_save, BATCHES, options, str(tmp_path / "cut"), 5)
    assert [len(result["losses"]) for result in resumed] == [2, 2, 2]
    for result, same in zip(resumed, whole, strict=True):
        assert result["losses"] == same["losses"][3:]
        for name, value in same["parameters"].items():
            assert torch.equal(result["parameters"][name], value), name
    last = tmp_path / "cut" / "step-000000005"
    expected = Checkpoint(last)
    for count in (2, 1):
        assert run_ranks(count, load_state, options, str(last), str(tmp_path / f"of-{count}")) == [5] * count
        found = Checkpoint(tmp_path / f"of-{count}")
        for name in expected.manifest.parameters:
            assert torch.equal(found.weight(name), expected.weight(name)), name
            states = expected.state(name)
            assert set(found.state(name)) == set(states) == {"step", "exp_avg", "exp_avg_sq"}
            for label, value in states.items():
                assert torch.equal(found.state(name)[label], value), (name, label)
