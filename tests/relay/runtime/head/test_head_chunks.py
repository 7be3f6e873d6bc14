"""The head over chunks of positions: equal to plain PyTorch that runs the same chunks, to the bit where kernels are.

The reference is `tests.support.zoo.chunked_head.step_in_chunks`, written with autograd.
"""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relay
from tests.support.devices import require
from tests.support.zoo.chunked_head import (
    CLASSES,
    HIDDEN,
    LENGTH,
    LOSSES,
    Model,
    batch_of,
    distance,
    step_in_chunks,
    trained,
)

DEVICES = ["cpu:discrete", "numpy", "opencl:0", "onnx:cpu", "sim"]


def whole_and(kind: str, sizes: tuple[int, ...], microbatches: tuple[int, ...]) -> list[Any]:
    """Every combination, all but the first marked exhaustive."""
    found = [(kind, size, count) for size, count in itertools.product(sizes, microbatches)]
    return [found[0], *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in found[1:])]


@pytest.mark.parametrize(
    ("kind", "size", "microbatches"),
    [one for kind in LOSSES for one in whole_and(kind, (4, 1, 30, 64), (2, 1, 4))],
)
@pytest.mark.sample("mean-4-2", "padded shift-4-2", "divergence-4-2")
def test_chunks_equal_plain_pytorch_over_the_same_chunks_to_the_bit(
    kind: str, size: int, microbatches: int, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, batch = Model(LOSSES[kind], bias=kind == "mean"), batch_of()
    plain = copy.deepcopy(model)
    expected = step_in_chunks(plain, batch, microbatches, size)
    loss, mine = trained(model, batch, size, microbatches=microbatches)
    assert "left whole" not in caplog.text
    assert loss == pytest.approx(expected, rel=1e-6)
    if kind == "z-loss" or "weights" in kind:  # two sums; weights of micro-batches that are summed in another order
        assert distance(mine, plain) < 1e-6
    else:
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), plain.parameters(), strict=True))
    _, whole = trained(model, batch, None, microbatches=microbatches)
    assert distance(mine, whole) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.sample("onnx:cpu", "sim")
def test_every_device_runs_the_chunks(device: str) -> None:
    require(device)
    torch.manual_seed(0)
    model, batch = Model(LOSSES["shift"]), batch_of()
    plain = copy.deepcopy(model)
    step_in_chunks(plain, batch, 2, 4)
    _, mine = trained(model, batch, 4, microbatches=2, device=device, stash="host")
    assert distance(mine, plain) < 1e-6


class Fused(Model):
    """The same model, whose loss is PyTorch's own linear cross-entropy."""

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        hidden = self.norm(self.hidden(ids)).flatten(0, 1)
        return SimpleNamespace(loss=F.linear_cross_entropy(hidden, self.head.weight, labels.flatten()))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy")
def test_a_model_that_calls_a_fused_linear_cross_entropy_runs_in_chunks(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, batch = Fused(LOSSES["mean"]), batch_of()
    plain = copy.deepcopy(model)
    step_in_chunks(plain, batch, 1, 4)
    _, mine = trained(model, batch, 4, microbatches=1)
    assert "left whole" not in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), plain.parameters(), strict=True))


def test_a_tied_head_in_chunks_gets_both_gradients() -> None:
    torch.manual_seed(0)
    model, batch = Model(LOSSES["mean"], tied=True), batch_of()
    plain = copy.deepcopy(model)
    step_in_chunks(plain, batch, 1, 4)
    _, mine = trained(model, batch, 4, microbatches=1)
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("exact", [True, False])
def test_a_tied_head_in_chunks_gets_the_gradients_of_all_micro_batches(exact: bool) -> None:
    """To rounding: plain PyTorch has no one order in which chunks and micro-batches are added."""
    torch.manual_seed(0)
    model, batch = Model(LOSSES["mean"], tied=True), batch_of()
    plain = copy.deepcopy(model)
    step_in_chunks(plain, batch, 3, 4)
    _, mine = trained(model, batch, 4, microbatches=3, exact_ties=exact)
    assert distance(mine, plain) < 1e-6


def test_a_chunk_without_targets_adds_nothing() -> None:
    torch.manual_seed(0)
    model, batch = Model(LOSSES["mean"]), batch_of(slice(0, 5))
    shorter = {key: value[1:] for key, value in batch.items()}
    loss, mine = trained(model, batch, LENGTH, microbatches=1)
    expected, other = trained(model, shorter, LENGTH, microbatches=1)
    assert loss == expected
    assert all(torch.equal(a, b) for a, b in zip(mine.head.parameters(), other.head.parameters(), strict=True))


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.exhaustive)])
def test_in_half_precision_the_weight_gradient_is_summed_in_fp32(precision: str) -> None:
    """Against float64: at most 1.25 times the error of the whole head, and with clipping and scaling as well."""
    torch.manual_seed(0)
    model, batch = Model(LOSSES["mean"]), batch_of()
    exact = copy.deepcopy(model).double()
    exact(**batch).loss.backward()
    wanted = model.head.weight - 0.1 * exact.head.weight.grad

    def error(size: int | None) -> float:
        _, mine = trained(model, batch, size, microbatches=1, precision=precision, clip_grad_norm=1e6)
        return ((mine.head.weight - wanted).norm() / exact.head.weight.grad.norm()).item()

    assert error(2) <= 1.25 * error(None)


def test_evaluation_runs_in_chunks_and_prediction_does_not() -> None:
    torch.manual_seed(0)
    model, batch = Model(LOSSES["padded shift"]), batch_of()
    expected = model(**batch)
    with relay.Trainer(model, microbatches=2, head_chunk_tokens=4) as trainer:
        assert trainer.evaluate(batch).loss == pytest.approx(float(expected.loss), rel=1e-6)
        assert torch.allclose(trainer.predict(batch).logits, expected.logits)


def test_a_list_of_modules_runs_its_last_module_and_loss_in_chunks() -> None:
    torch.manual_seed(0)
    modules = [nn.Embedding(CLASSES, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, CLASSES)]
    ids, labels = batch_of().values()

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    found = []
    for size in (4, None):
        mine = copy.deepcopy(modules)
        with relay.Trainer(mine, loss, optimizer=relay.SGD(lr=0.1), microbatches=2, head_chunk_tokens=size) as trainer:
            trainer.step((ids, labels))
        found.append(nn.Sequential(*mine))
    assert distance(*found) < 1e-6


def test_checkpoints_and_saved_tensors_do_not_know_chunks(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, batch = Model(LOSSES["mean"]), batch_of()
    options: dict[str, Any] = {"microbatches": 2, "head_chunk_tokens": 4, "recompute": False, "clip_grad_norm": 0.1}
    straight = copy.deepcopy(model)
    with relay.Trainer(straight, **options) as trainer:
        trainer.step(batch)
        trainer.save(tmp_path / "run").wait()
        trainer.step(batch)
    resumed = copy.deepcopy(model)
    with relay.Trainer(resumed, **options) as trainer:
        trainer.load(tmp_path / "run")
        trainer.step(batch)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_a_verification_compares_chunks_to_rounding_and_says_why() -> None:
    torch.manual_seed(0)
    with relay.Trainer(Model(LOSSES["mean"]), microbatches=2, head_chunk_tokens=4) as trainer:
        found = trainer.verify([batch_of()])
    assert found.equal
    assert "the head runs over chunks of positions" in str(found)
