"""Models that call PyTorch's fused linear cross-entropy themselves, which is one op over chunks of its own.

The reference is plain PyTorch with the same call: to the bit where the op runs as it is, else to rounding.
"""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relay
from tests.support.devices import require
from tests.support.zoo.chunked_head import CLASSES, LOSSES, Model, batch_of, distance, trained

pytestmark = pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyOptions"), reason="this torch has no chunked linear_cross_entropy"
)


class Fused(Model):
    """A mean over targets that are not masked, with a bias and weights of classes."""

    def __init__(self, reduction: str = "mean", size: int = 4) -> None:
        super().__init__(LOSSES["mean"])
        self.bias = nn.Parameter(torch.randn(CLASSES))
        self.reduction, self.size = reduction, size

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        loss = F.linear_cross_entropy(
            self.norm(self.hidden(ids)).flatten(0, 1), self.head.weight, labels.flatten(), linear_bias=self.bias,
            weight=self.class_weights, reduction=self.reduction,
            options=nn.LinearCrossEntropyOptions(batch_chunk_size=self.size),
        )  # fmt: skip
        return SimpleNamespace(loss=loss.mean())


class Deciding(Fused):
    """It runs eagerly, since its data decide."""

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        found = super().forward(ids, labels)
        return found if found.loss.item() > 0 else SimpleNamespace(loss=-found.loss)


def plain_step(model: nn.Module, batch: dict[str, Tensor]) -> nn.Module:
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(**batch).loss.backward()
    optimizer.step()
    return plain


@pytest.mark.parametrize("reduction", ["mean", pytest.param("none", marks=pytest.mark.exhaustive)])
def test_the_call_runs_as_it_is_and_over_chunks(reduction: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, batch = Fused(reduction), batch_of()
    plain = plain_step(model, batch)
    _, whole = trained(model, batch, None, microbatches=1)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), plain.parameters(), strict=True))
    _, pieces = trained(model, batch, None, microbatches=2)
    _, chunked = trained(model, batch, 5, microbatches=2)
    assert "left whole" not in caplog.text
    assert distance(pieces, plain) < 1e-6
    assert distance(chunked, plain) < 1e-6


@pytest.mark.parametrize(
    ("device", "reduction"),
    [
        ("numpy", "mean"),
        *(
            pytest.param(device, reduction, marks=pytest.mark.exhaustive)
            for device in ("numpy", "opencl:0", "onnx:cpu")
            for reduction in ("mean", "sum", "none")
        ),
    ],
)
def test_devices_that_do_not_run_pytorch_compute_what_it_documents(device: str, reduction: str) -> None:
    require(device)
    torch.manual_seed(0)
    model, batch = Fused(reduction), batch_of()
    plain = plain_step(model, batch)
    _, mine = trained(model, batch, None, microbatches=1, device=device)
    assert distance(mine, plain) < 1e-6


def test_the_call_runs_in_code_that_data_decide_and_is_left_whole_there(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, batch = Deciding(), batch_of()
    plain = plain_step(model, batch)
    with pytest.warns(UserWarning, match="runs eagerly"), caplog.at_level(logging.WARNING, "relay"):
        _, mine = trained(model, batch, "auto", microbatches=1)
    assert "left whole, since the code after the last layer runs eagerly" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), plain.parameters(), strict=True))


def test_the_logits_of_its_chunks_count_as_workspace() -> None:
    torch.manual_seed(0)
    batch = batch_of()
    peaks = []
    for size in (1024, 512):
        model = Fused(size=size)
        model.embedding, model.head = nn.Embedding(CLASSES, 8), nn.Linear(8, 512, bias=False)
        model.bias, model.class_weights = nn.Parameter(torch.randn(512)), torch.ones(512)
        ids = batch["ids"].repeat(1, 40)
        with relay.Trainer(model, optimizer=relay.SGD(lr=0.1), microbatches=1) as trainer:
            peaks.append(trainer.step({"ids": ids, "labels": ids}).device_peak_bytes)
    assert peaks[0] - peaks[1] == 512 * 512 * 4


def test_in_half_precision_the_call_is_left_whole_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, batch = Fused(), batch_of()
    with caplog.at_level(logging.WARNING, "relay"):
        trained(model, batch, 4, microbatches=1, precision="bf16")
    assert "fused linear cross-entropy computes in a dtype of its own" in caplog.text


class OwnGradient(torch.autograd.Function):
    """The mean cross-entropy, with a backward of its own."""

    @staticmethod
    def forward(context: Any, logits: Tensor, targets: Tensor) -> Tensor:
        context.save_for_backward(logits, targets)
        return F.cross_entropy(logits, targets)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        logits, targets = context.saved_tensors
        return (logits.softmax(-1) - F.one_hot(targets, CLASSES)) * gradient / len(targets), None


class Own(Model):
    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        logits = self.logits(self.hidden(ids)).flatten(0, 1)
        return SimpleNamespace(loss=OwnGradient.apply(logits, ids.flatten()))


@pytest.mark.filterwarnings("ignore:the code of Own", "ignore:layer 'epilogue'")
@pytest.mark.parametrize("whole", [True, False], ids=["model", "list"])
def test_a_loss_with_a_gradient_of_its_own_is_left_whole_with_the_reason(
    whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model: Any = Own(LOSSES["mean"])
    batch = batch_of()
    plain = plain_step(model, batch)
    modules = [model.embedding, *model.layers, nn.Sequential(model.norm, model.head)]

    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        found: Tensor = OwnGradient.apply(logits.flatten(0, 1), ids.flatten())
        return found

    given = (model, None, batch) if whole else (modules, loss, (batch["ids"], batch["ids"]))
    with caplog.at_level(logging.WARNING, "relay"):
        with relay.Trainer(
            given[0], given[1], optimizer=relay.SGD(lr=0.1), microbatches=1, head_chunk_tokens="auto"
        ) as trainer:
            trainer.step(given[2])
    assert ("a custom gradient" if not whole else "runs eagerly") in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
