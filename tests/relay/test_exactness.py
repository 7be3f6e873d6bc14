"""The relay's losses and parameters are those of plain PyTorch doing the same micro-batches, to the last bit."""

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from relay.models.gpt import cross_entropy
from tests.support import reference
from tests.support.zoo.plain_models import Build, gpt, regression, same_perceptrons

STEPS = 20


@functools.cache
def plainly_trained(whole: bool) -> tuple[list[float], dict[str, Tensor]]:
    model = gpt(12)
    batches = reference.text_batches(STEPS, batch=10)
    if whole:
        losses = reference.train(model, batches)
        return losses, reference.state_of(model)
    losses = reference.train(model.as_list(), reference.as_pairs(batches), loss=cross_entropy)
    return losses, reference.state_of(model.as_list())


STASHES = [("device", "cpu"), ("host", "cpu:discrete"), ("host", "cpu"), ("device", "cpu:discrete")]
TWENTY_STEPS = [
    (*form, *pair)  # every pair of options; `test_parity_matrix.py` has them beside all others
    for form, pairs in [
        (("whole", 1), STASHES[:2]), (("list", 2), STASHES[:2]),
        (("whole", 2), STASHES[2:]), (("whole", 4), STASHES[2:]),
    ]
    for pair in pairs
]  # fmt: skip


@pytest.mark.parametrize(("form", "slots", "stash", "device"), TWENTY_STEPS)
@pytest.mark.sample("list-2-host-cpu:discrete", "whole-4-host-cpu")
def test_twenty_adamw_steps_of_a_gpt_with_a_ragged_last_piece_are_equal_to_the_last_bit(
    build: Build, form: str, slots: int, stash: str, device: str
) -> None:
    whole = form == "whole"
    losses, state = plainly_trained(whole)
    options = {"stash": stash, "slots": slots, "device": device, "microbatches": 4}
    batches = reference.text_batches(STEPS, batch=10)  # 10 sequences: pieces of 3, 3, 3 and 1
    if whole:
        trainer = build(gpt(12), **options)
        ours = [trainer.step(batch).loss for batch in batches]
    else:
        trainer = build(gpt(12).as_list(), loss=cross_entropy, **options)
        ours = [trainer.step(pair).loss for pair in reference.as_pairs(batches)]
    assert ours == losses
    reference.assert_same_state(trainer.state_dict(), state)


# **** how pieces are weighted ****


def masked_batches(steps: int) -> list[dict[str, Tensor]]:
    batches = reference.text_batches(steps, batch=10)
    for batch in batches:
        for row in range(len(batch["labels"])):
            batch["labels"][row, : (5 * row) % 12] = reference.IGNORED  # another number in each piece
    return batches


@pytest.mark.parametrize("form", ["whole", "list"])
def test_pieces_are_weighted_by_their_unmasked_targets(build: Build, form: str) -> None:
    model, plain = gpt(2), gpt(2)
    batches = masked_batches(6)
    losses = reference.train(plain, batches, shares=reference.by_targets)
    assert losses != reference.train(gpt(2), batches, shares=reference.by_samples)
    if form == "whole":
        trainer = build(model)
        assert [trainer.step(batch).loss for batch in batches] == losses
    else:
        trainer = build(model.as_list(), loss=cross_entropy)
        assert [trainer.step(pair).loss for pair in reference.as_pairs(batches)] == losses
    reference.assert_same_state(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("masked", [slice(0, 3), slice(3, 6), slice(9, 10)], ids=["first", "second", "last"])
def test_a_piece_that_is_all_masked_adds_nothing(build: Build, masked: slice) -> None:
    model, plain = gpt(2), gpt(2)
    batches = masked_batches(3)
    batches[1]["labels"][masked] = reference.IGNORED
    losses = reference.train(plain, batches, shares=reference.by_targets)
    trainer = build(model)
    assert [trainer.step(batch).loss for batch in batches] == losses
    reference.assert_same_state(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_regression_with_a_ragged_last_piece_is_equal(build: Build, stash: str) -> None:
    ours, plain = same_perceptrons()
    batches = [regression(10, seed) for seed in range(10)]
    losses = reference.train(plain, batches, loss=nn.functional.mse_loss)
    trainer = build(ours, loss=nn.functional.mse_loss, stash=stash)
    assert [trainer.step(batch).loss for batch in batches] == losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


# **** state that is not a trained parameter ****


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.parametrize("slots", [1, 2])
def test_running_statistics_of_batchnorm_change_once_a_piece(build: Build, device: str, slots: int) -> None:
    ours, plain = same_perceptrons(functools.partial(nn.BatchNorm1d, 8))
    batches = [regression(12, seed) for seed in range(5)]
    losses = reference.train(plain, batches, loss=nn.functional.mse_loss)
    trainer = build(ours, loss=nn.functional.mse_loss, device=device, slots=slots)
    assert [trainer.step(batch).loss for batch in batches] == losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))
    assert int(trainer.state_dict()["1.1.num_batches_tracked"]) == 5 * 4


def test_batchnorm_in_the_segment_of_the_loss_changes_once_a_piece(build: Build) -> None:
    ours, plain = same_perceptrons()
    for modules in (ours, plain):
        torch.manual_seed(1)
        modules[-1] = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))
    batches = [regression(12, seed) for seed in range(3)]
    losses = reference.train(plain, batches, loss=nn.functional.mse_loss)
    trainer = build(ours, loss=nn.functional.mse_loss)
    assert [trainer.step(batch).loss for batch in batches] == losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


def optimizer_bytes(trainer: relay.Trainer) -> int:
    return sum(size for state, _, size in trainer.ledger.rows() if state in ("first moments", "second moments"))


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.parametrize("frozen", ["embedding", "blocks.1", "blocks.2.feed_in.weight", "head"])
@pytest.mark.sample("embedding-cpu", "blocks.2.feed_in.weight-cpu:discrete")
def test_frozen_parameters_stay_and_cost_no_optimizer_state(build: Build, frozen: str, device: str) -> None:
    model, plain = gpt(3), gpt(3)
    for changed in (model, plain):
        for name, parameter in changed.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
    before = reference.copy_of(model.state_dict())
    batches = reference.text_batches(4)
    losses = reference.train(plain, batches)
    trainer = build(model, device=device)
    assert [trainer.step(batch).loss for batch in batches] == losses
    reference.assert_same_state(model.state_dict(), plain.state_dict())
    trained = 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name]) == name.startswith(frozen)
        trained += 0 if name.startswith(frozen) else parameter.numel()
    assert optimizer_bytes(trainer) == 2 * 4 * trained


def test_parameters_may_be_unfrozen_between_steps(build: Build) -> None:
    model, plain = gpt(3), gpt(3)
    batches = reference.text_batches(4)
    for changed in (model, plain):
        changed.blocks[1].feed_in.weight.requires_grad_(False)
    trainer = build(model)
    stepper = reference.adamw(list(plain.parameters()))
    for number, batch in enumerate(batches):
        if number == 2:
            for changed in (model, plain):
                changed.blocks[1].feed_in.weight.requires_grad_(True)
        stepper.zero_grad()
        pieces = reference.cut(batch, 4)
        loss = reference.gradients_of(reference.caller(plain, None), pieces, reference.by_samples(pieces))
        stepper.step()
        assert trainer.step(batch).loss == loss
    reference.assert_same_state(model.state_dict(), plain.state_dict())


class Idle(nn.Module):
    """A layer with a parameter that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, value: Tensor) -> Tensor:
        return self.used(value).relu()


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
def test_an_unused_parameter_is_left_alone_as_pytorch_does(build: Build, device: str) -> None:
    torch.manual_seed(0)
    ours = [nn.Linear(6, 8), Idle(), Idle(), nn.Linear(8, 3)]
    plain = copy.deepcopy(ours)
    batches = [regression(10, seed) for seed in range(4)]
    losses = reference.train(plain, batches, loss=nn.functional.mse_loss)
    trainer = build(ours, loss=nn.functional.mse_loss, device=device)
    assert [trainer.step(batch).loss for batch in batches] == losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))
    assert torch.equal(trainer.state_dict()["1.unused"], torch.ones(5))


# **** optimizers and learning rates ****


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * 0.9**step)


@pytest.mark.parametrize(
    "torch_optimizer", [None, functools.partial(torch.optim.SGD, lr=0.05)], ids=["AdamW", "torch.optim.SGD"]
)
def test_a_learning_rate_scheduler_works_on_the_trainers_optimizer(build: Build, torch_optimizer: Any) -> None:
    ours, plain = same_perceptrons()
    batches = [regression(10, seed) for seed in range(8)]
    losses = reference.train(
        plain,
        batches,
        loss=nn.functional.mse_loss,
        optimizer=torch_optimizer or reference.adamw,
        schedule=warm_up,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = {} if torch_optimizer is None else {"optimizer": torch_optimizer}
        trainer = build(ours, loss=nn.functional.mse_loss, **options)
        scheduler = warm_up(trainer.optimizer)
        found = []
        for batch in batches:
            found.append(trainer.step(batch).loss)
            scheduler.step()
    assert found == losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
        functools.partial(torch.optim.Adam, lr=0.01),
        functools.partial(torch.optim.RMSprop, lr=0.001),
    ],
    ids=["SGD with momentum", "Adam", "RMSprop"],
)
@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.sample(3)
def test_any_torch_optimizer_trains_as_it_does_in_pytorch(build: Build, optimizer: Any, device: str) -> None:
    ours, plain = same_perceptrons()
    batches = [regression(10, seed) for seed in range(8)]
    losses = reference.train(plain, batches, loss=nn.functional.mse_loss, optimizer=optimizer)
    trainer = build(ours, loss=nn.functional.mse_loss, optimizer=optimizer, device=device)
    assert [trainer.step(batch).loss for batch in batches] == losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.sample(3)
def test_the_gradient_norm_is_that_of_the_plain_gradients(build: Build, device: str, tied: bool) -> None:
    model, plain = gpt(3, tied=tied), gpt(3, tied=tied)
    batches = reference.text_batches(3)
    trainer = build(model, device=device)
    for batch in batches:
        expected = reference.gradient_norm(plain, batch, 4)
        assert trainer.step(batch).grad_norm == pytest.approx(expected, rel=1e-6)
        plain.load_state_dict(model.state_dict())


# **** shapes ****


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.sample("host")
def test_batches_may_change_their_shape_from_step_to_step(build: Build, stash: str) -> None:
    model, plain = gpt(3), gpt(3)
    shapes = [(8, 12), (10, 12), (5, 7), (4, 1), (8, 12), (11, 3)]
    batches = [reference.text_batches(1, *shape, seed=number)[0] for number, shape in enumerate(shapes)]
    losses = reference.train(plain, batches)
    trainer = build(model, stash=stash)
    assert [trainer.step(batch).loss for batch in batches] == losses
    reference.assert_same_state(model.state_dict(), plain.state_dict())


def test_a_batch_need_not_be_contiguous(build: Build) -> None:
    model, plain = gpt(2), gpt(2)
    text = torch.randint(0, 64, (13, 10), generator=torch.Generator().manual_seed(0)).T
    batch = {"input_ids": text[:, :-1], "labels": text[:, 1:]}
    losses = reference.train(plain, [batch, batch])
    trainer = build(model, device="cpu:discrete")
    assert [trainer.step(batch).loss for _ in range(2)] == losses


def test_the_batch_is_not_changed(build: Build) -> None:
    batch = masked_batches(1)[0]
    copied = {name: tensor.clone() for name, tensor in batch.items()}
    build(gpt(2)).step(batch)
    assert all(torch.equal(batch[name], copied[name]) for name in batch)
