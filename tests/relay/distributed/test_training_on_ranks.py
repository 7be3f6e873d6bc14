"""Training on several ranks, against plain PyTorch in one process."""

from __future__ import annotations

import functools

import pytest
import torch

import relay
from tests.support.ranks.jobs import train
from tests.support.ranks.models import batch, plain_steps, shares
from tests.support.ranks.start import run_ranks

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.01, fused=True)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
MINE = {"adamw": relay.AdamW(lr=1e-2, weight_decay=0.01), "sgd": relay.SGD(lr=0.1, momentum=0.9)}
THEIRS = {"adamw": ADAMW, "sgd": SGD}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("sizes", "optimizer", "device"),
    [
        ((6, 6), "adamw", "cpu"),
        ((5, 4, 3), "adamw", "cpu:discrete"),
        ((4, 0, 1, 2), "sgd", "cpu:discrete"),
    ],
)
def test_ranks_train_as_plain_pytorch_that_sums_in_rank_order(
    sizes: tuple[int, ...], optimizer: str, device: str
) -> None:
    batches = [shares(batch(step, sum(sizes), masked=step), sizes) for step in range(3)]
    options = {"optimizer": MINE[optimizer], "microbatches": 2, "device": device}
    results = run_ranks(len(sizes), train, batches, options)
    losses, parameters = plain_steps(batches, 2, THEIRS[optimizer])
    for result in results:
        assert not isinstance(result, str), result
        assert result["losses"] == losses
        assert_equal(result["parameters"], parameters)


@pytest.mark.parametrize("defer", [False, True])
def test_clipping_by_norm_is_plain_pytorchs_to_rounding_and_equal_on_all_ranks(defer: bool) -> None:
    sizes = (5, 3)
    batches = [shares(batch(step, sum(sizes)), sizes) for step in range(4)]
    options = {"optimizer": MINE["adamw"], "microbatches": 2, "clip_grad_norm": 0.5, "defer_updates": defer}
    results = run_ranks(2, train, batches, options)
    norms: list[torch.Tensor] = []

    def clip(gradients: list[torch.Tensor]) -> torch.Tensor:
        norms.append(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients])))
        return torch.clamp(0.5 / (norms[-1] + 1e-6), max=1.0)

    losses, parameters = plain_steps(batches, 2, ADAMW, clip)
    for result in results:
        assert not isinstance(result, str), result
        assert result["losses"] == pytest.approx(losses, rel=1e-6)
        assert result["norms"] == pytest.approx([float(norm) for norm in norms], rel=1e-6)
        for name, value in parameters.items():
            assert torch.allclose(result["parameters"][name], value, rtol=1e-5, atol=1e-6), name
    assert results[0]["norms"] == results[1]["norms"]
    assert_equal(results[0]["parameters"], results[1]["parameters"])
