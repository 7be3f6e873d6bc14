"""The parity matrix over model families: every pair of options, against plain PyTorch.

The worst faults live in combinations. Each case is one family with one value of every option; the cases chosen cover
every pair of values. With RELAY_FULL_MATRIX=1 (make test-full) the whole product runs.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import reference
import torch
from families import FAMILIES
from torch import nn

import relay

os.environ.setdefault("HF_HUB_OFFLINE", "1")

STEPS = 3
MIDDLE = 2  # the step before which a run is looked at and its shape changed, where the option says so

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
}

Case = tuple[Any, ...]

pytestmark = pytest.mark.filterwarnings("ignore:layer")


def pairs_of(case: Case) -> set[tuple[int, Any, int, Any]]:
    """Every pair of values in a case, with their options' places."""
    return {(one, case[one], other, case[other]) for one, other in itertools.combinations(range(len(case)), 2)}


def pairwise() -> Iterator[Case]:
    """Cases that together hold every pair of values: greedily, each of a few drawn that covers the most new ones."""
    values = list(OPTIONS.values())
    missing: set[tuple[int, Any, int, Any]] = set()
    for one, other in itertools.combinations(range(len(values)), 2):
        missing |= {(one, first, other, second) for first in values[one] for second in values[other]}
    generator = torch.Generator().manual_seed(0)
    while missing:
        one, first, other, second = min(missing, key=repr)
        drawn = []
        for _ in range(40):
            case = [value[int(torch.randint(len(value), (), generator=generator))] for value in values]
            case[one], case[other] = first, second
            drawn.append(tuple(case))
        best = max(drawn, key=lambda case: len(pairs_of(case) & missing))
        missing -= pairs_of(best)
        yield best


def cases() -> list[Any]:
    full = os.environ.get("RELAY_FULL_MATRIX") == "1"
    chosen = itertools.product(*OPTIONS.values()) if full else pairwise()
    return [
        pytest.param(
            dict(zip(OPTIONS, case, strict=True)),
            id="-".join(str(value).replace(" ", "") for value in case),
            marks=pytest.mark.skipif(
                FAMILIES[case[0]].needs != "" and importlib.util.find_spec(FAMILIES[case[0]].needs) is None,
                reason="needs transformers",
            ),
        )
        for case in chosen
    ]


def test_the_cases_hold_every_pair_of_values() -> None:
    chosen = list(pairwise())
    wanted = sum(len(first) * len(second) for first, second in itertools.combinations(OPTIONS.values(), 2))
    assert len(set().union(*(pairs_of(case) for case in chosen))) == wanted
    assert len(chosen) < 60


def make(case: dict[str, Any]) -> nn.Module:
    family = FAMILIES[case["family"]]
    torch.manual_seed(0)
    model = family.make(case["dropout"]).train()
    if case["frozen"]:
        chosen = [parameter for name, parameter in model.named_parameters() if family.frozen in name]
        assert chosen
        for parameter in chosen:
            parameter.requires_grad_(False)
    return model


def train_plainly(model: nn.Module, case: dict[str, Any], batches: list[Any]) -> list[float]:
    """Plain PyTorch: autocast for bf16, clip_grad_norm_ for clipping."""
    family, microbatches = FAMILIES[case["family"]], case["cut"][0]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = reference.adamw(trainable)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        pieces = reference.cut(batch, microbatches)

        def call(piece: Any) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=case["precision"] == "bf16"):
                return model(**piece).loss

        losses.append(reference.gradients_of(call, pieces, family.shares(pieces)))
        if case["clip"] is not None:
            nn.utils.clip_grad_norm_(trainable, case["clip"])
        optimizer.step()
    return losses


def train_relayed(model: nn.Module, case: dict[str, Any], batches: list[Any], **changes: Any) -> list[float]:
    settings = {name: case[name] for name in ("precision", "stash", "slots", "device")} | changes
    losses = []
    with relay.Trainer(model, microbatches=case["cut"][0], clip_grad_norm=case["clip"], **settings) as trainer:
        for step, batch in enumerate(batches):
            if case["evaluated"] and step == MIDDLE:
                trainer.evaluate(batches[0])
            losses.append(trainer.step(batch).loss)
    return losses


@pytest.mark.parametrize("case", cases())
def test_every_combination_trains_as_plain_pytorch(case: dict[str, Any]) -> None:
    family = FAMILIES[case["family"]]
    batches = [family.draw(case["cut"][1], seed) for seed in range(STEPS)]
    ours, other = make(case), make(case)
    before = copy.deepcopy(ours.state_dict())
    losses = train_relayed(ours, case, batches)
    if case["dropout"]:
        # PyTorch draws other masks, so what is compared is the same run kept differently.
        changes = {"stash": "device", "slots": 2, "device": "cpu"}
        expected = train_relayed(other, {**case, "evaluated": False}, batches, **changes)
    else:
        expected = train_plainly(other, case, batches)
    exact = case["precision"] == "fp32" and case["clip"] is None and not (family.tied and case["cut"][0] > 1)
    if case["dropout"] or exact:
        assert losses == expected
        reference.assert_same_state(ours.state_dict(), other.state_dict())
    elif case["precision"] == "fp32":
        assert losses == pytest.approx(expected, rel=1e-5)
        for name, tensor in other.state_dict().items():
            # AdamW turns a rounding of a tiny gradient into a step of its own size at most
            torch.testing.assert_close(ours.state_dict()[name], tensor, rtol=1e-4, atol=2e-4)
    else:
        assert losses == pytest.approx(expected, rel=1e-2)
    if case["frozen"]:
        for name, parameter in ours.named_parameters():
            assert parameter.requires_grad or torch.equal(parameter, before[name])
