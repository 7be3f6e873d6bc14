"""How a model gives its loss, and losses that a micro-batch alone cannot compute. The reference is plain PyTorch."""

import copy
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relay
from relay.errors import MicroBatchTooSmall, NonFiniteLoss, PartitionError
from tests.relay.partition.test_loss_terms import BATCH, RATE, Build, Loss, Whole, assert_same, gradients_of, plain

TIMES: dict[str, Loss] = {
    "a cross-entropy times a mean of the labels": lambda o, b, m: (
        F.cross_entropy(o, b["labels"]) * b["labels"].float().mean()
    ),
    "over their largest": lambda o, b, m: F.cross_entropy(o, b["labels"]) / b["labels"].max(),
    "times how many there are": lambda o, b, m: F.cross_entropy(o, b["labels"]) * (b["labels"] >= 0).sum(),
    "two terms, each times a number of its own": lambda o, b, m: (
        F.cross_entropy(o, b["labels"]) * b["numbers"].std() + o.square().mean() * b["labels"].float().mean()
    ),
}


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.sample(2)
def test_a_loss_times_or_over_a_quantity_of_the_targets_is_that_of_the_whole_batch(build: Build, name: str) -> None:
    assert_same(build, lambda: Whole(TIMES[name]), BATCH, 3)


def counts(labels: Tensor) -> Tensor:
    return (labels[:, None] == torch.arange(3)).sum(0) + 1.0


CLASS_WEIGHTS: dict[str, Loss] = {
    "counts of classes": lambda o, b, m: F.cross_entropy(o, b["labels"], weight=counts(b["labels"])),
    "their inverse": lambda o, b, m: F.nll_loss(
        o.log_softmax(1), b["labels"], weight=len(b["labels"]) / (3 * counts(b["labels"]))
    ),
    "beside another term": lambda o, b, m: (
        F.cross_entropy(o, b["labels"], weight=counts(b["labels"])) + o.square().mean()
    ),
    "of other numbers of the batch": lambda o, b, m: F.cross_entropy(
        o, b["labels"], weight=(b["numbers"].mean() * torch.arange(3)).sigmoid()
    ),
    "beside fixed ones": lambda o, b, m: (
        F.cross_entropy(o, b["labels"], weight=counts(b["labels"]))
        + F.cross_entropy(o, b["labels"], weight=torch.arange(3.0) + 1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASS_WEIGHTS)
@pytest.mark.sample(2)
def test_weights_of_classes_that_follow_from_the_batch_are_those_of_the_whole_batch(build: Build, name: str) -> None:
    assert_same(build, lambda: Whole(CLASS_WEIGHTS[name]), BATCH, 3)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_loss_of_one_element_is_taken_as_by_pytorchs_backward(build: Build, shape: tuple[int, ...]) -> None:
    def loss(output: Tensor, batch: dict[str, Tensor], model: Any) -> Tensor:
        return F.cross_entropy(output, batch["labels"]).view(shape)

    assert_same(build, lambda: Whole(loss), BATCH, 3)


def scores(output: Tensor) -> Tensor:
    return output.softmax(-1)


TOGETHER: dict[str, Loss] = {
    "renorm over the batch": lambda o, b, m: o.renorm(2, 1, 0.1).square().mean() + o.square().mean(),
    "experts that are counted": lambda o, b, m: (
        scores(o).mean(0) * torch.histc(o.argmax(-1).float(), 3, 0, 2)
    ).sum(),
    "places among the sorted": lambda o, b, m: (
        o.mean(1) * torch.searchsorted(b["numbers"][:, 0].sort()[0], b["numbers"][:, 0])
    ).mean(),
    "distances of all pairs": lambda o, b, m: F.pdist(o).mean(),
    "a determinant": lambda o, b, m: torch.logdet(o.T @ o + torch.eye(3)),
    "means of segments": lambda o, b, m: (
        torch.segment_reduce(o, "mean", lengths=torch.tensor([len(o) - 1, 1]), axis=0).square().mean()
    ),
    "renorm of each sample": lambda o, b, m: o.renorm(2, 0, 0.1).sum(1).square().mean(),
    "places between given bounds": lambda o, b, m: (
        o.mean(1) * torch.bucketize(b["numbers"][:, 0], torch.linspace(-1, 1, 4))
    ).mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.sample(3)
def test_ops_that_take_samples_together_give_the_loss_of_the_whole_batch(build: Build, name: str) -> None:
    assert_same(build, lambda: Whole(TOGETHER[name]), BATCH, 3)


class Returning(Whole):
    """Returns its loss and its output in another form."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__(lambda output, batch, model: F.cross_entropy(output, batch["labels"]))
        self.form = form

    def forward(self, **batch: Any) -> Any:
        found = super().forward(**batch)
        return self.form(found.loss, found.output)


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a tuple with the loss first": lambda loss, output: (loss, output),
    "a tuple with the loss last": lambda loss, output: (output, None, loss),
    "a list": lambda loss, output: [loss, output],
    "the loss alone": lambda loss, output: loss,
    "a mapping": lambda loss, output: UserDict(loss=loss, output=output),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.sample(2)
def test_a_loss_is_found_where_it_can_be_nothing_else(build: Build, form: Callable[[Tensor, Tensor], Any]) -> None:
    expected = plain(Whole(lambda output, batch, model: F.cross_entropy(output, batch["labels"])), BATCH)
    model = Returning(form)
    trainer = build(model, microbatches=3, optimizer=relay.SGD(lr=RATE))
    loss, gradients = gradients_of(model, trainer, BATCH)
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert float((gradients - expected[1]).norm()) <= 1e-6 * float(expected[1].norm())


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (lambda loss, output: (loss, 2 * loss, output), "a tuple with 2 scalars, at positions 0 and 1"),
        (lambda loss, output: output, r"a tensor of shape \(\d+, 3\)"),
        (lambda loss, output: (output, None), "a tuple of 2 without a scalar"),
        (lambda loss, output: {"logits": output}, "a dict with logits.* hold labels"),
        (lambda loss, output: {"loss": None, "logits": output}, "a dict whose loss is None.* hold labels"),
    ],
    ids=["two scalars", "no scalar", "a tuple", "no key", "None"],
)
@pytest.mark.sample(3)
def test_an_output_without_a_loss_is_refused_with_what_it_is(build: Build, form: Any, words: str) -> None:
    with pytest.raises(PartitionError, match=words):
        build(Returning(form), microbatches=1).step(BATCH)


def hardest(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets, reduction="none").topk(5)[0].mean()


def product(output: Tensor, targets: Tensor) -> Tensor:
    return -torch.einsum("bc,bc->b", output.log_softmax(-1), F.one_hot(targets, 3).float()).mean()


def one_element(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets).view(1)


@pytest.mark.parametrize("loss", [hardest, product, one_element])
def test_losses_of_a_list_are_those_of_the_batch_with_a_last_piece_of_one_sample(
    build: Build, loss: Callable[[Tensor, Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    modules = [nn.Linear(6, 8), nn.Linear(8, 3)]
    model = nn.Sequential(*copy.deepcopy(modules))
    inputs, targets = BATCH["inputs"][:7], BATCH["labels"][:7].abs() % 3
    expected = loss(model(inputs), targets)
    expected.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    trainer = build(modules, loss=loss, microbatches=4, optimizer=relay.SGD(lr=0.1))
    assert trainer.step((inputs, targets)).loss == pytest.approx(expected.item(), rel=1e-6)
    for found, weight in zip(trainer.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(found, weight, rtol=1e-6, atol=1e-7)


def test_code_that_needs_more_samples_than_a_micro_batch_has_says_so_with_the_ways_out(build: Build) -> None:
    whole = Whole(lambda output, batch, model: hardest(output, batch["labels"]))
    with pytest.raises(MicroBatchTooSmall, match=r"k not in range.* 3 of the 12 samples.*microbatches=1.*loss_over"):
        build(whole, microbatches=4).step(BATCH)
    modules = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)]
    batch = BATCH["inputs"][:5], BATCH["labels"][:5].clamp(min=0)
    with pytest.raises(MicroBatchTooSmall, match=r"more than 1 value.* 1 of the 5 samples.*microbatches=1"):
        build(modules, loss=F.cross_entropy, microbatches=4).step(batch)


@pytest.mark.filterwarnings("ignore:.*(eagerly|may not be that of the whole batch)")
def test_a_micro_batch_whose_loss_is_a_mean_of_nothing_is_answered_with_loss_weight(build: Build) -> None:
    def chosen(output: Tensor, batch: dict[str, Tensor], model: Any) -> Tensor:
        counts = batch["labels"] >= 0
        return F.cross_entropy(output[counts], batch["labels"][counts])

    labels = BATCH["labels"].clone()
    labels[:4] = -100
    batch = {**BATCH, "labels": labels}
    with pytest.raises(NonFiniteLoss, match=r"in 1 of its 3 micro-batches.*loss_weight="):
        build(Whole(chosen), microbatches=3).step(batch)
    expected, model = plain(Whole(chosen), batch), Whole(chosen)
    stated = build(
        model, microbatches=3, optimizer=relay.SGD(lr=RATE), loss_weight=lambda piece: (piece["labels"] >= 0).sum()
    )
    loss, gradients = gradients_of(model, stated, batch)
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert float((gradients - expected[1]).norm()) <= 1e-6 * float(expected[1].norm())
