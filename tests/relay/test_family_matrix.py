"""The parity matrix over model families: every pair of options, against plain PyTorch.

The worst faults live in combinations. Each case is one family with one value of every option; the cases chosen cover
every pair of values, or more of them where more are asked for (tests/matrix.py).
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relay
from tests.support import matrix, reference
from tests.support.given_masks import GivenMasks
from tests.support.shared_captures import share
from tests.support.zoo.families import FAMILIES

os.environ.setdefault("HF_HUB_OFFLINE", "1")

STEPS = 3
MIDDLE = 2  # the step before which a run is evaluated, or saved and taken up by another trainer, if the case says so
SEED = 9

OPTIONS: dict[str, tuple[Any, ...]] = {
    "family": ("gpt2", "bert-mlm", "llama", "t5", "vit", "mixtral", "nn.TransformerEncoder", "resnet"),
    "precision": ("fp32", "bf16"),
    "stash": ("device", "host"),
    "clip": (None, 0.5),
    "cut": ((1, 4), (2, 4), (3, 5)),  # micro-batches and rows; the last is ragged
    "frozen": (False, True),
    "dropout": (0.0, 0.1),
    "slots": (1, 2, 3),
    "device": ("cpu", "cpu:discrete"),
    "evaluated": (False, True),
    "resumed": (False, True),
}

# What the models are cut into: with this the reference knows which mask is whose.
SEGMENTS: dict[str, tuple[str, ...]] = {
    "gpt2": ("prologue", *(f"transformer.h.{number}" for number in range(3)), "epilogue"),
    "bert-mlm": ("prologue", *(f"bert.encoder.layer.{number}" for number in range(3)), "epilogue"),
    "llama": ("prologue", *(f"model.layers.{number}" for number in range(3)), "epilogue"),
    "t5": (
        "prologue", "encoder.block.0", "encoder.block.1", "interlude.2", "decoder.block.0", "decoder.block.1",
        "epilogue",
    ),
    "vit": ("prologue", *(f"vit.layers.{number}" for number in range(3)), "epilogue"),
    "mixtral": ("prologue", *(f"model.layers.{number}" for number in range(3)), "epilogue"),
    "nn.TransformerEncoder": (*(f"body.layers.{number}" for number in range(3)), "epilogue"),
    "resnet": ("prologue", "stage1.0", "stage1.1", "interlude.2", "stage2.0", "stage2.1", "epilogue"),
}  # fmt: skip
# Dropouts outside of the blocks, in the order in which PyTorch comes to them: the decoder's embedding needs no block.
OUTSIDE = {"t5": ("prologue", "interlude.2", "prologue", "epilogue")}

pytestmark = pytest.mark.filterwarnings("ignore:layer")


def pairwise() -> Iterator[matrix.Case]:
    """Cases that together hold every pair of values: greedily, each of a few drawn that covers the most new ones."""
    missing = matrix.every(OPTIONS, 2)
    source = random.Random(0)
    while missing:
        wanted = dict(min(missing, key=repr))
        drawn = [{name: source.choice(values) for name, values in OPTIONS.items()} | wanted for _ in range(200)]
        best = max(drawn, key=lambda case: len(matrix.combinations(case, 2) & missing))
        missing -= matrix.combinations(best, 2)
        yield best


def cases() -> list[Any]:
    return [
        pytest.param(
            case,
            id="-".join(str(value).replace(" ", "") for value in case.values()),
            marks=pytest.mark.skipif(
                not FAMILIES[case["family"]].available,
                reason="needs transformers",
            ),
        )
        for case in matrix.cases(OPTIONS, pairwise())
    ]


def test_the_cases_hold_every_pair_of_values() -> None:
    chosen = list(pairwise())
    assert set().union(*(matrix.combinations(case, 2) for case in chosen)) == matrix.every(OPTIONS, 2)
    assert len(chosen) < 60


def make(case: dict[str, Any], seed: int = 0) -> nn.Module:
    family = FAMILIES[case["family"]]
    torch.manual_seed(seed)
    model = family.make(case["dropout"]).train()
    if case["frozen"]:
        chosen = [parameter for name, parameter in model.named_parameters() if family.frozen in name]
        assert chosen
        for parameter in chosen:
            parameter.requires_grad_(False)
    return model


def train_plainly(model: nn.Module, case: dict[str, Any], batches: list[Any]) -> list[float]:
    """Plain PyTorch: autocast for bf16, clip_grad_norm_ for clipping, and for dropout the masks that were promised."""
    name = case["family"]
    family, microbatches = FAMILIES[name], case["cut"][0]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = reference.adamw(trainable)
    if hasattr(model, "config") and case["dropout"]:
        # A cache for generation, which training has no use for, lays keys out anew. PyTorch's attention does not
        # care, but with dropout it is matrix products, and their backward rounds otherwise (README, Exactness).
        model.config.use_cache = False
    masks = GivenMasks(model, SEGMENTS[name], SEED, OUTSIDE.get(name, ()))
    losses = []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        pieces = reference.cut(batch, microbatches)
        numbers = iter(range(microbatches))

        def call(piece: Any, step: int = step, numbers: Iterator[int] = numbers) -> torch.Tensor:
            masks.begin(step, next(numbers))
            with (
                torch.autocast("cpu", torch.bfloat16, enabled=case["precision"] == "bf16"),
                masks if case["dropout"] else contextlib.nullcontext(),
            ):
                return model(**piece).loss

        losses.append(reference.gradients_of(call, pieces, family.shares(pieces)))
        if case["clip"] is not None:
            nn.utils.clip_grad_norm_(trainable, case["clip"])
        optimizer.step()
    assert bool(masks.drawn) == (case["dropout"] > 0)
    masks.remove()
    return losses


def train_relayed(case: dict[str, Any], batches: list[Any], folder: Path) -> tuple[nn.Module, list[float]]:
    """The model that was trained, and its losses. A run that is resumed goes on in another model and trainer."""

    def open_trainer(model: nn.Module) -> relay.Trainer:
        settings = {name: case[name] for name in ("precision", "stash", "slots", "device")}
        options = {"microbatches": case["cut"][0], "clip_grad_norm": case["clip"], "seed": SEED, **settings}
        return share(relay.Trainer(model, **options))

    model = make(case)
    trainer = open_trainer(model)
    losses = []
    try:
        for step, batch in enumerate(batches):
            if step == MIDDLE and case["evaluated"]:
                trainer.evaluate(batches[0])
            if step == MIDDLE and case["resumed"]:
                trainer.save(folder / "checkpoint")
                trainer.close()
                model = make(case, seed=1)
                trainer = open_trainer(model)
                assert trainer.load(folder / "checkpoint") == MIDDLE
            losses.append(trainer.step(batch).loss)
    finally:
        trainer.close()
    return model, losses


@pytest.mark.parametrize("case", cases())
@pytest.mark.sample(
    "nn.TransformerEncoder-bf16-device-0.5-(1,4)-True-0.1-2-cpu:discrete-True-False",
    "gpt2-fp32-host-0.5-(3,5)-True-0.1-3-cpu-False-False", "llama-bf16-host-None-(2,4)-False-0.1-2-cpu-False-False",
    "vit-fp32-host-0.5-(1,4)-False-0.0-1-cpu-False-False", "resnet-fp32-device-None-(2,4)-True-0.1-2-cpu-False-True",
    "bert-mlm-bf16-device-0.5-(2,4)-True-0.0-3-cpu:discrete-False-False",
    "mixtral-bf16-host-0.5-(1,4)-False-0.0-2-cpu-True-False",
    "t5-bf16-device-0.5-(1,4)-False-0.1-3-cpu:discrete-True-False",
    "nn.TransformerEncoder-fp32-host-None-(2,4)-False-0.0-3-cpu-False-True",
)  # fmt: skip
def test_every_combination_trains_as_plain_pytorch(case: dict[str, Any], tmp_path: Path) -> None:
    family = FAMILIES[case["family"]]
    batches = [family.draw(case["cut"][1], seed) for seed in range(STEPS)]
    plain = make(case)
    before = copy.deepcopy(plain.state_dict())
    ours, losses = train_relayed(case, batches, tmp_path)
    expected = train_plainly(plain, case, batches)
    if case["precision"] == "bf16" and case["dropout"]:
        # PyTorch's dropout on the CPU rounds 1 / (1 - p) to bf16, the relay's (as native_dropout) does not.
        assert losses == pytest.approx(expected, rel=1e-2)
    else:
        assert losses == expected
        reference.assert_same_state(ours.state_dict(), plain.state_dict())
    if case["frozen"]:
        for name, parameter in ours.named_parameters():
            assert parameter.requires_grad or torch.equal(parameter, before[name])
