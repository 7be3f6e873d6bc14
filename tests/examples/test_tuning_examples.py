"""The examples of distillation, preferences and diffusion transformers run in their quick size."""

from __future__ import annotations

import math

import pytest
import torch

from tests.examples.test_examples import example


def test_a_student_is_distilled_from_a_teacher_that_is_relayed() -> None:
    losses = example("distillation").main(["--quick"])
    assert losses.teacher < losses.alone < math.log(256)
    assert losses.distilled != losses.alone


def test_the_loss_of_distillation_is_that_of_its_terms() -> None:
    module = example("distillation")
    student = module.Student(module.GPT(layers=1, hidden=8, heads=2, sequence=4), temperature=1.0, share=1.0)
    batch = {"input_ids": torch.arange(8).view(2, 4), "labels": torch.arange(8).view(2, 4)}
    own = student(**batch)["logits"].detach()
    assert student(**batch, teacher_logits=own)["loss"].item() == pytest.approx(0.0, abs=1e-6)


def test_a_diffusion_transformer_trains_in_full_and_with_adapters_as_plain_pytorch() -> None:
    results = example("diffusion_transformer").main(["--quick"])
    assert all(found.equal and found.after < found.before for found in results.values())
    assert results["adapted with LoRA"].trained < results["adapted in full"].trained


@pytest.mark.parametrize(
    "method", ["reward", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("dpo", "adapter"))]
)
def test_preferences_are_trained_by_each_method(method: str) -> None:
    pytest.importorskip("trl")
    logs = example("preference").main(["--quick", "--method", method])
    assert [entry["step"] for entry in logs] == [1, 2, 3]
    assert all(math.isfinite(entry["loss"]) and entry["grad_norm"] > 0 for entry in logs)
