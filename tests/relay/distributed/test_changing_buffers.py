"""Models whose forward changes buffers on several ranks, against plain PyTorch as DistributedDataParallel runs it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

import relay
from tests.support.ranks.models import Batch, batch, loss, shares
from tests.support.ranks.start import run_ranks

SIZES = (4, 6, 0)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)]


def train(rank: int, count: int, batches: Sequence[Sequence[Batch]], device: str) -> dict[str, torch.Tensor]:
    with relay.Trainer(layers(), loss, optimizer=relay.SGD(lr=0.1), microbatches=2, device=device) as trainer:
        for of_ranks in batches:
            trainer.step(of_ranks[rank])
        return {name: value.clone() for name, value in trainer.state_dict().items()}


def test_buffers_are_those_of_the_batchs_first_rank_and_each_rank_normalizes_its_micro_batches() -> None:
    batches = [shares(batch(step, sum(sizes)), sizes) for step, sizes in enumerate((SIZES, (0, 4, 6), SIZES))]
    results = run_ranks(len(SIZES), train, batches, "cpu:discrete")
    model = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for of_ranks in batches:
        before = {name: value.clone() for name, value in model.named_buffers()}
        after: dict[str, torch.Tensor] = {}
        total, sums = sum(len(inputs) for inputs, _ in of_ranks), []
        for inputs, targets in of_ranks:
            if not len(inputs):
                continue
            model.load_state_dict(before, strict=False)
            model.zero_grad()
            for piece, wanted in zip(inputs.chunk(2), targets.chunk(2), strict=True):
                (loss(model(piece), wanted) * (len(piece) / total)).backward()
            sums.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
            after = after or {name: value.clone() for name, value in model.named_buffers()}
        model.load_state_dict(after, strict=False)
        for parameter, *terms in zip(model.parameters(), *sums, strict=True):
            parameter.grad = sum(terms[1:], terms[0])
        optimizer.step()
    for result in results:
        assert not isinstance(result, str), result
        for name, value in model.state_dict().items():
            torch.testing.assert_close(result[name], value, rtol=1e-5, atol=1e-6)
    for name, value in results[0].items():
        assert all(torch.equal(value, result[name]) for result in results), name
