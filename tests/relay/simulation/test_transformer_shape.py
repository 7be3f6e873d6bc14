"""A simulation knows its model from a module, a configuration or a few numbers, or says why it cannot."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import relay
from relay.models import GPT
from relay.simulation.described.describe import describe
from relay.simulation.described.hf_config import read_configuration
from relay.simulation.described.transformer_shape import MODELS, ModelShape, ShapeError


def test_a_module_on_the_meta_device_is_simulated_as_its_shape_is() -> None:
    import torch

    with torch.device("meta"):
        module = GPT(vocabulary=256, layers=5, hidden=64, heads=2, sequence=32, tied=True)
        ids = torch.zeros(8, 32, dtype=torch.int64)
    example = {"input_ids": ids, "labels": ids}
    options: dict[str, Any] = {"device": "rtx-4090", "microbatches": 4}
    found = relay.simulate(module, example=example, **options)
    shape = ModelShape(5, 64, 2, 256, tied=True)
    same = relay.simulate(shape, batch=8, seq=32, **options)
    assert found.step_seconds == pytest.approx(same.step_seconds, rel=0.02)
    assert found.memory.parameters == same.memory.parameters
    assert all(parameter.is_meta for parameter in module.parameters())
    with pytest.raises(ShapeError, match="needs an example"):
        relay.simulate(module)


def test_a_hugging_face_configuration_gives_its_shape(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    config |= {"intermediate_size": 14336, "vocab_size": 128256, "hidden_act": "silu", "tie_word_embeddings": False}
    path.write_text(json.dumps(config))
    assert read_configuration(path).shape == MODELS["llama-3-8b"]
    assert relay.simulate("llama-3-8b", device="h200-sxm").memory.parameters == pytest.approx(8.03e9, rel=0.001)
    path.write_text(json.dumps({"hidden_size": 4096}))
    with pytest.raises(ShapeError, match="has no layers"):
        read_configuration(path)


@pytest.mark.parametrize(
    ("kind", "decodes", "causal"),
    [("gpt2", None, True), ("llama", None, True), ("bert", False, False), ("xlm-roberta", None, False),
     ("modernbert", None, False), ("esm", None, False), ("bert", True, True)],
)  # fmt: skip
@pytest.mark.sample("gpt2-None-True", "bert-False-False", "esm-None-False")
def test_positions_of_an_encoder_see_those_after_them(
    kind: str, decodes: bool | None, causal: bool, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    config = {"model_type": kind, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2}
    config |= {"vocab_size": 100} | ({} if decodes is None else {"is_decoder": decodes})
    path.write_text(json.dumps(config))
    shape = read_configuration(path).shape
    assert shape.causal == causal
    options: dict[str, Any] = {"device": "rtx-4090", "seq": 4096, "software": "fused"}
    other = replace(shape, causal=not causal)
    seconds = {variant.causal: relay.simulate(variant, **options).step_seconds for variant in (shape, other)}
    assert seconds[True] < seconds[False]


SMALL = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GPT2", {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 128}),
        ("Mpt", {"n_layers": 3, "d_model": 64, "n_heads": 4, "vocab_size": 100, "max_seq_len": 128}),
        ("Mistral", {**SMALL, "intermediate_size": 96, "num_key_value_heads": 2}),
        ("Gemma", {**SMALL, "intermediate_size": 96, "head_dim": 32, "num_key_value_heads": 1, "pad_token_id": 0}),
        ("Qwen3", {**SMALL, "intermediate_size": 96, "head_dim": 32, "num_key_value_heads": 2}),
    ],
)
@pytest.mark.sample("Mpt-options1", "Qwen3-options4")
def test_a_configuration_has_as_many_parameters_as_the_model_built_from_it(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    config = getattr(transformers, f"{name}Config")(**options)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    found = relay.simulate(config=str(tmp_path / "config.json"), seq=128, device="rtx-4090")
    # GPT-2's layer stands for MPT's too, which has no biases and no table of positions.
    slack = 128 * 64 + 3 * 13 * 64 if name == "Mpt" else 600
    assert count - 600 <= found.memory.parameters <= count + slack


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_local_experts": 8}, "layers of 8 experts"),
        ({"n_routed_experts": 64}, "layers of 64 experts"),
        ({"is_encoder_decoder": True}, "an encoder with a decoder"),
        ({"embedding_size": 16}, "embeddings of 16 before layers of 64"),
        ({"num_hidden_groups": 1}, "the same layers several times"),
        ({"hidden_size": "64"}, "whole numbers"),
    ],
)
def test_a_configuration_that_would_be_counted_wrongly_is_refused(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL, **more}))
    with pytest.raises(ShapeError, match=message):
        read_configuration(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Which model"),
        ({"model": "gpt9"}, "no model 'gpt9'"),
        ({"layers": 3}, "needs both layers and hidden"),
        ({"layers": 3, "hidden": 100, "heads": 7}, "multiple of heads"),
        ({"model": "gpt2", "batch": 2, "microbatches": 4}, "cannot be cut"),
    ],
)
def test_a_model_or_batch_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        relay.simulate(**options)


@pytest.mark.parametrize(
    ("hidden", "heads"), [(128, 1), (768, 6), (1600, 10), (8192, 64), (64, 1), (192, 2), (1601, 1), (1, 1)]
)
def test_the_default_number_of_heads_divides_the_hidden_size_into_heads_of_about_128(hidden: int, heads: int) -> None:
    assert hidden % heads == 0
    shape = describe(layers=1, hidden=hidden).shape
    assert isinstance(shape, ModelShape)
    assert shape.heads == heads


@pytest.mark.parametrize(
    "option",
    [
        {"stash": "disk"},
        {"state_dtype": "fp64"},
        {"recompute": -1},
        {"recompute": "none"},
        {"loss_scale": 3.0},
        {"loss_scale": None},
        {"clip_grad_norm": -1},
        {"clip_grad_norm": "1"},
        {"slots": 0},
        {"layers_per_slot": 0},
        {"microbatches": 0},
        {"microbatches": 2.0},
    ],
    ids=str,
)
def test_what_the_trainer_refuses_is_refused_in_the_same_words(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(option))}=") as simulated:
        relay.simulate(layers=1, hidden=32, heads=2, **option)
    with pytest.raises(ValueError, match=f"^{next(iter(option))}=") as trained:
        relay.Trainer(GPT(layers=1, hidden=32), **option)
    assert str(simulated.value) == str(trained.value)


@pytest.mark.parametrize("option", [{"seq": 0}, {"batch": 0}, {"batch": True}], ids=str)
def test_a_step_has_at_least_one_token(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a whole number of at least 1"):
        relay.simulate(layers=1, hidden=32, heads=2, microbatches=1, **option)
