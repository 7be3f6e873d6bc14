"""Hugging Face folders are written for transformers to load, and are loaded into models without memory."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import relay
from relay.errors import RelayError
from relay.models.huggingface import empty_weights, load_weights
from tests.support import reference
from tests.support.zoo.families import FAMILIES, WIDTH

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")


def trained(name: str) -> tuple[nn.Module, relay.Trainer]:
    torch.manual_seed(0)
    model = FAMILIES[name].make(0.0)
    trainer = relay.Trainer(model, microbatches=2)
    trainer.step(FAMILIES[name].draw(4, 0))
    return model, trainer


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5-tied", "bert-classifier"])
def test_a_saved_folder_is_loaded_by_transformers_with_every_weight(name: str, tmp_path: Path) -> None:
    model, trainer = trained(name)
    with trainer:
        trainer.save_pretrained(tmp_path, shard_size="20KB")
        shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
        assert len(shards) > 1
        assert set(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].values()) == set(
            shards
        )
        loaded = type(model).from_pretrained(tmp_path)
        reference.assert_same_state(loaded.state_dict(), trainer.state_dict())


def test_a_saved_folder_fills_a_model_made_without_memory_and_training_goes_on_the_same(tmp_path: Path) -> None:
    model, trainer = trained("qwen3")
    with trainer:
        trainer.save_pretrained(tmp_path)
    with empty_weights():
        empty = type(model)(copy.deepcopy(model.config))
    assert all(parameter.is_meta for parameter in empty.parameters())
    load_weights(empty, tmp_path)
    assert empty.lm_head.weight is empty.model.embed_tokens.weight
    reference.assert_same_state(empty.state_dict(), model.state_dict())
    batch = FAMILIES["qwen3"].draw(4, 1)
    with relay.Trainer(empty, microbatches=2) as one, relay.Trainer(copy.deepcopy(model), microbatches=2) as other:
        assert one.step(batch).loss == other.step(batch).loss


def test_a_folder_that_does_not_fit_is_refused_with_the_tensor(tmp_path: Path) -> None:
    model, trainer = trained("llama")
    with trainer:
        trainer.save_pretrained(tmp_path)
    other = copy.deepcopy(model)
    other.lm_head = nn.Linear(WIDTH, 3, bias=False)
    with pytest.raises(RelayError, match="lm_head"):
        load_weights(other, tmp_path)
    other.lm_head = nn.Linear(WIDTH, 48)
    with pytest.raises(RelayError, match=r"lacks 1 .*lm_head\.bias"):
        load_weights(other, tmp_path)
    with pytest.raises(RelayError, match=r"no \.safetensors"):
        load_weights(model, tmp_path / "nowhere")


def test_a_model_of_ones_own_has_no_such_folder(tmp_path: Path) -> None:
    with (
        relay.Trainer([nn.Linear(2, 2)], loss=nn.functional.mse_loss) as trainer,
        pytest.raises(TypeError, match=r"state_dict\(\)"),
    ):
        trainer.save_pretrained(tmp_path)
