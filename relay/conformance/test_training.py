"""Twenty steps of training through the relay on the device under test, against the same twenty on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from hal.conformance.plugin import device_name
from relay.models import GPT

STEPS = 20
WIDTH = 24


class Block(nn.Module):
    """The feed-forward half of a transformer layer, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(3 * WIDTH, WIDTH),
        )
        self.dropout = nn.Dropout(0.2)

    def forward(self, stream: Tensor) -> Tensor:
        return stream + self.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm(stream)))))


def losses(device: str, which: str, optimizer: str, stash: str) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(11)
    generator = torch.Generator().manual_seed(12)
    spec = relay.SGD(lr=0.05) if optimizer == "sgd" else relay.AdamW(lr=1e-3, weight_decay=0.01)
    batches: Sequence[Any]
    if which == "gpt":
        model = GPT(vocabulary=32, sequence=8, layers=3, hidden=16, heads=2, dropout=0.0, tied=True)
        tokens = torch.randint(0, 32, (STEPS, 5, 9), generator=generator)
        batches = [{"input_ids": step[:, :-1], "labels": step[:, 1:]} for step in tokens]
        trainer = relay.Trainer(model, device=device, optimizer=spec, microbatches=2, stash=stash, seed=3)
    else:
        modules = [Block() for _ in range(3)]
        numbers = torch.randn(STEPS, 2, 6, WIDTH, generator=generator)
        batches = [(step[0], step[1]) for step in numbers]
        loss = nn.functional.mse_loss
        trainer = relay.Trainer(modules, loss, device=device, optimizer=spec, microbatches=2, stash=stash, seed=3)
    with closing(trainer):
        return [trainer.step(batch).loss for batch in batches]


@pytest.mark.parametrize(
    ("which", "optimizer", "stash", "within"),
    [
        ("gpt", "sgd", "device", 1e-5),
        ("blocks with dropout", "sgd", "host", 1e-5),
        ("blocks with dropout", "adamw", "device", 1e-3),
    ],
)
def test_twenty_steps_are_those_of_the_cpu(
    request: pytest.FixtureRequest, which: str, optimizer: str, stash: str, within: float
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums on the CPU depend on the number of threads
    try:
        ours = losses(device_name(request.config), which, optimizer, stash)
        theirs = losses("cpu", which, optimizer, "device")
    finally:
        torch.set_num_threads(threads)
    assert theirs[0] != theirs[-1]
    assert max(abs(our - their) / abs(their) for our, their in zip(ours, theirs, strict=True)) <= within


def test_an_index_outside_of_its_domain_is_an_error_before_the_step_and_the_device_goes_on(
    request: pytest.FixtureRequest,
) -> None:
    torch.manual_seed(11)
    layers = [nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 4)]
    loss = nn.functional.cross_entropy
    trainer = relay.Trainer(layers, loss, device=device_name(request.config), microbatches=1)
    right = (torch.tensor([1, 9]), torch.tensor([0, 3]))
    with closing(trainer):
        trainer.step(right)
        for tokens, classes in (([1, 10], [0, 3]), ([1, -1], [0, 3]), ([1, 9], [0, 4]), ([1, 2_000_000_000], [0, 3])):
            with pytest.raises(IndexError, match="indexes with"):
                trainer.step((torch.tensor(tokens), torch.tensor(classes)))
        trainer.step(right)
