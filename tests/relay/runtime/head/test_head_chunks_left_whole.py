"""Which heads run over chunks of positions, and which are refused or left whole, with the reason; what chunks save."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relay
from hal.errors import OutOfMemory
from relay.errors import PartitionError
from tests.support.zoo.chunked_head import (
    CLASSES,
    LENGTH,
    LOSSES,
    Loss,
    Model,
    batch_of,
    cross_entropy,
    distance,
    flat,
    trained,
)


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
@pytest.mark.sample(2)
def test_what_is_not_position_by_position_is_refused_with_a_number_and_left_whole_with_auto(
    loss: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, batch = Model(Loss(loss, loss)), batch_of()
    before = copy.deepcopy(model)
    with relay.Trainer(model, microbatches=1, head_chunk_tokens=4) as trainer:
        with pytest.raises(PartitionError, match=rf"head_chunk_tokens=4: .*{reason}.*Use head_chunk_tokens='auto'"):
            trainer.step(batch)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    with pytest.raises(PartitionError, match=reason):
        relay.simulate(model, example=batch, microbatches=1, head_chunk_tokens=4)
    with caplog.at_level(logging.WARNING, "relay"):
        _, chunked = trained(model, batch, "auto", microbatches=1)
    assert reason in caplog.text
    assert "left whole" in caplog.text
    _, whole = trained(model, batch, None, microbatches=1)
    assert all(torch.equal(a, b) for a, b in zip(chunked.parameters(), whole.parameters(), strict=True))


def test_a_head_over_the_whole_batch_is_refused_with_a_number() -> None:
    def pairs(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs @ outputs.T, targets.new_tensor(range(len(outputs))))

    modules, batch = [nn.Linear(4, 4), nn.Linear(4, 4)], (torch.randn(4, 4), torch.zeros(4, dtype=torch.int64))
    with relay.Trainer(modules, pairs, microbatches=2, head_chunk_tokens=4, loss_over="batch") as trainer:
        with pytest.raises(PartitionError, match="the head runs over the whole batch"):
            trainer.step(batch)


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
    assert "head_chunk_tokens='auto' (the head takes " in str(refused.value)
    with relay.Trainer(modules, loss, microbatches=1, head_chunk_tokens=size) as trainer:
        assert trainer.step((ids, ids)).device_peak_bytes < refused.value.requested / 10


def test_a_head_that_is_left_whole_and_does_not_fit_is_refused_with_the_reason() -> None:
    model = Model(Loss(softmax_over_positions, softmax_over_positions))
    with relay.Trainer(model, microbatches=1, head_chunk_tokens="auto", capacity="5kB") as trainer:
        with pytest.raises(OutOfMemory, match=r"The head is left whole, since softmax goes over the positions"):
            trainer.step(batch_of())


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
