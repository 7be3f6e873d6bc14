"""Checkpoints that several ranks write: read by as many, by fewer, and by one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import relay
from relay.checkpoint.format import Checkpoint
from tests.support.ranks.jobs import load_state, resume_by_state_dicts, save_each_step, train_and_save
from tests.support.ranks.models import batch, layers, loss, shares
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


@pytest.mark.parametrize(
    "options",
    [
        {**OPTIONS, **SPLIT, "clip_grad_norm": 0.1, "defer_updates": True},
        pytest.param(OPTIONS, marks=pytest.mark.exhaustive),
        pytest.param({**OPTIONS, "optimizer": relay.Muon(lr=1e-2)}, marks=pytest.mark.exhaustive),
        pytest.param({**OPTIONS, "state_dtype": "int8"}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_checkpoint_that_ranks_write_while_they_train_on_is_that_of_its_step(
    options: dict[str, object], tmp_path: Path
) -> None:
    assert run_ranks(2, save_each_step, BATCHES, options, str(tmp_path)) == [True, True]
    for step in range(1, len(BATCHES) + 1):
        expected, found = (Checkpoint(tmp_path / kind / str(step)) for kind in ("waiting", "background"))
        assert found.manifest.step == step
        for name in expected.manifest.parameters:
            assert torch.equal(found.weight(name), expected.weight(name)), (step, name)
            states = expected.state(name)
            assert set(found.state(name)) == set(states)
            for label, value in states.items():
                other = found.state(name)[label]
                pairs = (
                    [(other, value)]
                    if isinstance(value, torch.Tensor)
                    else [(other.codes, value.codes), (other.scales, value.scales)]
                )
                assert all(torch.equal(*pair) for pair in pairs), (step, name, label)


@pytest.mark.parametrize("more", [{}, pytest.param({"state_dtype": "bf16"}, marks=pytest.mark.exhaustive)])
def test_every_rank_gets_the_optimizers_whole_state_in_torchs_form_and_a_run_goes_on_from_it(
    more: dict[str, str],
) -> None:
    batches = [shares(batch(step, 4), (2, 2)) for step in range(4)]
    options = {**OPTIONS, **more, "microbatches": 1}
    first, second = run_ranks(2, resume_by_state_dicts, batches, options)
    for _, resumed, whole, problem in (first, second):
        assert "differ in the states of the optimizer" in problem
        for name, value in whole.items():
            assert torch.equal(resumed[name], value), name
    if more:
        return
    model = nn.Sequential(*layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for of_ranks in batches[:2]:
        optimizer.zero_grad()
        for inputs, targets in of_ranks:
            (loss(model(inputs), targets) / 2).backward()
        optimizer.step()
    expected = optimizer.state_dict()["state"]
    for state, *_ in (first, second):
        assert set(state["state"]) == set(expected)
        for index, values in expected.items():
            for label, value in values.items():
                torch.testing.assert_close(state["state"][index][label], value, rtol=1e-4, atol=1e-6)
        fresh = torch.optim.AdamW(model.parameters(), lr=1.0)
        fresh.load_state_dict(state)
        assert fresh.param_groups[0]["lr"] == 1e-2
