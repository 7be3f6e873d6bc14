"""Of an embedding the rows that a batch uses are sent, and plain PyTorch's numbers come out, to the last bit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from relay.errors import IndexOutOfRange
from relay.models import GPT
from relay.simulation.simulate import simulate
from tests.support import mixed_reference, reference

WORDS, WIDTH, LENGTH = 1000, 16, 6
LATE = "sim:generic,order=late,poison=on"


class Tables(nn.Module):
    """Two tables of words, of which one has a padding row and counts its words, and one of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=3)
        self.counted = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(200, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        shifted = torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=1)
        return self.words(tokens) + self.words(shifted).tanh() + self.counted(tokens % 7) + self.positions(places)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, value: Tensor) -> Tensor:
        return self.head(value.mean(1))


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Tables(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, WIDTH), Head()]


def batches(steps: int = 3, rows: int = 6, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for _ in range(steps):
        tokens = torch.randint(0, WORDS, (rows, LENGTH), generator=generator)
        tokens[:, -2:] = 3  # padding
        drawn.append((tokens, torch.randint(0, 5, (rows,), generator=generator)))
    return drawn


loss = nn.functional.cross_entropy
adamw = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.5, fused=True)
"""Decays a row that no batch uses, and moves one that an earlier batch used."""
ours = relay.AdamW(lr=1e-2, weight_decay=0.5)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "clipped": ({"clip_grad_norm": 0.3}, {"clip_norm": 0.3}),
    "clipped by value": ({"clip_grad_value": 1e-3}, {"clip_value": 1e-3}),
    "bf16": ({"precision": "bf16"}, {"precision": "bf16"}),
    "fp16": ({"precision": "fp16"}, {"precision": "fp16"}),
    "saved tensors": ({"recompute": False, "stash": "host", "layers_per_slot": 2}, {}),
    "deferred": ({"clip_grad_norm": 0.3, "defer_updates": True, "slots": 3}, {"clip_norm": 0.3}),
    "resident": ({"resident_layers": 4, "clip_grad_norm": 0.3}, {"clip_norm": 0.3}),
    "split masters": ({"precision": "bf16", "master_weights": "split"}, {"precision": "bf16"}),
    "torch's own optimizer": (
        {"optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)},
        {"optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)},
    ),
}
SAMPLE = {
    ("cpu:discrete", "plain"),
    ("cpu:discrete", "torch's own optimizer"),
    (LATE, "clipped"),
    ("cpu", "bf16"),
    (LATE, "plain"),
}


@pytest.mark.parametrize(
    ("device", "case"),
    [
        pytest.param(device, case, marks=() if (device, case) in SAMPLE else pytest.mark.exhaustive)
        for device in ("cpu:discrete", "cpu", LATE, "sim:generic,order=random,seed=3,poison=on")
        for case in CASES
    ],
)
@pytest.mark.sample("cpu:discrete-torch's own optimizer", "cpu-bf16", "sim:generic,order=late,poison=on-clipped")
def test_training_is_plain_pytorchs_to_the_last_bit(device: str, case: str) -> None:
    options, plainly = CASES[case]
    plain, given = layers(), batches()
    expected = mixed_reference.train(plain, given, 3, loss=loss, **{"optimizer": adamw, **plainly})
    with relay.Trainer(
        layers(), loss=loss, device=device, microbatches=3, sparse_rows=True, **{"optimizer": ours, **options}
    ) as trainer:
        found = [trainer.step(batch) for batch in given]
        assert [one.loss for one in found] == expected.losses
        assert [one.skipped for one in found] == expected.skipped
        if "fp16" not in case:  # there the norm is that of unscaled gradients, rounded otherwise
            assert [one.grad_norm for one in found] == expected.norms
        reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))
        rows = {state: size for state, _, size in trainer.ledger.rows()}
        # Of words, of 7 words, of positions. Where layers save tensors the indices that they compute are theirs.
        expected_rows = 64 if case == "saved tensors" else 128 + 64 + 64
        assert rows["rows in transit"] == 4 * WIDTH * expected_rows


def test_what_crosses_the_link_is_the_rows_and_the_simulator_counts_the_same() -> None:
    torch.manual_seed(0)
    model = GPT(layers=2, hidden=WIDTH, heads=2, sequence=8, tied=False, vocabulary=WORDS)
    batch = reference.text_batches(1, batch=4, length=8, vocabulary=WORDS)[0]
    figures = {}
    for option in (False, "auto"):
        with relay.Trainer(copy.deepcopy(model), device="cpu:discrete", microbatches=2, sparse_rows=option) as trainer:
            trainer.step(batch)
            figures[option] = trainer.step(batch)
            host = trainer.ledger.total
        found = simulate(
            copy.deepcopy(model), example=batch, microbatches=2, precision="fp32", device="generic", sparse_rows=option
        )
        assert found.step is not None
        assert figures[option].weight_bytes == found.step.weight_bytes
        assert figures[option].device_peak_bytes == found.memory.device_total
        assert host == found.memory.host_total
    # 32 words are looked up in a step: there is room for 64 rows, in the forward and in the backward.
    saved = figures[False].weight_bytes - figures["auto"].weight_bytes
    assert saved == 2 * 4 * WIDTH * (WORDS - 64)


@pytest.mark.parametrize("option", ["auto", True])
@pytest.mark.sample("True")
def test_a_table_of_which_no_part_is_left_out_is_sent_whole(option: str | bool) -> None:
    """Of 600 indices there may be 600 different ones: there is room for a power of two, so for more than 1,000."""
    for samples, expected in ((100, 0), (60, 512 if option is True else 0), (25, 256)):
        torch.manual_seed(0)
        modules = [nn.Embedding(WORDS, WIDTH), Head()]
        with relay.Trainer(modules, loss=loss, device="cpu:discrete", microbatches=2, sparse_rows=option) as trainer:
            trainer.step(batches(1, samples)[0])
            rows = {state: size for state, _, size in trainer.ledger.rows()}
            assert rows.get("rows in transit", 0) == 4 * WIDTH * expected


class Tied(nn.Module):
    """The table is the last layer's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        value = self.table(tokens)
        for layer in self.layers:
            value = layer(value)
        return {"loss": loss((value @ self.table.weight.T).flatten(0, 1), labels.flatten())}


class Weighed(nn.Module):
    """The table is used beside its lookups, in the same layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens) * self.table.weight.norm()


class Computed(nn.Module):
    """The indices follow from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.shift = nn.Parameter(torch.tensor(2.0))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table((tokens + self.shift.detach().long()) % WORDS) * self.shift


@pytest.mark.parametrize(
    ("make", "reason"),
    [(Weighed, "it is used by aten"), (Computed, "do not follow from the batch")],
    ids=["used otherwise", "computed indices"],
)
def test_a_table_that_needs_all_rows_is_sent_whole_and_that_is_said(make: Callable[[], nn.Module], reason: str) -> None:
    torch.manual_seed(0)
    plain = [make(), Head()]
    given = batches(2)
    model = copy.deepcopy(plain)
    losses = reference.train(plain, given, 2, loss=loss)
    with relay.Trainer(model, loss=loss, device="cpu:discrete", microbatches=2, sparse_rows=True) as trainer:
        with pytest.warns(UserWarning, match=reason):
            found = [trainer.step(batch).loss for batch in given]
        assert found == losses
        reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


def test_a_table_that_is_tied_to_the_head_is_sent_whole_and_that_is_said() -> None:
    torch.manual_seed(0)
    batch = reference.text_batches(1, batch=4, length=6, vocabulary=WORDS)[0]
    with relay.Trainer(Tied(), device="cpu:discrete", microbatches=1, sparse_rows=True) as trainer:
        given = {"tokens": batch["input_ids"], "labels": batch["labels"]}
        with pytest.warns(UserWarning, match="it is tied"):
            trainer.step(given)


def test_batches_of_other_sizes_evaluations_and_edits_between_steps_are_right(tmp_path: Path) -> None:
    """The rows of a pass do not stay for the next one, nor their gradients."""
    plain, model = layers(), layers()
    small, large = batches(4, 4), batches(2, 16, seed=7)
    given = [small[0], large[0], small[1], small[2], small[3]]
    with relay.Trainer(
        model, loss=loss, device="cpu:discrete", microbatches=2, sparse_rows=True, optimizer=ours
    ) as trainer:
        stepper = adamw(list(reference.parameters_of(plain)))
        for number, batch in enumerate(given):
            pieces = reference.cut(batch, 2)
            stepper.zero_grad()
            expected = reference.gradients_of(reference.caller(plain, loss), pieces, reference.by_samples(pieces))
            stepper.step()
            assert trainer.step(batch).loss == expected
            with torch.no_grad():
                pieces = reference.cut(large[1], 2)
                value = sum(reference.call_list(plain, loss, piece).item() / 2 for piece in pieces)
            assert trainer.evaluate(large[1]).loss == pytest.approx(value, rel=1e-6)
            if number == 1:
                trainer.save(tmp_path / "checkpoint").wait()
                trainer.load(tmp_path / "checkpoint")
            if number == 2:
                torch.manual_seed(3)
                fresh = nn.Linear(WIDTH, WIDTH)
                plain.insert(2, copy.deepcopy(fresh))
                stepper.add_param_group({"params": list(plain[2].parameters())})
                trainer.insert(2, fresh)
        reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


def test_an_index_beyond_the_table_is_refused_before_the_step() -> None:
    with relay.Trainer(layers(), loss=loss, device="cpu:discrete", microbatches=1, sparse_rows=True) as trainer:
        before = reference.copy_of(trainer.state_dict())
        tokens, targets = batches(1)[0]
        tokens[0, 0] = WORDS
        with pytest.raises(IndexOutOfRange, match=f"{WORDS}"):
            trainer.step((tokens, targets))
        reference.assert_same_state(trainer.state_dict(), before)
