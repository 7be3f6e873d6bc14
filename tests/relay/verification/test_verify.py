"""`trainer.verify`: right steps are found equal to plain PyTorch's, wrong ones are named, and the run stays as it was.

The comparison itself is the reference here, so its power is what is tested: each kind of number that can be wrong in a
step is made wrong in one place, and the report must name that place.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import relay
from hal.errors import OutOfMemory
from relay.eps.updates.updater import Updater
from relay.models import GPT
from relay.models.gpt import cross_entropy
from relay.runtime import run_step
from tests.support import devices, reference
from tests.support.zoo.odd_layers import Dropping
from tests.support.zoo.plain_models import (
    Build,
    Stack,
    batches,
    everything,
    gpt,
    perceptron,
    regression,
)

mse = nn.functional.mse_loss


def text(steps: int = 3) -> list[dict[str, Tensor]]:
    return reference.text_batches(steps)


# **** what is equal ****

TORCH_SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1)

SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "one micro-batch": {"microbatches": 1},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "fp16, fixed scale": {"precision": "fp16", "loss_scale": 1024.0},
    "clipped": {"clip_grad_norm": 0.05, "clip_grad_value": 2e-3},
    "merged layers": {"layers_per_slot": 2, "recompute": False, "stash": "host", "device": "cpu:discrete"},
    "Adam": {"optimizer": relay.Adam(lr=2e-3, weight_decay=0.1, amsgrad=True)},
    "SGD": {"optimizer": relay.SGD(lr=0.05, momentum=0.9, dampening=0.1)},
    "torch.optim": {"optimizer": TORCH_SGD},
    "groups": {"param_groups": [{"params": "*norm*", "weight_decay": 0.0}, {"params": "blocks.1.*", "lr": 1e-2}]},
    "simulator": {"device": "sim"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.sample("one micro-batch", "fp16", "merged layers", "simulator")
def test_a_gpt_with_dropout_is_equal_to_plain_pytorch_to_the_bit(build: Build, settings: dict[str, Any]) -> None:
    trainer = build(gpt(layers=2, dropout=0.2), seed=5, **settings)
    first = trainer.verify(text())
    trainer.step(text()[0])  # and from optimizer states that are not new
    later = trainer.verify(text())
    for found in (first, later):
        assert found.equal, str(found)
        assert (found.steps, found.tolerance, found.loose, found.first) == (3, 0.0, "", None)
        assert "to the last bit" in str(found)
        assert "every parameter after its update" in found.compared


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.sample("fp32")
def test_tied_weights_are_compared_to_the_bit_unless_their_order_is_given_up(build: Build, precision: str) -> None:
    found = build(gpt(layers=2, tied=True, dropout=0.1), precision=precision).verify(text())
    assert found.equal, str(found)
    assert (found.tolerance, found.loose) == (0, "")
    loose = build(gpt(layers=2, tied=True), precision=precision, exact_ties=False).verify(text(2))
    assert loose.equal, str(loose)
    assert 0 < loose.tolerance <= 1e-5
    assert loose.loose == "gradients of tied weights: embedding.token.weight"


def test_a_list_of_modules_is_compared_with_its_dropout_and_buffers(build: Build) -> None:
    def noisy() -> nn.Module:
        return nn.Sequential(nn.Dropout(0.3), nn.BatchNorm1d(8))

    trainer = build(perceptron(noisy), loss=mse, clip_grad_norm=0.5, microbatches=3)  # of 4, 4 and 2 samples
    dropped = trainer.verify([regression(seed=seed) for seed in (1, 2)])
    assert dropped.equal, str(dropped)
    as_list = build(gpt(layers=2, dropout=0.2).as_list(), loss=cross_entropy, seed=2)
    assert as_list.verify(reference.as_pairs(text(2))).equal


@pytest.mark.parametrize("weights", [None, [0.75, 0.25]])
def test_steps_of_pieces_of_their_own_shapes_are_compared(build: Build, weights: list[float] | None) -> None:
    trainer = build(gpt(layers=2, dropout=0.2), seed=5)
    steps = [[batch, {name: tensor[:1, :7] for name, tensor in batch.items()}] for batch in text(2)]
    found = trainer.verify(steps, as_pieces=True, weights=weights)
    assert found.equal, str(found)
    assert (found.steps, found.tolerance) == (2, 0.0)
    with pytest.raises(TypeError, match="as_pieces=True"):
        trainer.verify(text(1), weights=[1.0])


class Recurrent(nn.Module):
    """It runs eagerly, and draws from PyTorch's generator inside of PyTorch's own kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(8, 8, num_layers=2, dropout=0.4, batch_first=True)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.inner(value)[0]


@pytest.mark.parametrize("block", [Dropping, Recurrent])
@pytest.mark.sample("Dropping")
def test_other_draws_and_layers_that_run_eagerly_are_given_the_relays_numbers(
    build: Build, block: Callable[[], nn.Module]
) -> None:
    torch.manual_seed(0)
    found = build(Stack(block), seed=4, microbatches=2).verify(batches(2))
    assert found.equal, str(found)


@pytest.mark.parametrize("device", ["numpy", "opencl"])
@pytest.mark.sample("numpy")
def test_a_device_without_pytorch_is_compared_with_the_cpu_to_rounding(build: Build, device: str) -> None:
    devices.require(device)
    trainer = build(gpt(layers=2, dropout=0.1), device=device, microbatches=2)
    found = trainer.verify(text(2))
    assert found.equal, str(found)
    assert (found.tolerance, found.plain_device) == (1e-4, "cpu")
    assert "another device" in found.loose
    assert found.device == trainer.device_name


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"optimizer": relay.Lion()}, "Lion"), ({"state_dtype": "int8"}, "AdamW with state_dtype='int8'")],
    ids=["Lion", "int8"],
)
def test_updates_that_torch_does_not_have_are_left_out_by_name(
    build: Build, settings: dict[str, Any], named: str
) -> None:
    found = build(gpt(layers=2, dropout=0.1), **settings).verify(text())
    assert found.equal, str(found)
    assert f"Not compared: the updates of {named}" in found.compared
    assert "every parameter" not in str(found)


def test_a_step_that_overflows_in_fp16_is_skipped_in_both(build: Build) -> None:
    trainer = build(gpt(layers=2), precision="fp16")
    trainer.prepare(text()[0])
    trainer._scale.value = 2.0**40
    before = everything(trainer)
    found = trainer.verify(text(2))
    assert found.equal, str(found)
    assert trainer.loss_scale == 2.0**40
    after = everything(trainer)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


# **** what is wrong is named ****


def test_a_dropped_gradient_of_one_micro_batch_is_named(build: Build) -> None:
    trainer = build(gpt(layers=3, dropout=0.1))
    trainer.prepare(text()[0])
    for compiled in trainer._compiler.cache:
        for stage in compiled.stages:
            if stage.segment.name == "blocks.1":
                stage.backward.later = stage.backward.first  # the last micro-batch's alone is left
    found = trainer.verify(text())
    assert not found.equal
    assert found.first is not None
    assert (found.steps, found.first.step, found.first.layer, found.first.kind) == (1, 0, "blocks.1", "gradient")
    assert found.first.tensor.startswith("blocks.1.")
    assert found.first.magnitude > 0
    assert found.differing == len(list(trainer._model.blocks[1].parameters()))
    assert "step 0: in layer 'blocks.1' the gradient of 'blocks.1." in str(found)


@pytest.mark.parametrize("tied", [False, True])
def test_a_wrong_learning_rate_of_one_layer_is_named(build: Build, monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    update = Updater.update

    def wrong(server: Any, plan: Any, gradients: Any, groups: Any, *rest: Any) -> None:
        if plan.name == "blocks.1":
            groups = [{**group, "lr": group["lr"] * 1.001} for group in groups]
        update(server, plan, gradients, groups, *rest)

    trainer = build(gpt(layers=2, tied=tied))
    assert trainer.verify(text(1)).equal
    monkeypatch.setattr(Updater, "update", wrong)
    found = trainer.verify(text())
    assert found.first is not None
    assert (found.first.layer, found.first.kind) == ("blocks.1", "update")
    assert found.first.magnitude < 1e-4


def test_other_masks_than_the_promised_ones_are_seen_in_the_loss(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    step = run_step.train_step

    def wrong(session: Any, prepared: Any, inputs: Any, weights: Any, groups: Any, seed: int, *rest: Any) -> Any:
        return step(session, prepared, inputs, weights, groups, seed + 1, *rest)

    monkeypatch.setattr(run_step, "train_step", wrong)
    found = build(gpt(layers=2, dropout=0.2)).verify(text())
    assert found.first is not None
    assert (found.first.step, found.first.kind, found.first.tensor) == (0, "loss", "loss")


def test_a_parameter_that_is_not_updated_is_named(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Updater.update

    def forgets(server: Any, plan: Any, *rest: Any) -> None:
        if plan.name != "blocks.0":
            update(server, plan, *rest)

    monkeypatch.setattr(Updater, "update", forgets)
    found = build(gpt(layers=2)).verify(text())
    assert found.first is not None
    assert (found.first.layer, found.first.kind) == ("blocks.0", "missing gradient")


def test_statistics_that_are_not_written_back_are_named(build: Build) -> None:
    trainer = build(perceptron(lambda: nn.BatchNorm1d(8)), loss=mse, microbatches=2)
    batch = regression()
    trainer.prepare(batch)
    step = trainer._one_step

    def loses(*arguments: Any) -> Any:
        with torch.no_grad():
            before = trainer._model[2][1].running_mean.clone()
            metrics = step(*arguments)
            trainer._model[2][1].running_mean.copy_(before)
        return metrics

    trainer._one_step = loses  # type: ignore[method-assign]
    found = trainer.verify([batch])
    assert found.first is not None
    assert (found.first.layer, found.first.tensor, found.first.kind) == ("2", "2.1.running_mean", "buffer")


# **** the run stays as it was ****


class Counted:
    """Batches with a position, as a loader that can be resumed has one."""

    def __init__(self, given: list[Any]) -> None:
        self.given = given
        self.position = 0

    def __iter__(self) -> Any:
        while self.position < len(self.given):
            self.position += 1
            yield self.given[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "fp16", "clip_grad_norm": 0.1},
        {"optimizer": relay.SGD(lr=0.1, momentum=0.9, dampening=0.5)},
        {"optimizer": functools.partial(torch.optim.Adagrad, lr=0.05)},
        {"state_dtype": "int8", "precision": "bf16", "device": "cpu:discrete"},
    ],
    ids=["fp16", "SGD", "torch.optim", "int8"],
)
@pytest.mark.sample("SGD")
def test_a_run_that_was_verified_goes_on_as_one_that_was_not(build: Build, settings: dict[str, Any]) -> None:
    def train(verifying: bool) -> tuple[list[float], dict[str, Tensor], list[float]]:
        trainer = build(gpt(layers=2, dropout=0.2), seed=7, **settings)
        scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, gamma=0.5)
        called: list[int] = []
        trainer.optimizer.register_step_post_hook(lambda *_: called.append(trainer.steps))
        data = Counted(text(8))
        losses, rates = [], []
        for number, batch in enumerate(data):
            if verifying and number in (0, 2):
                generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
                assert trainer.verify(data, steps=2).equal
                assert torch.equal(torch.get_rng_state(), generators[0])
                assert (random.getstate(), np.random.get_state()[1].tolist()) == generators[1:]
            losses.append(trainer.step(batch).loss)
            scheduler.step()
            rates.append(trainer.param_groups[0]["lr"])
            if number == 4:
                break
        assert (trainer.steps, data.position, called) == (5, 5, [1, 2, 3, 4, 5])
        return losses, everything(trainer), rates

    losses, state, rates = train(False)
    verified_losses, verified_state, verified_rates = train(True)
    assert (verified_losses, verified_rates) == (losses, rates)
    assert list(verified_state) == list(state)
    assert all(torch.equal(verified_state[name], tensor) for name, tensor in state.items())


def test_the_learning_rates_of_a_schedule_are_taken_and_forgotten(build: Build) -> None:
    trainer = build(gpt(layers=2), optimizer=relay.AdamW(lr=1e-3))
    asked: list[int] = []

    def rate(step: int) -> float:
        asked.append(step)
        return 1e-2 / (step + 1)

    assert trainer.verify(text(), learning_rate=rate).equal
    assert set(asked) == {0, 1, 2}
    assert trainer.param_groups[0]["lr"] == 1e-3


def test_a_step_that_fails_in_the_comparison_leaves_the_run_as_it_was(build: Build) -> None:
    ours, other = build(Stack()), build(Stack())
    other.sync_to(ours._model)
    good, bad = batches(2)
    bad["inputs"] = bad["inputs"] * float("nan")
    with pytest.raises(relay.NonFiniteLoss):
        ours.verify([good, bad])
    assert ours.steps == 0
    assert ours.step(good).loss == other.step(good).loss
    reference.assert_same_state(ours.state_dict(), other.state_dict())


# **** what is refused ****


def test_too_little_host_memory_is_refused_with_the_bytes_before_anything_is_copied(build: Build) -> None:
    needed = build(gpt(layers=2))
    needed.step(text()[0])
    trainer = build(gpt(layers=2), host_memory=needed.ledger.total + 10_000)
    loss = trainer.step(text()[0]).loss
    with pytest.raises(OutOfMemory, match=r"comparison with plain PyTorch .* bytes requested") as refused:
        trainer.verify(text())
    parameters = 4 * sum(parameter.numel() for parameter in trainer._model.parameters())
    assert 7 * parameters < refused.value.requested < 12 * parameters
    assert trainer.steps == 1
    assert loss == build(gpt(layers=2)).step(text()[0]).loss


def test_a_model_that_cannot_be_copied_is_refused_by_name(build: Build) -> None:
    model = Stack()
    model.lock = threading.Lock()
    with pytest.raises(relay.VerificationError, match=r"Stack cannot be copied .*lock"):
        build(model).verify(batches(1))


def test_no_batch_is_refused(build: Build) -> None:
    with pytest.raises(relay.BatchError, match="no batch to compare"):
        build(gpt(layers=2)).verify([])


def test_the_report_is_plain_values_and_a_sentence(build: Build) -> None:
    torch.manual_seed(0)
    model = GPT(vocabulary=64, layers=2, hidden=16, heads=2, sequence=12)
    found = build(model, microbatches=2).verify(text(1))
    assert isinstance(found, relay.Verification)
    assert found.as_dict() == {
        "steps": 1,
        "equal": True,
        "tolerance": found.tolerance,
        "loose": found.loose,
        "compared": found.compared,
        "device": "cpu",
        "plain_device": "cpu",
        "first": None,
        "differing": 0,
    }
    assert str(found).startswith("Verified: 1 step on 'cpu' beside plain PyTorch on 'cpu' agree")
