"""Which values of a trace are a batch's rows, sums over it, or mixtures of its samples.

What a value is called is compared with what it does: PyTorch computes it for a batch and for the pieces of it.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from relay.capture import trace
from relay.partition.batch_flow.flow import BatchFlow
from relay.partition.batch_flow.labels import Count, Kind, Label, free, rows
from relay.partition.batch_flow.trace_pair import TracePair
from tests.support import reference
from tests.support.zoo.plain_models import Build

LENGTH, PIECE = 12, 4

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of model outputs (12, 5, 6), targets (12, 5) that are classes, some of them masked, and a parameter (6,)."""


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    classes = torch.randint(0, 6, (LENGTH, 5), generator=generator)
    classes[torch.rand(LENGTH, 5, generator=generator) < 0.3] = -100
    return torch.randn(LENGTH, 5, 6, generator=generator), classes, torch.randn(6, generator=generator)


OUTPUT, TARGET, WEIGHT = drawn()


def traced(function: Function, length: int) -> fx.GraphModule:
    return trace(
        lambda weight, output, target: [function(output, target, weight)],
        (WEIGHT, OUTPUT[:length].clone(), TARGET[:length].clone()),
        "the function",
    )


def flow_of(function: Function) -> BatchFlow:
    small, large = traced(function, PIECE), traced(function, LENGTH)
    weight, output, target = large.graph.find_nodes(op="placeholder")
    inputs = {weight: free(), output: rows(0), target: rows(0, given=True)}
    return BatchFlow(TracePair(small, large, (PIECE, LENGTH)), inputs)


def label_of(function: Function) -> Label:
    return flow_of(function).outputs[0]


def flat(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return output.reshape(-1, 6), target.reshape(-1)


ROW_WISE: dict[str, tuple[Function, int, int]] = {
    "a bag of embeddings": (lambda o, t, w: F.embedding_bag(t.clamp(min=0), w.outer(w), mode="mean"), 0, 1),
    "a linear layer": (lambda o, t, w: F.linear(o, w.expand(3, 6)), 0, 1),
    "a softmax over classes": (lambda o, t, w: o.softmax(-1), 0, 1),
    "flattened": (lambda o, t, w: o.flatten(0, 1), 0, 5),
    "flattened the other way round": (lambda o, t, w: o.transpose(0, 1).reshape(-1, 6), 0, 1),
    "and back": (lambda o, t, w: o.transpose(0, 1).reshape(-1, 6).view(5, LENGTH, 6) if len(o) == LENGTH
                 else o.transpose(0, 1).reshape(-1, 6).view(5, PIECE, 6), 1, 1),
    "attention": (lambda o, t, w: F.scaled_dot_product_attention(o, o, o), 0, 1),
    "products of each sample with itself": (lambda o, t, w: o @ o.transpose(1, 2), 0, 1),
    "einsum": (lambda o, t, w: torch.einsum("bti,btj->ijb", o, o), 2, 1),
    "a last token": (lambda o, t, w: o[torch.arange(len(o)), (t >= 0).sum(1).clamp(max=4)], 0, 1),
    "gathered": (lambda o, t, w: o.gather(2, t.clamp(min=0)[..., None]), 0, 1),
    "looked up": (lambda o, t, w: F.embedding(t.clamp(min=0), w.expand(6, 6)), 0, 1),
    "shifted in place": (lambda o, t, w: shifted(t), 0, 1),
    "masked": (lambda o, t, w: o.masked_fill((t < 0)[..., None], 0.0), 0, 1),
    "a parameter for each sample": (lambda o, t, w: w.expand(len(o), 6) + o[:, 0], 0, 1),
    "zeros beside it": (lambda o, t, w: torch.cat([torch.zeros(len(o), 1, 6), o], 1), 0, 1),
    "normed": (lambda o, t, w: F.layer_norm(o, (6,), w), 0, 1),
    "convolved": (lambda o, t, w: F.conv1d(o, w.expand(2, 5, 6)[..., :3]), 0, 1),
    "one-hot": (lambda o, t, w: F.one_hot(t.clamp(min=0), 6) * o, 0, 1),
    "sorted along classes": (lambda o, t, w: o.sort(-1).values, 0, 1),
    "summed over positions": (lambda o, t, w: o.cumsum(1).sum(1), 0, 1),
    "repeated": (lambda o, t, w: o.repeat_interleave(2, 0), 0, 2),
    "rolled along positions": (lambda o, t, w: o.roll(1, 1), 0, 1),
    "less the batch's own mean of a target": (lambda o, t, w: t - t.float().mean(), 0, 1),
}  # fmt: skip


def shifted(target: Tensor) -> Tensor:
    result = torch.zeros_like(target)
    result[:, 1:] = target[:, :-1]
    result[:, 0] = 3
    return result.masked_fill_(result == -100, 0)


TERMS: dict[str, tuple[Function, list[Count]]] = {
    "cross-entropy": (lambda o, t, w: F.cross_entropy(*flat(o, t)), [Count.TARGETS]),
    "its sum": (lambda o, t, w: F.cross_entropy(*flat(o, t), reduction="sum"), [Count.SUM]),
    "its sum over a number": (lambda o, t, w: F.cross_entropy(*flat(o, t), reduction="sum") / 28, [Count.SUM]),
    "its sum over the length": (
        lambda o, t, w: F.cross_entropy(*flat(o, t), reduction="sum") / len(o), [Count.SAMPLES],
    ),
    "over positions": (lambda o, t, w: o.square().sum() / o.shape[:2].numel(), [Count.SAMPLES]),
    "with probabilities": (lambda o, t, w: F.cross_entropy(o[:, 0], o[:, 1].softmax(1)), [Count.SAMPLES]),
    "of its own choices": (lambda o, t, w: F.cross_entropy(o[:, 0], o[:, 1].argmax(1)), [Count.SAMPLES]),
    "two of them": (
        lambda o, t, w: F.cross_entropy(o[:, 0], t[:, 0]) + F.cross_entropy(o[:, 1], t[:, 1]) / 2,
        [Count.TARGETS, Count.TARGETS],
    ),
    "and a mean": (lambda o, t, w: -F.cross_entropy(*flat(o, t)) - o.mean(), [Count.TARGETS, Count.SAMPLES]),
    "and a parameter's norm": (lambda o, t, w: o.square().sum() + w.norm(), [Count.SUM, Count.SAMPLES]),
    "means in a stack": (lambda o, t, w: torch.stack([o.mean(), o.sum()]).sum(), [Count.SAMPLES, Count.SUM]),
    "a masked mean": (lambda o, t, w: (o.mean(2) * (t >= 0)).sum() / (t >= 0).sum().clamp(min=1), [Count.SUM]),
    "a quotient of means": (lambda o, t, w: (o.mean(2) * (t >= 0)).mean() / (t >= 0).float().mean(), [Count.SAMPLES]),
    "a mean of each class": (lambda o, t, w: o.mean((0, 1)) @ w, [Count.SAMPLES]),
    "a gram matrix": (lambda o, t, w: (o[:, 0].T @ o[:, 0]).sum(), [Count.SUM]),
}  # fmt: skip

MIXED: dict[str, tuple[Function, str]] = {
    "a product of all with all": (lambda o, t, w: o[:, 0] @ o[:, 1].T, "matmul"),
    "by einsum": (lambda o, t, w: torch.einsum("bi,ci->bc", o[:, 0], o[:, 1]), "einsum"),
    "distances": (lambda o, t, w: torch.cdist(o[:, 0], o[:, 1]), "cdist"),
    "by broadcasting": (lambda o, t, w: o[:, None, 0] - o[None, :, 1], "sub"),
    "softmax over the batch": (lambda o, t, w: o.softmax(0), "softmax"),
    "sorted over the batch": (lambda o, t, w: o.sort(0).values, "sort"),
    "summed along the batch": (lambda o, t, w: o.cumsum(0), "cumsum"),
    "a deviation": (lambda o, t, w: o.std(), "std"),
    "a variance": (lambda o, t, w: o.var(0), "var"),
    "the largest": (lambda o, t, w: o.amax((0, 1)), "amax"),
    "turned round": (lambda o, t, w: o.flip(0) * o, "flip"),
    "rolled over the batch": (lambda o, t, w: o.roll(1, 0), "roll"),
    "numbered": (lambda o, t, w: o[:, 0, 0] * torch.arange(len(o)), "mul"),
    "less the mean": (lambda o, t, w: o - o.mean(0), "sub"),
    "a root of a mean": (lambda o, t, w: o.square().mean().sqrt(), "sqrt"),
    "a product of means": (lambda o, t, w: o.mean() * o.square().mean(), "mul"),
    "over a norm of its own": (lambda o, t, w: o.sum() / o.detach().abs().sum(), "div"),
    "one sample": (lambda o, t, w: o[0], "select"),
    "every other sample": (lambda o, t, w: o[::2] - o[1::2], "slice"),
    "attention over the batch": (
        lambda o, t, w: F.scaled_dot_product_attention(*(o.transpose(0, 1),) * 3), "scaled_dot_product_attention",
    ),
    "a batch norm by hand": (lambda o, t, w: (o - o.mean(0)) / o.std(0), "sub"),
    "a masked mean of what is chosen": (
        lambda o, t, w: F.cross_entropy(o[:, 0], o[:, 1].argmax(1).where(o[:, 1, 0] > 0, -100)), "cross_entropy_loss",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROW_WISE)
def test_what_is_row_wise_has_the_batchs_rows_where_it_is_said(name: str) -> None:
    function, dim, unit = ROW_WISE[name]
    label = label_of(function)
    assert (label.kind, label.dim) == (Kind.ROWS, dim)
    assert label.unit in (0, unit)
    if name.startswith("less the"):
        return  # it takes the whole batch's mean, which is put in its place
    whole = function(OUTPUT, TARGET, WEIGHT).movedim(dim, 0)
    for start in range(0, LENGTH, PIECE):
        piece = function(OUTPUT[start : start + PIECE], TARGET[start : start + PIECE], WEIGHT).movedim(dim, 0)
        outer = len(whole) // (LENGTH * unit)
        cut = whole.reshape(outer, LENGTH, unit, *whole.shape[1:])[:, start : start + PIECE]
        torch.testing.assert_close(cut.flatten(0, 2), piece)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings_train_in_micro_batches_as_in_plain_pytorch(build: Build, mode: str) -> None:
    def made() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.EmbeddingBag(12, 8, mode=mode), nn.Linear(8, 3)]

    generator = torch.Generator().manual_seed(2)
    batches = [
        (torch.randint(0, 12, (8, 5), generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(2)
    ]
    model, plain = made(), made()
    losses = reference.train(plain, batches, 4, loss=F.cross_entropy)
    trainer = build(model, loss=F.cross_entropy, microbatches=4)
    assert [trainer.step(batch).loss for batch in batches] == losses
    reference.assert_same_state(reference.state_of(model), reference.state_of(plain))


@pytest.mark.parametrize("name", TERMS)
def test_a_sum_of_terms_says_how_each_counts(name: str) -> None:
    function, counts = TERMS[name]
    label = label_of(function)
    assert label.kind is Kind.TERMS
    assert [term.count for term in label.terms] == counts


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_samples_names_the_op(name: str) -> None:
    function, op = MIXED[name]
    label = label_of(function)
    assert label.kind is Kind.MIXED
    assert label.cause is not None
    assert label.cause.op == op


def test_what_follows_from_the_batch_alone_is_the_whole_batchs() -> None:
    flow = flow_of(lambda o, t, w: (o.mean(2) * (t >= 0)).sum() / (t >= 0).sum())
    assert [node.name for node in flow.substituted] == ["sum_2"]
    flow = flow_of(lambda o, t, w: o.square().sum() / (len(o) - 1))
    assert [node.name for node, _ in flow.literals] == ["div"]


def test_a_number_that_is_the_length_by_chance_is_a_number() -> None:
    label = label_of(lambda o, t, w: o.sum() / LENGTH)
    assert [term.count for term in label.terms] == [Count.SUM]


def test_code_that_does_something_else_for_another_length_does_not_pair() -> None:
    def function(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return output.mean() if len(output) > PIECE else output.sum() / 2

    with pytest.raises(ValueError, match="mean is where a micro-batch has"):
        TracePair(traced(function, PIECE), traced(function, LENGTH), (PIECE, LENGTH))


def test_ops_that_do_nothing_for_one_sample_pair_with_what_they_are_given() -> None:
    def function(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        kept = weight[None, :].expand(len(output), 6) if len(output) > 1 else weight[None, :]
        return (output[:, 1:].contiguous().view(-1, 6) @ kept[0]).sum()

    assert TracePair(traced(function, 1), traced(function, LENGTH), (1, LENGTH)).small_of
