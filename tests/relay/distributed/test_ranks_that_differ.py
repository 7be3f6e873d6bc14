"""What goes wrong on one rank is raised on all of them, with its cause; and no rank waits for ever."""

from __future__ import annotations

from pathlib import Path
from time import monotonic, sleep

import pytest
from torch import nn

from relay.distributed.compare_ranks import describe, refuse_differences
from relay.errors import RanksDiffer
from relay.options import TrainOptions
from tests.support.ranks.jobs import evaluate_unevenly, misbehave, train_until_killed
from tests.support.ranks.start import Ranks, run_ranks


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("options", ["RanksDiffer", "microbatches", "has 2", "has 1"]),
        ("unknown option", ["microbatch", "Did you mean"]),
        ("model", ["RanksDiffer", "0.weight", "checksum"]),
        ("learning rate", ["RanksDiffer", "hyperparameters", "0.2"]),
        ("batch", ["rank 1 of 2", "BatchError"]),
        ("device", ["the network card is on fire"]),
        ("calls", ["RanksDiffer", "calls step", "calls save"]),
        ("loss", ["NonFiniteLoss"]),
        ("loss of all", ["all of its targets are masked"]),
    ],
)
@pytest.mark.sample(2)
def test_an_error_on_one_rank_is_raised_on_all(what: str, named: list[str]) -> None:
    errors = run_ranks(2, misbehave, what)
    for error in errors:
        for word in named:
            if not (word.startswith("rank 1") and error is errors[1]):
                assert word in error, (what, errors)


def test_a_rank_with_more_layers_differs_in_the_model_not_in_its_parameter_groups() -> None:
    models = [nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers))) for layers in (2, 3)]
    for parameter in (parameter for model in models for parameter in model.parameters()):
        nn.init.zeros_(parameter)
    records = [describe(model, TrainOptions(), [{"params": list(model.parameters())}]) for model in models]
    with pytest.raises(RanksDiffer, match=r"in the model, in '2\.weight'"):
        refuse_differences(records, ["rank 0", "rank 1"])


def test_ranks_may_evaluate_different_numbers_of_batches() -> None:
    results = run_ranks(3, evaluate_unevenly)
    assert not any(isinstance(result, str) for result in results), results
    first, second, third = results
    assert (len(first), len(second), len(third)) == (5, 5, 5)
    # The first evaluation is of all ranks, the third of rank 2 alone.
    assert first[0] == second[0] == third[0]
    assert second[1] == third[1] != third[2]
    assert first[1] == second[2] == third[3]
    assert first[2] == second[3] == third[4]


@pytest.mark.parametrize(
    ("count", "killed", "steps"),
    [
        pytest.param(3, 1, 2),
        *(pytest.param(2 + run % 3, run % (2 + run % 3), 1 + run, marks=pytest.mark.exhaustive) for run in range(20)),
    ],
)
def test_a_killed_rank_ends_the_others_within_30_seconds_with_its_name(
    count: int, killed: int, steps: int, tmp_path: Path
) -> None:
    ranks = Ranks(count, train_until_killed, str(tmp_path))
    deadline = monotonic() + 90
    while not (tmp_path / str(steps)).exists():
        assert monotonic() < deadline
        sleep(0.002)
    sleep(0.003 * killed)  # at different moments of a step
    ranks.kill(killed)
    results = ranks.results(longest=30)
    assert results[killed] is None
    for rank, error in enumerate(results):
        if rank != killed:
            assert error.startswith(f"RankLost: rank {killed} of {count}"), results
            assert ".cc" not in error, "the text of gloo names lines of its source"
