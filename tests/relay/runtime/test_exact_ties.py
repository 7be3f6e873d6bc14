"""What keeping the gradients of tied weights for each micro-batch costs, when it is given up, and what is then said."""

from __future__ import annotations

import copy
import functools
import importlib.util
import logging
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from hal.errors import OutOfMemory
from relay.errors import PartitionError
from relay.models.gpt import GPT
from tests.support import mixed_reference, reference
from tests.support.zoo.families import FAMILIES
from tests.support.zoo.plain_models import WIDTH, Block, Build, Output, Stack, batches, check, gpt

os.environ.setdefault("HF_HUB_OFFLINE", "1")

KEPT = "tied gradients of each micro-batch"
OFTEN: dict[str, Any] = {"microbatches": 10}
"""With so many micro-batches the kept gradients of `narrow` are more than all else."""


def narrow() -> GPT:
    """So few tokens that a batch looks most of them up, and whole gradients are kept."""
    return gpt(1, tied=True, vocabulary=220)


def wide(layers: int = 1) -> GPT:
    """So many tokens that a batch of 120 looks few of them up, and only those rows are kept."""
    return gpt(layers, tied=True, vocabulary=2048)


# **** to the last bit ****


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize(
    "name",
    [
        "albert",
        "bart",
        "bloom",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("gpt2", "gemma", "opt", "distilbert", "t5-tied")
        ),
    ],
)
@pytest.mark.sample("bloom")
def test_architectures_that_tie_their_weights_are_equal_in_three_micro_batches(build: Build, name: str) -> None:
    family = FAMILIES[name]
    torch.manual_seed(0)
    ours = family.make(0.0).train()
    torch.manual_seed(0)
    plain = family.make(0.0).train()
    given = [family.draw(5, seed) for seed in range(3)]
    losses = reference.train(plain, given, 3, shares=family.shares)
    trainer = build(ours, microbatches=3)
    assert [trainer.step(batch).loss for batch in given] == losses
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


class Twice(Block):
    """A block that uses its weight twice."""

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(super().forward(value))


class Between(Stack):
    """One weight for all blocks; the one in the middle uses it twice, and the head besides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Twice()
        self.layers[1].inner.weight = self.layers[2].inner.weight = self.layers[0].inner.weight


class First(Between):
    """The same, with two uses in the segment whose gradient arrives last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0], self.layers[1] = self.layers[1], self.layers[0]


@pytest.mark.parametrize("model", [Between, First])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.sample(3)
def test_two_uses_in_one_segment_are_added_one_after_the_other(
    build: Build, model: type[Stack], microbatches: int
) -> None:
    check(build, model, batches(3), microbatches=microbatches)


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.sample("host")
def test_pieces_of_their_own_shapes_with_evaluations_between_are_equal(build: Build, stash: str) -> None:
    model, plain = gpt(2, tied=True), gpt(2, tied=True)
    shapes = [(3, 12), (2, 7), (4, 5)]
    pieces = [reference.text_batches(1, *shape, seed=number)[0] for number, shape in enumerate(shapes)]
    optimizer = reference.adamw(list(plain.parameters()))
    trainer = build(model, stash=stash, device="cpu:discrete")
    for _ in range(3):
        optimizer.zero_grad()
        loss = reference.gradients_of(reference.caller(plain, None), pieces, [0.5, 0.25, 0.25])
        optimizer.step()
        assert trainer.step(pieces=pieces, weights=[0.5, 0.25, 0.25]).loss == loss
        trainer.evaluate(pieces[0])
    reference.assert_same_state(model.state_dict(), plain.state_dict())


# **** the rows that are looked up ****

ROWS: dict[str, dict[str, Any]] = {
    "device": {},
    "host, discrete": {"stash": "host", "device": "cpu:discrete"},
    "bf16, clipped": {"precision": "bf16", "clip_grad_norm": 0.1, "device": "cpu:discrete"},
}


@pytest.mark.parametrize("options", ROWS.values(), ids=ROWS)
@pytest.mark.sample("bf16, clipped")
def test_only_rows_that_the_batch_looks_up_are_kept_of_a_large_embedding(build: Build, options: Any) -> None:
    model, plain = wide(2), wide(2)
    given = reference.text_batches(3, batch=10, vocabulary=2048)
    found = mixed_reference.train(
        plain, given, 10, precision=options.get("precision", "fp32"), clip_norm=options.get("clip_grad_norm")
    )
    trainer = build(model, **OFTEN, **options)
    metrics = [trainer.step(batch) for batch in given]
    assert [one.loss for one in metrics] == found.losses
    assert [one.grad_norm for one in metrics] == found.norms
    reference.assert_same_state(model.state_dict(), plain.state_dict())
    if options.get("stash") == "host":
        rows = {state: size for state, _, size in trainer.ledger.rows()}
        assert rows[KEPT] == 10 * 120 * 16 * 4  # a row for each token of the batch, in each micro-batch


class Adding(Block):
    """A layer that looks words up."""

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.words = words

    def forward(self, value: Tensor, ids: Tensor) -> Tensor:
        return super().forward(value + self.words(ids))


class Looked(nn.Module):
    """One matrix looked up twice before the layers, once by shifted tokens, and in each layer, and used as the head."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.words = nn.Embedding(200, WIDTH, padding_idx=padding)
        self.layers = nn.ModuleList(Adding(self.words) for _ in range(3))
        self.head = nn.Linear(WIDTH, 200, bias=False)
        self.head.weight = self.words.weight

    def forward(self, first: Tensor, second: Tensor, labels: Tensor) -> Output:
        value = self.words(first) + self.words(second.roll(1, 1))
        for layer in self.layers:
            value = layer(value, second)
        scores = self.head(value)
        return Output(nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores)


@pytest.mark.parametrize("padding", [None, 3])
def test_rows_looked_up_in_several_segments_are_added_in_order(build: Build, padding: int | None) -> None:
    generator = torch.Generator().manual_seed(2)
    given = [
        {name: torch.randint(0, 30, (5, 4), generator=generator) for name in ("first", "second", "labels")}
        for _ in range(3)
    ]
    trainer = check(build, functools.partial(Looked, padding), given, microbatches=3, exact_ties=True, stash="host")
    rows = {state: size for state, _, size in trainer.ledger.rows()}
    assert rows[KEPT] == 3 * 60 * WIDTH * 4  # three times the 20 tokens of a batch


class Shifted(nn.Module):
    """One matrix used three times, as T5 does: for the inputs, for the labels behind a start token, and as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(200, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 200, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Output:
        before = labels.new_zeros(labels.shape)
        before[:, 1:] = labels[:, :-1].clone()
        before[:, 0] = 7
        value = self.words(ids) + self.words(before.masked_fill(before == -100, 0))
        for layer in self.layers:
            value = layer(value)
        scores = self.head(value)
        return Output(nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores)


def test_rows_are_looked_up_by_labels_behind_a_start_token(build: Build) -> None:
    generator = torch.Generator().manual_seed(2)
    given = [{name: torch.randint(0, 200, (5, 4), generator=generator) for name in ("ids", "labels")} for _ in range(3)]
    trainer = check(build, Shifted, given, microbatches=3, exact_ties=True, stash="host")
    rows = {state: size for state, _, size in trainer.ledger.rows()}
    assert rows[KEPT] == 3 * 40 * WIDTH * 4  # a row for each of the 20 inputs and 20 labels of a batch


def test_a_token_outside_of_the_vocabulary_is_refused_as_ever(build: Build) -> None:
    batch = reference.text_batches(1, batch=10)[0]
    batch["input_ids"][0, 0] = 2048
    trainer = build(wide())
    with pytest.raises(IndexError, match="2048"):
        trainer.step(batch)


# **** what it costs, and when it is too much ****


def test_what_is_kept_is_one_gradient_for_each_micro_batch_on_the_device(build: Build) -> None:
    def peak(**options: Any) -> int:
        return build(gpt(2, tied=True), device="cpu:discrete", slots=1, **options).step(batch).device_peak_bytes

    batch = reference.text_batches(1, batch=10)[0]
    one = 64 * 16 * 4
    # The head, the largest segment, returns that gradient as a value then, and not in the slot.
    assert peak() - peak(exact_ties=False) in (4 * one, 3 * one)


def test_more_than_all_else_is_given_up_once_by_name_and_true_keeps_it(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    given = reference.text_batches(2, batch=10)
    plain = narrow()
    losses = reference.train(plain, given, 10)
    with caplog.at_level(logging.WARNING, "relay"):
        loose = build(narrow(), **OFTEN)
        assert [loose.step(batch).loss for batch in given] == pytest.approx(losses, rel=1e-5)
        loose.step(given[0])
    said = [record.message for record in caplog.records if "tied" in record.message]
    assert len(said) == 1
    assert "embedding.token.weight" in said[0]
    assert "exact_ties=True" in said[0]
    model = narrow()
    exact = build(model, exact_ties=True, stash="host", **OFTEN)
    assert [exact.step(batch).loss for batch in given] == losses
    reference.assert_same_state(model.state_dict(), plain.state_dict())
    rows = {state: size for state, _, size in exact.ledger.rows()}
    assert rows[KEPT] == 10 * 220 * 16 * 4


def test_a_device_without_room_gives_it_up_and_true_is_refused_with_what_would_fit(build: Build) -> None:
    batch = reference.text_batches(1, batch=10)[0]
    needed = build(wide(), device="cpu:discrete", exact_ties=False).step(batch).device_peak_bytes
    given_up = build(wide(), device="cpu:discrete", capacity=needed + 1000)
    assert given_up.step(batch).device_peak_bytes == needed
    refused = build(wide(), device="cpu:discrete", capacity=needed + 1000, exact_ties=True)
    with pytest.raises(OutOfMemory, match="exact_ties=False"):
        refused.step(batch)


def test_a_host_without_room_gives_it_up(build: Build) -> None:
    batch = reference.text_batches(1, batch=10)[0]
    settings: dict[str, Any] = {"stash": "host", "device": "cpu:discrete"}
    needed = build(wide(), exact_ties=False, **settings).step(batch).host_bytes
    assert build(wide(), host_memory=needed, **settings).step(batch).host_bytes <= needed
    with pytest.raises(OutOfMemory, match="tied gradients"):
        build(wide(), host_memory=needed, exact_ties=True, **settings).step(batch)


class Asking(Block):
    """It runs eagerly, since its data decide."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) if value.sum() < 1e9 else value


class Eager(Stack):
    """The ends share a weight, and so do two blocks, one of which runs eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Asking()
        self.layers[1].inner.weight = self.layers[0].inner.weight


@pytest.mark.filterwarnings("ignore:layer")
def test_a_layer_that_runs_eagerly_is_named_and_true_is_refused(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Eager()
    with caplog.at_level(logging.WARNING, "relay"):
        build(model, microbatches=3).step(batches(1)[0])
    assert "'layers.1' runs eagerly" in caplog.text
    with pytest.raises(PartitionError, match="exact_ties=True"):
        build(Eager(), microbatches=3, exact_ties=True).step(batches(1)[0])


@pytest.mark.parametrize("device", ["numpy", "opencl", "onnx:cpu"])
@pytest.mark.sample("onnx:cpu")
def test_devices_that_do_not_run_pytorch_agree_to_rounding(build: Build, device: str) -> None:
    if device != "numpy":
        pytest.importorskip({"opencl": "pyopencl", "onnx:cpu": "onnxruntime"}[device])
    given = reference.text_batches(2, batch=10)
    plain = gpt(1, tied=True)
    losses = reference.train(plain, given, 3)
    model = gpt(1, tied=True)
    trainer = build(model, microbatches=3, device=device, exact_ties=True)
    assert [trainer.step(batch).loss for batch in given] == pytest.approx(losses, rel=1e-4)


def test_a_layer_that_shares_weights_with_two_later_layers_adds_both_in_order() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    layers[1][0].weight = layers[0][0].weight
    layers[2][2].weight = layers[0][2].weight
    plain = copy.deepcopy(nn.Sequential(*layers))
    inputs, targets = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    for rows in (slice(0, 2), slice(2, 4)):
        (nn.functional.mse_loss(plain(inputs[rows].clone()), targets[rows].clone()) / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    with relay.Trainer(layers, nn.functional.mse_loss, optimizer=relay.SGD(lr=0.1), microbatches=2) as trainer:
        trainer.step((inputs, targets))
    mine = nn.Sequential(*layers)
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), plain.parameters(), strict=True))
