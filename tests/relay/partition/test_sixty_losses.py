"""Sixty losses in micro-batches: 45 are sums over them, and 15 mix samples, so they run over the whole batch.

The reference is plain PyTorch on the whole batch. Masks are uneven: some micro-batches have no targets at all.
`make test` has every loss in one number of micro-batches, in turn; `make test-full` in all of them.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relay
from tests.support import matrix
from tests.support.zoo.plain_models import Build

BATCH, LENGTH, CLASSES = 12, 5, 6
RATE = 2.0**20
"""So large a learning rate that a weight after a step of SGD is its gradient."""

Targets = dict[str, Tensor]
Loss = Callable[[Tensor, Targets], Tensor]
"""Of outputs (12, 5, 6) and targets."""


def drawn() -> tuple[Tensor, Targets]:
    generator = torch.Generator().manual_seed(3)
    classes = torch.randint(0, CLASSES, (BATCH, LENGTH), generator=generator)
    classes[torch.rand(BATCH, LENGTH, generator=generator) < 0.4] = -100
    classes[:4] = -100
    classes[7, 2] = 1
    label = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    label[6:11] = -100
    start, end = torch.randint(0, LENGTH + 1, (2, BATCH), generator=generator)
    start[3:6], end[0:3] = LENGTH, LENGTH
    kept = (torch.rand(BATCH, LENGTH, generator=generator) < 0.5).float()
    kept[3:6] = 0
    targets = {
        "classes": classes, "label": label, "start": start, "end": end, "kept": kept,
        "numbers": torch.randn(BATCH, LENGTH, CLASSES, generator=generator),
        "weight": torch.rand(BATCH, generator=generator) + 0.1,
    }  # fmt: skip
    return torch.randn(BATCH, LENGTH, 8, generator=generator), targets


INPUTS, TARGETS = drawn()
WEIGHTS = torch.tensor([0.1, 2.0, 1.0, 0.5, 1.5, 0.7])


def ce(o: Tensor, t: Targets, **options: object) -> Tensor:
    return F.cross_entropy(o.flatten(0, 1), t["classes"].flatten(), **options)  # type: ignore[arg-type]


def each(o: Tensor, t: Targets) -> Tensor:
    """The error of each position."""
    return (o - t["numbers"]).square().mean(-1)


def chosen(o: Tensor, t: Targets) -> Tensor:
    return o.log_softmax(-1).gather(-1, t["classes"].clamp(min=0)[..., None]).squeeze(-1)


def probabilities(t: Targets) -> Tensor:
    return t["numbers"].softmax(-1)


def z_loss(o: Tensor) -> Tensor:
    return o.logsumexp(-1).square()


def answer(o: Tensor, t: Targets) -> Tensor:
    """Question answering: where an answer starts and ends, outside of the text for some."""
    start, end = o[..., :2].unbind(-1)
    ignored = start.shape[1]
    positions = [t[name].clamp(0, ignored) for name in ("start", "end")]
    first, second = (F.cross_entropy(*pair, ignore_index=ignored) for pair in zip((start, end), positions, strict=True))
    return (first + second) / 2


def counted(t: Targets) -> Tensor:
    return (t["classes"] != -100).sum()


ROW_WISE: dict[str, Loss] = {
    "cross-entropy": ce,
    "its sum": lambda o, t: ce(o, t, reduction="sum"),
    "its sum over a given count": lambda o, t: ce(o, t, reduction="sum") / 28,
    "its sum over the number of targets": lambda o, t: ce(o, t, reduction="sum") / counted(t),
    "its sum over the length of the batch": lambda o, t: ce(o, t, reduction="sum") / len(o),
    "with class weights": lambda o, t: ce(o, t, weight=WEIGHTS),
    "with label smoothing": lambda o, t: ce(o, t, label_smoothing=0.1),
    "with both": lambda o, t: ce(o, t, weight=WEIGHTS, label_smoothing=0.1),
    "with probabilities": lambda o, t: F.cross_entropy(o.flatten(0, 1), probabilities(t).flatten(0, 1)),
    "classes in dimension one": lambda o, t: F.cross_entropy(o.transpose(1, 2), t["classes"]),
    "negative log-likelihood": lambda o, t: F.nll_loss(o.log_softmax(-1).flatten(0, 1), t["classes"].flatten()),
    "gathered by hand": lambda o, t: -(chosen(o, t) * (t["classes"] >= 0)).sum() / counted(t),
    "gathered, of a given count": lambda o, t: (chosen(o, t) * (t["classes"] >= 0)).sum().view(1).neg()[0] * (1 / 28),
    "focal": lambda o, t: ((1 - chosen(o, t).exp()).square() * -chosen(o, t) * (t["classes"] >= 0)).mean(),
    "mean squared error": lambda o, t: F.mse_loss(o, t["numbers"]),
    "absolute error": lambda o, t: F.l1_loss(o, t["numbers"], reduction="sum") / t["numbers"].numel(),
    "smooth absolute error": lambda o, t: F.smooth_l1_loss(o, t["numbers"]),
    "huber": lambda o, t: F.huber_loss(o, t["numbers"], delta=0.5) * 3 - 1,
    "binary cross-entropy": lambda o, t: F.binary_cross_entropy_with_logits(o[..., 0], t["kept"]),
    "with the weight of the batch's positives": lambda o, t: F.binary_cross_entropy_with_logits(
        o[..., 0], t["kept"], pos_weight=(1 - t["kept"]).sum() / t["kept"].sum()
    ),
    "divergence": lambda o, t: F.kl_div(o.log_softmax(-1), probabilities(t), reduction="batchmean"),
    "masked": lambda o, t: (each(o, t) * t["kept"]).sum() / t["kept"].sum(),
    "masked, over one at least": lambda o, t: (each(o, t) * t["kept"]).sum() / t["kept"].sum().clamp(min=1),
    "a quotient of means": lambda o, t: (each(o, t) * t["kept"]).mean() / t["kept"].mean(),
    "an error over the targets' spread": lambda o, t: each(o, t).sum() / t["numbers"].var(),
    "weighted samples": lambda o, t: (each(o, t).mean(1) * t["weight"]).sum() / t["weight"].sum(),
    "standardised targets": lambda o, t: F.mse_loss(
        o, (t["numbers"] - t["numbers"].mean(0)) / t["numbers"].std(0)
    ),
    "cosine": lambda o, t: (1 - F.cosine_similarity(o, t["numbers"], dim=-1)).mean(),
    "triplet": lambda o, t: F.triplet_margin_loss(o[:, 0], o[:, 1], o[:, 2]),
    "the mean of each position": lambda o, t: each(o, t).mean(0).sum(),
}  # fmt: skip

TERMS: dict[str, Loss] = {
    "words and sentences": lambda o, t: ce(o, t) + F.cross_entropy(o[:, 0], t["label"]),
    "start and end": answer,
    "and a divergence": lambda o, t: ce(o, t) + 0.1 * F.kl_div(
        o.log_softmax(-1), probabilities(t), reduction="batchmean"
    ),
    "and a z-loss": lambda o, t: ce(o, t) + 1e-2 * z_loss(o).mean(),
    "and a masked z-loss": lambda o, t: ce(o, t) + 1e-2 * (z_loss(o) * t["kept"]).sum() / t["kept"].sum(),
    "and an error": lambda o, t: F.mse_loss(o, t["numbers"]) - ce(o, t),
    "two masks": lambda o, t: (each(o, t) * t["kept"]).sum() / t["kept"].sum() + chosen(o, t).where(
        t["classes"] >= 0, 0.0
    ).sum() / -counted(t),
    "class weights in one": lambda o, t: ce(o, t, weight=WEIGHTS) + ce(-o, t),
    "a sum and a mean": lambda o, t: each(o, t).sum() / 100 + each(o, t).mean(),
    "and a number": lambda o, t: ce(o, t, reduction="sum") + 0.5,
    "in a stack": lambda o, t: torch.stack([ce(o, t), F.cross_entropy(o[:, 0], t["label"]), o.square().mean()]).mean(),
    "less an entropy": lambda o, t: ce(o, t) + 0.01 * (o.softmax(-1) * o.log_softmax(-1)).sum(-1).mean(),
    "two masks of targets": lambda o, t: ce(o, t) + F.cross_entropy(o[:, :, 1], t["start"], ignore_index=LENGTH),
    "answers and words": lambda o, t: answer(o, t) * 0.3 + ce(o, t, label_smoothing=0.1),
    "routing": lambda o, t: ce(o, t) + 0.1 * o.softmax(-1).mean(1).square().sum(-1).mean() + z_loss(o).sum() / 6000,
}  # fmt: skip


def doubled(o: Tensor, t: Targets) -> Tensor:
    views = F.normalize(torch.cat([o[:, 0], o[:, 1]]), dim=-1)
    scores = views @ views.T - torch.eye(len(views)) * 1e9
    return F.cross_entropy(scores, torch.arange(len(views)).roll(len(o)))


def balanced(o: Tensor, t: Targets) -> Tensor:
    """The load-balancing loss of Switch Transformers."""
    chances = o.softmax(-1).flatten(0, 1)
    shares = F.one_hot(chances.argmax(-1), CLASSES).float().mean(0)
    return CLASSES * (shares * chances.mean(0)).sum() + ce(o, t)


MIXED: dict[str, tuple[Loss, str]] = {
    "in-batch negatives": (lambda o, t: F.cross_entropy(o[:, 0] @ o[:, 1].T, torch.arange(len(o))), "matmul"),
    "two views": (doubled, "matmul"),
    "targets numbered": (lambda o, t: F.cross_entropy(o[:, 0], torch.arange(len(o)) % CLASSES), "remainder"),
    "a root of a mean": (lambda o, t: F.mse_loss(o, t["numbers"]).sqrt(), "sqrt"),
    "perplexity": (lambda o, t: ce(o, t).exp(), "exp"),
    "a deviation": (lambda o, t: o.std() + ce(o, t), "std"),
    "variance and covariance": (
        lambda o, t: F.relu(1 - o[:, 0].var(0)).mean() + F.mse_loss(o, t["numbers"]), "var",
    ),
    "a correlation": (lambda o, t: ((o - o.mean(0)) * t["numbers"]).mean(), "sub"),
    "softmax over the batch": (lambda o, t: (o.softmax(0) * t["numbers"]).sum(), "softmax"),
    "sorted": (lambda o, t: (o[:, 0, 0].sort().values * t["weight"]).sum(), "sort"),
    "running sums": (lambda o, t: (o.cumsum(0) * t["numbers"]).mean(), "cumsum"),
    "the worst sample": (lambda o, t: each(o, t).mean(1).max(), "max"),
    "all pairs": (lambda o, t: F.softplus(o[:, None, 0, 0] - o[None, :, 0, 0]).mean(), "sub"),
    "overlap": (
        lambda o, t: 1 - 2 * (o[..., 0].sigmoid() * t["kept"]).sum() / (o[..., 0].sigmoid().sum() + t["kept"].sum()),
        "div",
    ),
    "balanced experts": (balanced, "mul"),
}  # fmt: skip


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, CLASSES))


@pytest.fixture(autouse=True)
def nothing_is_doubted() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*may not be that of the whole batch")
        yield


def plain(loss: Loss) -> tuple[float, list[Tensor]]:
    model = layers()
    found = loss(model(INPUTS), TARGETS)
    found.backward()
    return found.item(), [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def stepped(
    build: Build, loss: Loss, microbatches: int, device: str = "cpu", loss_over: str = "auto"
) -> tuple[float, list[Tensor]]:
    model = layers()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    options: dict[str, Any] = {"loss": loss, "device": device, "microbatches": microbatches, "loss_over": loss_over}
    trainer = build(list(model), optimizer=relay.SGD(lr=RATE), **options)
    found = trainer.step((INPUTS, copy.copy(TARGETS))).loss
    return found, [(old - new.detach()) / RATE for old, new in zip(before, model.parameters(), strict=True)]


def assert_equal(ours: tuple[float, list[Tensor]], theirs: tuple[float, list[Tensor]], relative: float = 1e-6) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=relative)
    mine, other = (torch.cat([gradient.flatten() for gradient in each[1]]) for each in (ours, theirs))
    assert float((mine - other).norm()) <= relative * float(other.norm())


@pytest.mark.parametrize(("name", "microbatches"), matrix.sampled((4, 3, 2, 1), [*ROW_WISE, *TERMS]))
@pytest.mark.sample(4)
def test_a_loss_is_that_of_the_whole_batch_in_any_number_of_micro_batches(
    build: Build, name: str, microbatches: int
) -> None:
    loss = (ROW_WISE | TERMS)[name]
    assert_equal(stepped(build, loss, microbatches), plain(loss))


@pytest.mark.parametrize(("name", "microbatches"), matrix.sampled((3, 1, 2, 4, 7), MIXED))
@pytest.mark.sample(4)
def test_a_loss_that_mixes_samples_runs_over_the_whole_batch(build: Build, name: str, microbatches: int) -> None:
    loss, _ = MIXED[name]
    assert_equal(stepped(build, loss, microbatches), plain(loss))


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.sample(2)
def test_a_loss_that_mixes_samples_is_refused_by_name_over_micro_batches(build: Build, name: str) -> None:
    loss, op = MIXED[name]
    with pytest.raises(relay.PartitionError, match=f"mixes samples: {op} .*loss_over='batch'.*microbatches=1"):
        stepped(build, loss, 3, loss_over="microbatch")


@pytest.mark.parametrize("name", ["with class weights", "masked", "start and end", "routing"])
def test_a_loss_that_keeps_samples_apart_may_run_over_the_whole_batch_too(build: Build, name: str) -> None:
    loss = (ROW_WISE | TERMS)[name]
    assert_equal(stepped(build, loss, 4, loss_over="batch"), plain(loss))


@pytest.mark.parametrize("device", ["numpy", "cpu:discrete"])
@pytest.mark.parametrize("name", ["start and end", "and a masked z-loss", "answers and words", "class weights in one"])
@pytest.mark.sample(3)
def test_terms_that_count_differently_are_exact_on_every_kind_of_device(build: Build, name: str, device: str) -> None:
    assert_equal(stepped(build, TERMS[name], 4, device), plain(TERMS[name]), 1e-5)


def test_there_are_sixty() -> None:
    assert (len(ROW_WISE), len(TERMS), len(MIXED)) == (30, 15, 15)
