"""Hugging Face folders are written for transformers to load, and are loaded into models without memory."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import relay
from relay.errors import RelayError
from relay.models import empty_weights, load_weights
from relay.models.save_pretrained import save_pretrained
from tests.support import reference
from tests.support.zoo.families import FAMILIES, WIDTH

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")


def trained(name: str, **options: str) -> tuple[nn.Module, relay.Trainer]:
    torch.manual_seed(0)
    model = FAMILIES[name].make(0.0)
    trainer = relay.Trainer(model, microbatches=2, **options)
    trainer.step(FAMILIES[name].draw(4, 0))
    return model, trainer


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5-tied", "bert-classifier"])
@pytest.mark.sample("llama", "bert-classifier")
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
    with relay.Trainer(empty, microbatches=2) as ours, relay.Trainer(copy.deepcopy(model), microbatches=2) as theirs:
        assert ours.step(batch).loss == theirs.step(batch).loss


def test_split_masters_are_saved_as_float32(tmp_path: Path) -> None:
    folders = {masters: tmp_path / masters for masters in ("split", "fp32")}
    for masters, folder in folders.items():
        _, trainer = trained("llama", precision="bf16", master_weights=masters)
        with trainer:
            trainer.save_pretrained(folder)
    reference.assert_same_state(tensors_of(folders["split"]), tensors_of(folders["fp32"]))
    settings = [json.loads((folder / "config.json").read_text()) for folder in folders.values()]
    assert settings[0] == settings[1]


def test_a_folder_that_does_not_fit_is_refused_with_the_tensor(tmp_path: Path) -> None:
    model, trainer = trained("llama")
    with trainer:
        trainer.save_pretrained(tmp_path, shard_size="5KB")
    other = copy.deepcopy(model)
    other.lm_head = nn.Linear(WIDTH, 3, bias=False)
    with pytest.raises(RelayError, match=r"lm_head\.weight of shape \(48, 16\), where the model has \(3, 16\)"):
        load_weights(other, tmp_path)
    other.lm_head = nn.Linear(WIDTH, 48)
    with pytest.raises(RelayError, match=r"lacks 1 of the model's tensors: lm_head\.bias.*allow_missing"):
        load_weights(other, tmp_path)
    other = copy.deepcopy(model)
    other.model.norm = nn.Identity()
    with pytest.raises(RelayError, match=r"no use for: model\.norm\.weight.*allow_unexpected=\['model\.norm\.\*'\]"):
        load_weights(other, tmp_path)
    with pytest.raises(RelayError, match=r"no \.safetensors"):
        load_weights(model, tmp_path / "nowhere")
    next(tmp_path.glob("model-00002-*")).unlink()
    with pytest.raises(RelayError, match=r"lacks 1 of the .* files .*model-00002"):
        load_weights(model, tmp_path)


def written_by_transformers(name: str, folder: Path) -> nn.Module:
    """A new model of a family, in a folder that transformers wrote by itself."""
    torch.manual_seed(0)
    model = FAMILIES[name].make(0.0)
    model.save_pretrained(folder)
    return model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found.update(safetensors.torch.load_file(file))
    return dict(sorted(found.items()))


OF_TRANSFORMERS = [name for name, family in FAMILIES.items() if family.needs == "transformers" and name != "t5"]
"""Those whose weights are tied as their configuration has it: the T5 is untied by hand."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("mixtral", "t5-tied") else pytest.mark.exhaustive)
        for name in OF_TRANSFORMERS
    ],
)
def test_folders_of_transformers_are_read_and_written_as_by_transformers(name: str, tmp_path: Path) -> None:
    """A Mixtral's folder has each expert by itself, under other names than the module's."""
    model = written_by_transformers(name, tmp_path / "theirs")
    with empty_weights():
        empty = type(model)(copy.deepcopy(model.config))
    assert load_weights(empty, tmp_path / "theirs") == ([], [])
    reference.assert_same_state(empty.state_dict(), model.state_dict())
    save_pretrained(empty, empty.state_dict(), tmp_path / "ours", "20KB")
    reference.assert_same_state(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))
    reference.assert_same_state(type(model).from_pretrained(tmp_path / "ours").state_dict(), model.state_dict())
    save_pretrained(empty, empty.state_dict(), tmp_path / "ours")
    assert [file.name for file in tmp_path.glob("ours/*.safetensors*")] == ["model.safetensors"]


def test_the_module_has_other_tensors_than_a_mixtrals_folder(tmp_path: Path) -> None:
    model = written_by_transformers("mixtral", tmp_path)
    assert not {name for name in tensors_of(tmp_path) if "experts" in name} & model.state_dict().keys()


@pytest.mark.parametrize("base", [True, False], ids=["of a base model", "of a model with another head"])
def test_a_folder_is_loaded_into_a_model_with_a_new_head(base: bool, tmp_path: Path) -> None:
    model = written_by_transformers("llama", tmp_path / "whole")
    if base:
        model.model.save_pretrained(tmp_path / "base")
    folder = tmp_path / ("base" if base else "whole")
    config = copy.deepcopy(model.config)
    config.num_labels = 3
    with empty_weights():
        empty = transformers.LlamaForSequenceClassification(config)
    with pytest.raises(RelayError, match=r"score\.weight"):
        load_weights(empty, folder, allow_unexpected=["lm_head.*"])
    assert all(parameter.is_meta for parameter in empty.parameters())
    torch.manual_seed(1)
    unmatched = load_weights(empty, folder, allow_missing=["score.*"], allow_unexpected=["lm_head.*"])
    assert unmatched == (["score.weight"], [] if base else ["lm_head.weight"])
    torch.manual_seed(1)
    theirs = transformers.LlamaForSequenceClassification.from_pretrained(folder, num_labels=3)
    reference.assert_same_state(empty.state_dict(), theirs.state_dict())
    empty.config.pad_token_id = 1
    with relay.Trainer(empty, microbatches=1) as trainer:
        trainer.step({"input_ids": torch.full((2, 8), 5), "labels": torch.tensor([0, 2])})


def test_a_head_of_ones_own_is_initialized_as_its_class_does_or_refused(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self, head: nn.Module) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), head

    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    body = nn.Linear(4, 4)
    safetensors.torch.save_file(
        {f"body.{key}": value for key, value in body.state_dict().items()}, tmp_path / "a.safetensors"
    )
    with empty_weights():
        model, strange = Model(nn.Linear(4, 2)), Model(Strange())
    torch.manual_seed(2)
    load_weights(model, tmp_path, allow_missing=["head.*"])
    torch.manual_seed(2)
    reference.assert_same_state(model.head.state_dict(), nn.Linear(4, 2).state_dict())
    reference.assert_same_state(model.body.state_dict(), body.state_dict())
    with pytest.raises(RelayError, match=r"head\.weight are initialized"):
        load_weights(strange, tmp_path, allow_missing=["head.*"])


def test_two_values_for_tied_weights_are_refused(tmp_path: Path) -> None:
    model = written_by_transformers("qwen3", tmp_path)
    found = tensors_of(tmp_path)
    safetensors.torch.save_file(
        {**found, "lm_head.weight": found["model.embed_tokens.weight"] + 1}, tmp_path / "model.safetensors"
    )
    with pytest.raises(RelayError, match="tied"):
        load_weights(model, tmp_path)


def test_a_model_of_ones_own_has_no_such_folder(tmp_path: Path) -> None:
    with (
        relay.Trainer([nn.Linear(2, 2)], loss=nn.functional.mse_loss) as trainer,
        pytest.raises(TypeError, match=r"state_dict\(\)"),
    ):
        trainer.save_pretrained(tmp_path)
