"""The head over chunks of positions: equal to plain PyTorch that runs the same chunks, to the bit where kernels are.

The reference is written out here with autograd: the layers run on a micro-batch, the head and the loss on one chunk of
its positions after the other, each with its own backward. The gradient of the hidden states goes on into the layers.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relay
from hal.errors import OutOfMemory
from tests.support.devices import require

CLASSES, HIDDEN, SAMPLES, LENGTH = 23, 8, 6, 5
DEVICES = ["cpu:discrete", "numpy", "opencl:0", "onnx:cpu", "sim"]

Total = Callable[["Model", Tensor], float]
Part = Callable[["Model", Tensor, Tensor], Tensor]


@dataclass
class Loss:
    """A loss as a model computes it, and as the sum over a chunk with what it is divided by.

    With `shift` a position is trained on the label of the next one. The losses of micro-batches are `added`, or else
    are means that count by what they are divided by.
    """

    whole: Callable[[Model, Tensor, Tensor], Tensor]
    part: Part
    total: Total = lambda _, labels: float((labels != -100).sum())
    shift: bool = False
    added: bool = False


class Model(nn.Module):
    """Embedding, two layers, norm and head: `model(ids=, labels=)` has a loss and logits."""

    def __init__(self, loss: Loss, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, HIDDEN)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES, bias=bias)
        self.register_buffer("class_weights", torch.rand(CLASSES) + 0.5)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss = loss

    def hidden(self, ids: Tensor) -> Tensor:
        stream = self.embedding(ids)
        for layer in self.layers:
            stream = layer(stream)
        return stream

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        logits = self.logits(self.hidden(ids))
        return SimpleNamespace(loss=self.loss.whole(self, logits, labels), logits=logits)


def flat(loss: Part) -> Callable[[Model, Tensor, Tensor], Tensor]:
    return lambda model, logits, labels: loss(model, logits.flatten(0, 1), labels.flatten())


def cross_entropy(reduction: str, **options: Any) -> Part:
    return lambda _, logits, labels: F.cross_entropy(logits, labels, reduction=reduction, **options)


def weighted(reduction: str) -> Part:
    return lambda model, logits, labels: F.cross_entropy(logits, labels, model.class_weights, reduction=reduction)


def capped(reduction: str) -> Part:
    return lambda _, logits, labels: F.cross_entropy(3 * torch.tanh(logits / 3), labels, reduction=reduction)


def masked_z(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.logsumexp(-1).square() * (labels != -100)).sum()


def with_z(model: Model, logits: Tensor, labels: Tensor) -> Tensor:
    count = (labels != -100).sum()
    return F.cross_entropy(logits, labels) + 0.01 * masked_z(logits, labels) / count


def shifted(model: Model, logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1))


def padded(model: Model, logits: Tensor, labels: Tensor) -> Tensor:
    moved = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), moved.view(-1))


def of_classes(model: Model, logits: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(logits, F.one_hot(labels.clamp(min=0), CLASSES).float())


LOSSES = {
    "mean": Loss(flat(cross_entropy("mean")), cross_entropy("sum")),
    "smoothing": Loss(flat(cross_entropy("mean", label_smoothing=0.1)), cross_entropy("sum", label_smoothing=0.1)),
    "weights": Loss(flat(weighted("mean")), weighted("sum"), lambda m, y: float(m.class_weights[y[y != -100]].sum())),
    "softcap": Loss(flat(capped("mean")), capped("sum")),
    "given count": Loss(
        lambda *given: flat(cross_entropy("sum"))(*given) / 7, cross_entropy("sum"), lambda *_: 7.0, added=True
    ),
    "z-loss": Loss(flat(with_z), lambda m, x, y: F.cross_entropy(x, y, reduction="sum") + 0.01 * masked_z(x, y)),
    "shift": Loss(shifted, cross_entropy("sum"), shift=True),
    "padded shift": Loss(padded, cross_entropy("sum"), shift=True),
    "squares": Loss(
        of_classes,
        lambda m, x, y: F.mse_loss(x, F.one_hot(y.clamp(min=0), CLASSES).float(), reduction="sum"),
        lambda _, labels: float(labels.numel() * CLASSES),
    ),
}  # fmt: skip


def batch_of(masked: slice = slice(0, 3)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator)
    labels = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator)
    labels[0, masked] = -100
    return {"ids": ids, "labels": labels}


def step_in_chunks(model: Model, batch: dict[str, Tensor], microbatches: int, size: int) -> float:
    """One SGD step as plain PyTorch does it over the same micro-batches and chunks. Returns the loss."""
    rows = -(-SAMPLES // microbatches)
    pieces = [{key: value[start : start + rows] for key, value in batch.items()} for start in range(0, SAMPLES, rows)]
    targets, totals = [], []
    for piece in pieces:
        labels = F.pad(piece["labels"], (0, 1), value=-100)[..., 1:] if model.loss.shift else piece["labels"]
        targets.append(labels.flatten())
        totals.append(model.loss.total(model, targets[-1]))
    weights = [1.0 if model.loss.added else total / sum(totals) for total in totals]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = 0.0
    for piece, labels, total, weight in zip(pieces, targets, totals, weights, strict=True):
        hidden = model.hidden(piece["ids"])
        leaf = hidden.detach().flatten(0, 1).requires_grad_()
        for start in range(0, len(leaf), size):
            chunk = slice(start, start + size)
            part = model.loss.part(model, model.logits(leaf[chunk]), labels[chunk]) / total
            (part * weight).backward()
            loss += float(part.detach() * weight)
        hidden.backward(leaf.grad.view_as(hidden))
    optimizer.step()
    return loss


def trained(model: Model, batch: dict[str, Tensor], size: int | str | None, **options: Any) -> tuple[float, Model]:
    mine = copy.deepcopy(model)
    with relay.Trainer(mine, optimizer=relay.SGD(lr=0.1), head_chunk_tokens=size, **options) as trainer:
        loss = trainer.step(batch).loss
    return loss, mine


def distance(one: nn.Module, other: nn.Module) -> float:
    """The largest relative L2 distance of two models' parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def whole_and(kind: str, sizes: tuple[int, ...], microbatches: tuple[int, ...]) -> list[Any]:
    """Every combination, all but the first marked exhaustive."""
    found = [(kind, size, count) for size, count in itertools.product(sizes, microbatches)]
    return [found[0], *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in found[1:])]


@pytest.mark.parametrize(
    ("kind", "size", "microbatches"),
    [one for kind in LOSSES for one in whole_and(kind, (4, 1, 30, 64), (2, 1, 4))],
)
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
    if kind in ("z-loss", "weights"):  # two sums; weights of micro-batches that are summed in another order
        assert distance(mine, plain) < 1e-6
    else:
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), plain.parameters(), strict=True))
    _, whole = trained(model, batch, None, microbatches=microbatches)
    assert distance(mine, whole) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
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


def mean_of_positions(model: Model, logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.mean(1), labels[:, 0].clamp(min=0))


def with_penalty(model: Model, logits: Tensor, labels: Tensor) -> Tensor:
    return flat(cross_entropy("mean"))(model, logits, labels) + 0.1 * model.head.weight.square().sum()


def dropped(model: Model, logits: Tensor, labels: Tensor) -> Tensor:
    return flat(cross_entropy("mean"))(model, F.dropout(logits, 0.5, training=True), labels)


def squared(model: Model, logits: Tensor, labels: Tensor) -> Tensor:
    return flat(cross_entropy("mean"))(model, logits, labels).square()


def softmax_over_positions(model: Model, logits: Tensor, labels: Tensor) -> Tensor:
    return logits.softmax(1).square().sum()


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (mean_of_positions, "mean goes over the positions"),
        (with_penalty, "adds a term that is not a sum over positions"),
        (dropped, "dropout draws random numbers"),
        (squared, "computes further with a sum over positions"),
        (softmax_over_positions, "softmax goes over the positions"),
    ],
)
def test_what_is_not_position_by_position_is_left_whole_with_the_reason(
    loss: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, batch = Model(Loss(loss, loss)), batch_of()
    with caplog.at_level(logging.WARNING, "relay"):
        _, chunked = trained(model, batch, 4, microbatches=1)
    assert reason in caplog.text
    assert "left whole" in caplog.text
    _, whole = trained(model, batch, None, microbatches=1)
    assert all(torch.equal(a, b) for a, b in zip(chunked.parameters(), whole.parameters(), strict=True))


def test_asking_for_logits_leaves_the_head_whole_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = Model(LOSSES["mean"]), batch_of()
    with relay.Trainer(model, microbatches=2, head_chunk_tokens=4) as trainer:
        outputs = trainer.step(batch, outputs=["logits"]).outputs
    assert outputs[0]["logits"].shape == (3, LENGTH, CLASSES)
    assert "the step returns outputs of the model (logits)" in caplog.text


@pytest.mark.parametrize("size", [0, -3, 1.5, "some"])
def test_a_chunk_size_that_cannot_be_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match=r"head_chunk_tokens=.* must be a whole number of at least 1, or 'auto'"):
        relay.Trainer(Model(LOSSES["mean"]), head_chunk_tokens=size)


@pytest.mark.parametrize(
    ("positions", "classes", "size"), [(4096, 8192, 64), pytest.param(32768, 151936, 512, marks=pytest.mark.exhaustive)]
)
def test_a_step_takes_less_than_a_tenth_of_the_memory_that_the_whole_head_needs(
    positions: int, classes: int, size: int
) -> None:
    layers = [nn.Linear(4, 4) for _ in range(2)]
    modules = [nn.Embedding(64, 4), *layers, nn.Linear(4, classes, bias=False)]
    ids = torch.arange(positions)[None] % 64

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    with relay.Trainer(modules, loss, microbatches=1, capacity="20MB") as trainer:
        with pytest.raises(OutOfMemory) as refused:
            trainer.step((ids, ids))
    with relay.Trainer(modules, loss, microbatches=1, head_chunk_tokens=size) as trainer:
        assert trainer.step((ids, ids)).device_peak_bytes < refused.value.requested / 10


def test_auto_chunks_for_all_micro_batches_or_for_none(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Model(LOSSES["mean"])
    ids = torch.randint(0, CLASSES, (3, 1024))
    pieces = [{"ids": piece, "labels": piece} for piece in (ids, ids[:1, :1])]
    found = []
    for options in ({"head_chunk_tokens": "auto", "capacity": "1200kB"}, {}):
        mine = copy.deepcopy(model)
        with caplog.at_level(logging.INFO, "relay"), relay.Trainer(mine, optimizer=relay.SGD(lr=0.1), **options) as one:
            one.step(pieces=pieces)
        found.append(mine)
    assert "'auto' chose" in caplog.text
    assert distance(*found) < 1e-5


def test_auto_chunks_where_the_logits_would_take_more_than_a_quarter_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = Model(LOSSES["mean"])
    ids = torch.randint(0, CLASSES, (2, 1024))
    batch = {"ids": ids, "labels": ids}
    with caplog.at_level(logging.INFO, "relay"):
        _, roomy = trained(model, batch, "auto", microbatches=1, capacity="10MB")
    assert "'auto': the head is left whole" in caplog.text
    with caplog.at_level(logging.INFO, "relay"):
        _, tight = trained(model, batch, "auto", microbatches=1, capacity="900kB")
    assert "'auto' chose 256" in caplog.text
    assert distance(tight, roomy) < 1e-5
