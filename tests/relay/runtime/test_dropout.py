"""Dropout: the recompute draws the masks of the forward, and masks depend on the seed and on nothing else."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from hal.random import RandomKey, keep_mask
from relay.models import GPT
from tests.support import reference
from tests.support.zoo.plain_models import Build

DROP = 0.1
WIDTH = 8


def gpt(dropout: float = DROP, layers: int = 2) -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=32, layers=layers, hidden=16, heads=2, sequence=12, tied=False, dropout=dropout)


class Noisy(nn.Module):
    """A layer that drops twice. Given masks it applies those, as plain PyTorch that knows them would."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.4)
        self.masks: list[Tensor] = []

    def forward(self, value: Tensor) -> Tensor:
        wide = self.dropped(torch.tanh(self.first(value)), 0)
        return value + self.dropped(self.second(wide), 1)

    def dropped(self, value: Tensor, number: int) -> Tensor:
        if not self.masks:
            return self.drop(value)
        return value * self.masks[number] * (1 / (1 - self.drop.p))


def noisy_list() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Noisy(), Noisy(), Noisy(), nn.Linear(WIDTH, 2)]


def some_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(10, WIDTH, generator=generator), torch.randn(10, 2, generator=generator)) for _ in range(count)
    ]


def train_with_explicit_masks(modules: list[nn.Module], batches: list[Any], seed: int, microbatches: int = 4) -> None:
    """Plain PyTorch with SGD and the masks of (seed, step, layer, micro-batch, dropout within the layer)."""
    optimizer = torch.optim.SGD(nn.Sequential(*modules).parameters(), lr=1.0)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        pieces = reference.cut(batch, microbatches)
        for number, (piece, share) in enumerate(zip(pieces, reference.by_samples(pieces), strict=True)):
            for index, module in enumerate(modules):
                if isinstance(module, Noisy):
                    key, shape = RandomKey(seed, step, index, number), piece[0].shape
                    module.masks = [keep_mask(key, op, shape, module.drop.p) for op in range(2)]
            (reference.call_list(modules, nn.functional.mse_loss, piece) * share).backward()
        optimizer.step()


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.sample(3)
def test_gradients_are_those_of_one_mask_in_forward_and_recompute(build: Build, stash: str, device: str) -> None:
    ours, plain = noisy_list(), noisy_list()
    batches = some_batches(3)
    train_with_explicit_masks(plain, batches, seed=11)
    optimizer = functools.partial(torch.optim.SGD, lr=1.0)
    options = {"loss": nn.functional.mse_loss, "optimizer": optimizer, "stash": stash, "device": device}
    trainer = build(ours, seed=11, **options)
    for batch in batches:
        trainer.step(batch)
    for name, expected in reference.state_of(plain).items():
        torch.testing.assert_close(trainer.state_dict()[name], expected, rtol=1e-5, atol=1e-6)


def losses_of(trainer: relay.Trainer, steps: int = 4) -> list[float]:
    return [trainer.step(batch).loss for batch in reference.text_batches(steps, 8, vocabulary=32)]


def test_one_seed_gives_one_run_and_another_seed_another(build: Build) -> None:
    first, again, other = (build(gpt(), seed=seed) for seed in (3, 3, 4))
    losses = losses_of(first)
    assert losses_of(again) == losses
    assert losses_of(other) != losses
    reference.assert_same_state(again.state_dict(), first.state_dict())


@pytest.mark.parametrize(
    "options",
    [{"stash": "host"}, {"slots": 1}, {"slots": 4}, {"device": "cpu:discrete"}],
    ids=["host stash", "one slot", "four slots", "discrete device"],
)
@pytest.mark.sample(3)
def test_where_things_are_kept_does_not_change_the_masks(build: Build, options: dict[str, Any]) -> None:
    plain, other = build(gpt()), build(gpt(), **options)
    assert losses_of(other) == losses_of(plain)
    reference.assert_same_state(other.state_dict(), plain.state_dict())


def test_the_global_generator_of_torch_is_neither_used_nor_moved(build: Build) -> None:
    first, again = build(gpt()), build(gpt())
    losses = losses_of(first)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert losses_of(again) == losses
    assert torch.equal(torch.get_rng_state(), before)


def test_every_step_and_every_piece_draws_another_mask(build: Build) -> None:
    still = functools.partial(torch.optim.SGD, lr=0.0)
    batch = some_batches(1)[0]
    trainer = build(noisy_list(), loss=nn.functional.mse_loss, optimizer=still, microbatches=1)
    assert len({trainer.step(batch).loss for _ in range(5)}) == 5
    repeated = tuple(tensor[:1].repeat(4, 1) for tensor in batch)
    together = build(noisy_list(), loss=nn.functional.mse_loss, optimizer=still, microbatches=4)
    alone = build(noisy_list(), loss=nn.functional.mse_loss, optimizer=still, microbatches=1)
    first_piece = alone.step(tuple(tensor[:1] for tensor in batch)).loss
    assert together.step(repeated).loss != pytest.approx(first_piece, rel=1e-4)


def test_segments_that_drop_nothing_draw_nothing(build: Build) -> None:
    still = Noisy()
    still.drop.p = 0.0
    layers = [nn.Linear(WIDTH, WIDTH), Noisy(), still, nn.Linear(WIDTH, 2)]
    trainer = build(layers, loss=nn.functional.mse_loss)
    trainer.step(some_batches(1)[0])
    compiled = next(iter(trainer._compiler.cache)).stages
    drawn = [[p.program.draws for p in (stage.forward, stage.backward) if p is not None] for stage in compiled]
    assert drawn == [[False, False], [True, True], [False, False], [False]]


def test_evaluation_drops_nothing(build: Build) -> None:
    trainer = build(gpt(0.5))
    batch = reference.text_batches(1, 8, vocabulary=32)[0]
    plain = gpt(0.0)
    assert trainer.evaluate(batch).loss == pytest.approx(plain(**batch).loss.item(), rel=1e-6)
    assert trainer.evaluate(batch).loss == trainer.evaluate(batch).loss


def test_the_loss_falls_as_plain_pytorchs_does(build: Build) -> None:
    batches = reference.text_batches(1, 8, vocabulary=32) * 60
    faster = functools.partial(torch.optim.AdamW, lr=3e-3, fused=True)
    torch.manual_seed(1)
    model = gpt()
    plain = reference.train(model, batches, optimizer=faster)
    trainer = build(gpt(), optimizer=relay.AdamW(lr=3e-3))
    ours = [trainer.step(batch).loss for batch in batches]
    fallen = plain[0] - sum(plain[-5:]) / 5
    assert fallen > 0.5
    assert ours[0] - sum(ours[-5:]) / 5 == pytest.approx(fallen, rel=0.15)
