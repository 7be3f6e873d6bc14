"""Gradients that wait on the host are stored in half precision where one micro-batch made them so, to the same bit."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import relay
from relay.optim import fused
from tests.support import mixed_reference, reference
from tests.support.zoo.plain_models import Build, everything, gpt, perceptron, regression

pytestmark = pytest.mark.skipif(not fused.matches_torch(), reason="torch's own kernels update float32 masters here")

STEPS = 4
NORM = 0.05


def waiting(trainer: relay.Trainer) -> dict[torch.dtype, int]:
    """Bytes of gradients that wait on the host, by dtype; uint8 where they arrive in place."""
    return {dtype: size for state, dtype, size in trainer.ledger.rows() if state == "gradients"}


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_of_one_micro_batch_is_plain_training_with_gradients_in_half_precision(
    build: Build, precision: str, device: str
) -> None:
    plain = gpt()
    batches = reference.text_batches(STEPS)
    expected = mixed_reference.train(plain, batches, 1, precision=precision, clip_norm=NORM)
    assert not any(expected.skipped)
    trainer = build(gpt(), precision=precision, device=device, clip_grad_norm=NORM, microbatches=1)
    metrics = [trainer.step(batch) for batch in batches]
    assert [one.loss for one in metrics] == expected.losses
    assert [one.grad_norm for one in metrics] == expected.norms
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))
    low = mixed_reference.LOW[precision]
    narrow = sum(-(-one.numel() * 2 // 64) * 64 for name, one in trainer._model.named_parameters() if linear(name))
    assert waiting(trainer)[low] == narrow
    assert trainer.ledger.total == metrics[-1].host_bytes == trainer._session.host.memory().in_use


def linear(name: str) -> bool:
    return (name.startswith("blocks") and "norm" not in name) or name == "head.projection.weight"


@pytest.mark.parametrize(
    "options",
    [
        {"master_weights": "split", "state_dtype": "int8", "defer_updates": True},
        {"optimizer": relay.Lion(lr=1e-3), "device": "cpu:discrete", "resident_layers": 1},
        {"optimizer": relay.LAMB(lr=1e-2), "layers_per_slot": 2},
    ],
    ids=["split masters, int8 states", "Lion", "LAMB"],
)
@pytest.mark.sample(2)
def test_every_fused_optimizer_reads_them_as_if_they_were_float32(
    build: Build, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    found = []
    for narrow in (True, False):
        if not narrow:
            monkeypatch.setattr("relay.eps.optimizer_state.BoundHostOptimizer.reads_half", False)
        trainer = build(gpt(), precision="bf16", clip_grad_norm=NORM, microbatches=1, **options)
        losses = [trainer.step(batch).loss for batch in reference.text_batches(STEPS)]
        assert (torch.bfloat16 in waiting(trainer)) == narrow
        found.append((losses, everything(trainer)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], value) for name, value in found[1][1].items())


@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 2},
        {"microbatches": 1, "clip_grad_value": 1e-3},
        {"microbatches": 1, "optimizer": functools.partial(torch.optim.NAdam, lr=1e-3)},
        {"microbatches": 1, "optimizer": relay.Adafactor()},
        {"microbatches": 1, "precision": "fp32"},
    ],
    ids=["two micro-batches", "clipped by value", "torch's optimizer", "Adafactor", "fp32"],
)
def test_gradients_that_would_be_rounded_wait_in_float32(build: Build, options: dict[str, Any]) -> None:
    trainer = build(
        perceptron(), loss=nn.functional.mse_loss, **{"precision": "bf16", "clip_grad_norm": NORM, **options}
    )  # fmt: skip
    trainer.step(regression())
    assert set(waiting(trainer)) == {torch.uint8}


def test_tied_weights_and_steps_of_several_pieces_are_as_in_plain_training(build: Build) -> None:
    plain = gpt(tied=True)
    batches = reference.text_batches(STEPS)
    trainer = build(gpt(tied=True), precision="bf16", clip_grad_norm=NORM, microbatches=1, device="cpu:discrete")
    stepper = reference.adamw(list(plain.parameters()))
    for number, batch in enumerate(batches):
        count = 1 + number % 2
        expected = mixed_reference.train(
            plain, [batch], count, precision="bf16", clip_norm=NORM, optimizer=stepper, cache=False
        )  # fmt: skip
        pieces = reference.cut(batch, count)
        found = trainer.step(batch) if count == 1 else trainer.step(pieces=pieces)
        assert found.loss == pytest.approx(expected.losses[0], rel=1e-6)
    state = reference.state_of(plain)
    for name, tensor in trainer.state_dict().items():
        assert torch.allclose(tensor, state[name], rtol=1e-4, atol=1e-5)
