"""Losses that do not add up over the shares of ranks, against plain PyTorch on the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.ranks.losses import LOSSES, train_losses, train_unequal_lengths
from tests.support.ranks.models import batch, layers
from tests.support.ranks.start import run_ranks


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ((3, 2), ("two counts", "the length, before the sum")),
        pytest.param((3, 0, 2), tuple(LOSSES), marks=pytest.mark.exhaustive),
    ],
)
def test_terms_that_count_differently_and_values_of_the_whole_batch_are_those_of_all_ranks(
    sizes: tuple[int, ...], names: tuple[str, ...]
) -> None:
    masked = 2
    results = run_ranks(len(sizes), train_losses, names, sizes, masked)
    for name, loss in ((name, LOSSES[name]) for name in names):
        model = nn.Sequential(*layers())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs, targets = batch(0, sum(sizes), masked)
        expected = loss(model(inputs), targets)
        expected.backward()
        optimizer.step()
        inputs, targets = batch(1, 5)
        evaluated = float(loss(model(inputs), targets).detach())
        for result in results:
            assert not isinstance(result, str), result
            assert result[name][0] == pytest.approx(float(expected.detach()), rel=1e-6), name
            refused = "Every target of one of the loss's terms is masked" in result[name][3]
            assert refused is (name in ("two counts", "both")), name
            torch.testing.assert_close(result[name][2], model.state_dict()["0.weight"], rtol=1e-5, atol=1e-6)
        evaluating = results[-1][name][1]
        assert evaluating == pytest.approx(evaluated, rel=1e-5), name


def test_shares_that_cannot_be_joined_for_a_value_of_the_whole_batch_are_refused_on_all_ranks() -> None:
    errors = run_ranks(2, train_unequal_lengths)
    assert errors[0] == errors[1]
    for words in ("float32[2, 3, 8]", "float32[2, 4, 8]", "rank 1 of 2", "Pad all shares"):
        assert words in errors[0], errors[0]
