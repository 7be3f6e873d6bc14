"""Other people's models, taken whole and as they are, train as they do in plain PyTorch."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import reference
from tests.support.zoo.families import FAMILIES, Family, convolutions, images
from tests.support.zoo.plain_models import Build
from tests.support.zoo.table import Entry, Group, cases

os.environ.setdefault("HF_HUB_OFFLINE", "1")

STEPS = 10

pytestmark = pytest.mark.filterwarnings("ignore:layer")  # routed experts run eagerly, and say so


def make(family: Family, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return family.make(dropout).train()


@pytest.mark.parametrize("entry", cases(Group.FAMILY))
@pytest.mark.sample("bert-classifier", "mistral", "nn.Transformer")
def test_ten_steps_of_every_family_are_equal_to_the_last_bit(build: Build, entry: Entry) -> None:
    """In three micro-batches, of which the last is ragged."""
    family = entry.family
    assert family is not None
    ours, plain = make(family), make(family)
    batches = [family.draw(5, seed) for seed in range(STEPS)]
    losses = reference.train(plain, batches, entry.microbatches, shares=family.shares)
    trainer = build(ours, microbatches=entry.microbatches)
    assert [trainer.step(batch).loss for batch in batches] == losses
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


WITHOUT = ["llama", "qwen3", "gemma", "bert-mlm", "roberta"]  # gpt2 and mistral are drawn without a mask above
IN_SOME_ROWS = ["gpt2", "bert-mlm", "roberta", "llama", "mistral", "qwen3", "gemma", "t5"]


def with_mask(family: Family, seed: int, masked: str) -> dict[str, Any]:
    """A batch without an attention mask, or with one in which in some rows nothing is masked, or in all."""
    batch = family.draw(5, seed)
    lengths = {"in no row": [8, 8, 8, 8, 8], "in some rows": [8, 8, 5, 8, 4]}.get(masked)
    batch.pop("attention_mask", None)
    if lengths is not None:
        length = batch["input_ids"].shape[1]
        batch["attention_mask"] = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
    return batch


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize(
    ("name", "mask"), [(name, "none") for name in WITHOUT] + [(name, "in some rows") for name in IN_SOME_ROWS]
)
@pytest.mark.sample("roberta-none", "llama-in some rows")
def test_with_and_without_a_mask_ten_steps_are_equal_to_the_last_bit(build: Build, name: str, mask: str) -> None:
    """Models look at the mask: where nothing is masked they compute attention without it, and so must we, in the
    micro-batches where it is so (the first has no mask, the second has, of three)."""
    family = FAMILIES[name]
    ours, plain = make(family), make(family)
    microbatches = 3
    kinds = ["in some rows", "in no row"] if mask == "in some rows" else [mask]
    batches = [with_mask(family, seed, kinds[seed % len(kinds)]) for seed in range(STEPS)]
    losses = reference.train(plain, batches, microbatches, shares=family.shares)
    trainer = build(ours, microbatches=microbatches)
    assert [trainer.step(batch).loss for batch in batches] == losses
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.sample("cpu:discrete")
def test_ten_steps_of_a_list_of_convolutions_with_batchnorm_are_equal(build: Build, device: str) -> None:
    torch.manual_seed(0)
    ours = convolutions(0.0)
    torch.manual_seed(0)
    plain = convolutions(0.0)
    drawn = [images(5, seed) for seed in range(STEPS)]
    batches = [(batch["pixel_values"], batch["labels"]) for batch in drawn]
    losses = reference.train(plain, batches, 2, loss=nn.functional.cross_entropy)
    trainer = build(ours, loss=nn.functional.cross_entropy, microbatches=2, device=device)
    assert [trainer.step(batch).loss for batch in batches] == losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


@pytest.mark.parametrize("entry", cases(Group.FAMILY))
@pytest.mark.sample("qwen3", "resnet")
def test_every_family_predicts_what_it_predicts_in_pytorch(build: Build, entry: Entry) -> None:
    family = entry.family
    assert family is not None
    ours, plain = make(family), make(family).eval()
    batch = family.draw(4, 0)
    with torch.no_grad():
        expected = plain(**batch)
    found = build(ours, microbatches=2).predict(batch)
    logits = found.logits if hasattr(found, "logits") else found.value
    torch.testing.assert_close(
        logits, expected.logits if hasattr(expected, "logits") else expected.value, rtol=1e-5, atol=1e-6
    )
