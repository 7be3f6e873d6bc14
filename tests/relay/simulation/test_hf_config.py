"""A configuration is counted as transformers builds it, whatever it leaves out; what is no row of layers is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import relay
from relay.cli import main
from relay.simulation.described.hf_config import FAMILIES, read_configuration
from relay.simulation.described.transformer_shape import ModelShape, ShapeError
from relay.simulation.plan_file import caution

SMALL = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """A function that writes a configuration and gives its path."""

    def write(config: Any) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config, default=str))
        return path

    return write


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_family_leaves_out_is_what_transformers_has_by_default(name: str, written: Any) -> None:
    pytest.importorskip("transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    options: dict[str, Any] = {"num_hidden_layers": 1}
    if name == "gpt_neo":
        options = {"num_layers": 1, "attention_types": [[["global"], 1]]}
    if name in ("ministral", "nemotron"):
        options |= {"head_dim": 128, "num_key_value_heads": 8}
    if name == "electra":
        options |= {"embedding_size": 256}
    if name == "esm":
        options |= {"vocab_size": 33, "pad_token_id": 1, "position_embedding_type": "rotary"}  # as ESM-2 has it
    config = CONFIG_MAPPING[name](**options)
    family = FAMILIES[name]
    values = config.to_dict()
    values.pop("tie_word_embeddings", None)
    tied = config.tie_word_embeddings
    found = read_configuration(written(values))
    assert found.notes == ()
    assert (found.shape.tied, family.tied) == (tied, tied)
    with torch.device("meta"):
        model = (AutoModelForCausalLM if family.causal else AutoModelForMaskedLM).from_config(config)
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
    layer = max((sum(tensor.numel() for tensor in part.parameters() if tensor.dim() > 1) for part in lists), default=0)
    assert found.shape.layer_matrices == pytest.approx(layer, rel=0.001)
    names = [own for own, _ in model.named_parameters()]
    assert family.learned == any("posit" in own or "wpe" in own for own in names)


def test_grouped_queries_count_in_layers_without_gates(written: Any) -> None:
    """StarCoder2-3B, whose model card says 3.03e9 parameters."""
    config = {"model_type": "starcoder2", "hidden_size": 3072, "num_hidden_layers": 30, "num_attention_heads": 24}
    config |= {"num_key_value_heads": 2, "intermediate_size": 12288, "vocab_size": 49152}
    config |= {"hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 16384}
    path = written(config)
    assert read_configuration(path).shape.key_heads == 2
    found = relay.simulate(config=str(path), device="h200-sxm", seq=512, batch=1)
    assert found.memory.parameters == pytest.approx(3.03e9, rel=0.005)


def test_a_plan_for_fewer_heads_of_keys_is_not_for_the_model_of_relay_train() -> None:
    assert caution(ModelShape(2, 64, 4, 256, tied=True), 2, 64, 4) is None
    assert "2 heads of keys and values" in str(caution(ModelShape(2, 64, 4, 256, kv_heads=2, tied=True), 2, 64, 4))
    assert "heads of 32" in str(caution(ModelShape(2, 64, 4, 256, head_size=32, tied=True), 2, 64, 4))


def test_the_grouped_layer_is_the_usual_one_where_every_head_has_its_own_keys() -> None:
    import torch

    from relay.models.gpt import Block
    from relay.simulation.described.transformer_shape import GroupedBlock

    torch.manual_seed(0)
    grouped, usual = GroupedBlock(ModelShape(1, 32, 4)), Block(32, 4, 0.0)
    usual.load_state_dict(grouped.state_dict())
    states = torch.randn(2, 8, 32)
    torch.testing.assert_close(grouped(states), usual(states))


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        ({"model_type": "gpt_bigcode"}, 1),
        ({"model_type": "gpt_bigcode", "multi_query": False}, 4),
        ({"model_type": "falcon"}, 1),
        ({"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"model_type": "llama"}, 4),
    ],
)
def test_families_differ_in_how_many_heads_have_keys(config: dict[str, Any], heads: int, written: Any) -> None:
    assert read_configuration(written({**SMALL, **config})).shape.key_heads == heads


@pytest.mark.parametrize(
    ("config", "gated", "tied"),
    [
        ({"model_type": "llama"}, True, False),
        ({"model_type": "LLaMA", "tie_word_embeddings": None}, True, False),
        ({"model_type": "llama", "hidden_act": "gelu", "tie_word_embeddings": True}, True, True),
        ({"model_type": "starcoder2", "hidden_act": "silu"}, False, True),
        ({"model_type": "gpt2", "tie_word_embeddings": None}, False, True),
        ({"model_type": "gpt_neox"}, False, False),
        ({"model_type": "modernbert"}, True, True),
    ],
)
def test_gates_and_ties_follow_the_family(config: dict[str, Any], gated: bool, tied: bool, written: Any) -> None:
    shape = read_configuration(written({**SMALL, **config})).shape
    assert (shape.gated, shape.tied) == (gated, tied)


@pytest.mark.parametrize(
    "kind",
    ["t5", "T5", "bart", "whisper", "clip", "mamba", "mamba2", "jamba", "rwkv", "xlnet", "wav2vec2", "vit", "albert"],
)
def test_a_type_that_is_no_row_of_equal_layers_is_refused(kind: str, written: Any) -> None:
    with pytest.raises(ShapeError, match="not a plain transformer"):
        read_configuration(written({**SMALL, "model_type": kind}))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_local_experts": 8.0}, "layers of 8 experts"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "layers of linear_attention"),
        ({"state_size": 16}, "recurrent state"),
        ({"encoder_layers": 3, "decoder_layers": 3}, "an encoder with a decoder"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"word_embed_proj_dim": 32}, "embeddings of 32 before layers of 64"),
        ({"text_config": "small"}, "text_config should be an object"),
        ({"tie_word_embeddings": "no"}, "true, false or null"),
        ({"num_hidden_layers": 0}, "layers must be a whole number of at least 1"),
        ({"num_key_value_heads": -4}, "kv_heads must be a whole number of at least 0"),
        ({"hidden_size": 1024.0}, "whole numbers for sizes; received hidden_size = 1024.0"),
        ({"hidden_size": "2048"}, "whole numbers for sizes; received hidden_size = '2048'"),
        ({"intermediate_size": [64, 128, 64]}, "whole numbers for sizes"),
        ({"vocab_size": True}, "whole numbers for sizes"),
    ],
)
def test_what_cannot_be_counted_is_refused_and_asked_wrongly(more: dict[str, Any], message: str, written: Any) -> None:
    path = written({"model_type": "llama", **SMALL, **more})
    with pytest.raises(ShapeError, match=message):
        read_configuration(path)
    assert CliRunner().invoke(main, ["simulate", "--config", str(path)]).exit_code == 2


def test_assumptions_about_a_configuration_are_among_the_notes(written: Any) -> None:
    assert "has no model_type" in read_configuration(written(SMALL)).notes[0]
    (note,) = read_configuration(written({**SMALL, "model_type": "novel", "hidden_act": "silu"})).notes
    assert "'novel', which is not known" in note
    assert "gates, like those of Llama" in note
    path = written({"model_type": "llava", "vision_config": {}, "text_config": {"model_type": "llama", **SMALL}})
    (note,) = read_configuration(path).notes
    assert "a vision part, which is not counted" in note
    command = [str(path), "--seq", "32", "--batch", "1", "--device", "t4"]
    assert note in CliRunner().invoke(main, ["simulate", "--config", *command]).stdout
    planned = CliRunner().invoke(main, ["plan", "--config", *command, "--state-dtype", "fp32", "--json"])
    assert note in planned.stderr
    assert json.loads(planned.stdout)["expected"]["notes"] == [note]


def test_sequences_beyond_a_table_of_positions_are_named(written: Any) -> None:
    sizes = {**SMALL, "max_position_embeddings": 64}
    options: dict[str, Any] = {"batch": 1, "device": "t4"}
    learned = str(written({"model_type": "gpt2", **sizes}))
    assert relay.simulate(config=learned, seq=64, **options).notes == ()
    assert "64 learned positions" in relay.simulate(config=learned, seq=65, **options).notes[0]
    assert relay.simulate(config=str(written({"model_type": "llama", **sizes})), seq=65, **options).notes == ()
    assert "1024 learned positions" in relay.simulate("gpt2", seq=1025, **options).notes[0]
