"""A configuration is the model that transformers builds from it, to the parameter, or it is refused by name.

`published.json` holds configurations with their published values, and under `_parameters` the counts that their
papers, model cards or checkpoints give, where these are exact.
"""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import relay
from relay.cli import main
from relay.simulation.described.transformer_shape import ShapeError

transformers = pytest.importorskip("transformers")

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "support" / "configurations" / "published.json").read_text(encoding="utf-8")
)
REFUSED = {
    "wav2vec2-base": "Wav2Vec2ForCTC.*depend on the data",  # CTC leaves out labels by their values
}
"""What is refused, with a part of the message."""

FLOAT32 = {"swin-tiny", "convnext-tiny", "hubert-large"}
"""Convolutions before a norm, whose half precision autocast does not have on the CPU."""

SMALL = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """A function that writes a configuration and gives its path."""

    def write(config: Any) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return str(path)

    return write


def built_by_transformers(config: dict[str, Any]) -> Any:
    """The model, without memory."""
    import torch

    settings = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    with torch.device("meta"):
        return getattr(transformers, config["architectures"][0])(settings)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.sample("gpt2", "bart-large", "vit-base-16")  # olmoe below
def test_a_published_configuration_has_as_many_parameters_as_transformers_counts_or_is_refused(
    name: str, written: Any
) -> None:
    config = dict(PUBLISHED[name])
    published = config.pop("_parameters", None)
    plain = built_by_transformers(config)
    options: dict[str, Any] = {"device": "h200-sxm", "batch": 1, "host_memory": "40TB", "must_fit": False}
    options["precision"] = "fp32" if name in FLOAT32 else "bf16"
    if plain.main_input_name == "input_ids":
        options["seq"] = 64
    if name in REFUSED:
        with pytest.raises(relay.errors.RelayError, match=REFUSED[name]):
            relay.simulate(config=written(config), **options)
        return
    found = relay.simulate(config=written(config), **options)
    assert found.memory.parameters == plain.num_parameters()
    if published is not None:
        assert found.memory.parameters == published
    assert found.active_parameters <= found.memory.parameters
    if found.fits:
        assert 0 < found.mfu.middle < 1


@pytest.mark.parametrize(
    ("name", "active"), [("mixtral-8x7b", 12.9e9), ("qwen3-30b-a3b", 3.3e9), ("olmoe-1b-7b", 1.3e9)]
)
@pytest.mark.sample("olmoe-1b-7b-1300000000.0")
def test_a_token_uses_as_many_parameters_of_routed_experts_as_their_papers_say(
    name: str, active: float, written: Any
) -> None:
    config = {name: value for name, value in PUBLISHED[name].items() if name != "_parameters"}
    options: dict[str, Any] = {"seq": 64, "batch": 1, "device": "h200-sxm", "host_memory": "40TB"}
    found = relay.simulate(config=written(config), **options)
    assert found.memory.parameters == PUBLISHED[name]["_parameters"]
    assert found.active_parameters == pytest.approx(active, rel=0.03)
    # 6 FLOPs for each active parameter and token, but for the embedding, and some for attention
    assert found.shape.model_flops(64) == pytest.approx(6 * active, rel=0.1)
    assert found.experts is not None
    assert found.experts.touched(1) == found.experts.chosen / found.experts.experts
    assert found.experts.touched(10**6) == pytest.approx(1)


def test_the_unit_of_speed_follows_the_input(written: Any) -> None:
    options: dict[str, Any] = {"batch": 2, "device": "t4", "precision": "fp32"}
    text = relay.simulate(config=written({"model_type": "llama", **SMALL}), seq=16, **options)
    assert (text.unit, text.units) == ("tokens", 32)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
    both = relay.simulate(config=written({"model_type": "t5", **sizes}), seq=16, **options)
    assert (both.unit, both.units) == ("tokens", 64)  # of the encoder and of the decoder
    vision = {**SMALL, "model_type": "vit", "image_size": 32, "patch_size": 16}
    images = relay.simulate(config=written(vision), **options)
    assert (images.unit, images.units) == ("images", 2)
    assert "images/s" in str(images)
    audio = {**SMALL, "model_type": "audio-spectrogram-transformer", "max_length": 64, "num_mel_bins": 32}
    sounds = relay.simulate(config=written(audio), **options)
    assert (sounds.unit, sounds.units) == ("seconds of audio", pytest.approx(1.28))


def test_the_command_gives_figures_by_their_unit(written: Any) -> None:
    vision = written({**SMALL, "model_type": "vit", "image_size": 32, "patch_size": 16})
    machine = ["--batch", "2", "--device", "t4", "--precision", "fp32", "--json"]
    result = CliRunner().invoke(main, ["simulate", "--config", vision, *machine])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["unit"] == "images"
    assert answer["images_per_step"] == 2
    assert not {"tokens_per_second", "joules_per_token"} & answer.keys()
    planned = CliRunner().invoke(main, ["plan", "--config", vision, *machine, "--state-dtype", "fp32"])
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["expected"]["unit"] == "images"
    refused = CliRunner().invoke(main, ["plan", "--config", vision, *machine[:-1], "--out", "plan.toml"])
    assert refused.exit_code == 2
    assert "which trains a GPT over bytes" in refused.stderr


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ("{", {}, "is not JSON"),
        ([1], {}, "one object"),
        ({"model_type": "novel"}, {}, "'novel', which transformers .* does not know"),
        (SMALL, {}, "the model_type ''"),
        ({"model_type": "llama", **SMALL, "hidden_size": "64"}, {}, "llama model that transformers cannot build"),
        ({"model_type": "gpt2", "n_positions": 64}, {"seq": 65}, "longer than the 64 learned positions"),
        ({"model_type": "vit"}, {"seq": 65}, "seq=65 is a number of tokens, and ViTForImageClassification takes"),
        ({"model_type": "llama", **SMALL}, {"seconds": 2.0}, "a length of audio, and LlamaForCausalLM takes input_ids"),
        ({"model_type": "whisper"}, {"seconds": 2.0}, "takes 30 seconds of audio"),
        ({"model_type": "timesformer"}, {}, "no class with a loss"),
    ],
)
def test_a_configuration_that_cannot_be_simulated_says_why(
    config: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(ShapeError, match=message):
        relay.simulate(config=str(path), device="t4", **options)


def test_a_configuration_without_transformers_names_the_extra(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
        return given(name, *arguments, **options)

    path = written({"model_type": "llama", **SMALL})
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ShapeError, match=r"pip install 'layer-relay\[hf\]'"):
        relay.simulate(config=path)


def test_a_length_beside_an_example_of_another_length_is_refused() -> None:
    import torch

    model = built_by_transformers({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL})
    ids = torch.empty(2, 16, dtype=torch.int64, device="meta")
    with pytest.raises(ShapeError, match="a sample of the example= has 16 tokens"):
        relay.simulate(model, example={"input_ids": ids, "labels": ids}, seq=32)


def test_weights_that_a_file_stores_quantised_are_noted(written: Any) -> None:
    config = {"model_type": "llama", **SMALL, "quantization_config": {"quant_method": "fp8"}}
    found = relay.simulate(config=written(config), seq=16, batch=1, device="t4")
    assert any("quantised (fp8)" in note for note in found.notes)


@pytest.mark.parametrize("bits", [None, "nf4", "int8", "fp8"])
@pytest.mark.sample("None", "nf4")
def test_adapters_train_what_peft_counts_and_quantised_weights_take_as_many_bytes(
    bits: str | None, written: Any
) -> None:
    peft = pytest.importorskip("peft")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL}
    options: dict[str, Any] = {"seq": 16, "batch": 1, "device": "h200-sxm", "precision": "bf16"}
    path = written({**config, "dtype": "bfloat16"})
    whole = relay.simulate(config=path, **options)
    found = relay.simulate(config=path, lora=4, **options, **({"quantize_frozen": bits} if bits else {}))
    wanted = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    plain = peft.get_peft_model(built_by_transformers(config), wanted)
    trained, _ = plain.get_nb_trainable_parameters()
    assert any(f"{trained:,} parameters are trained" in note for note in found.notes)
    moments = {state: size for state, _, size in found.memory.host if "moments" in state}
    assert set(moments.values()) == {4 * trained}
    # Of a layer: 4 x 32 x 32 of attention and 3 x 32 x 64; bf16, or codes and a bf16 scale for 64 of them
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 64)
    stored = {None: 2, "nf4": 0.5 + 2 / 64, "int8": 1 + 2 / 64, "fp8": 1 + 2 / 64}[bits] * matrices
    others = 2 * (2 * 64 * 32 + 5 * 32) + 4 * trained  # embedding, head and norms in bf16, adapters in float32
    weights = sum(size for state, _, size in found.memory.host if state in ("weights", "buffers"))
    assert weights == pytest.approx(stored + others, rel=0.1)
    # Weights that are not trained have no gradients: 4 FLOPs instead of 6, and the adapters some
    assert 0.6 < found.shape.model_flops(16) / whole.shape.model_flops(16) < 1


def test_adapters_are_refused_where_they_would_be_ignored(written: Any) -> None:
    path = written({"model_type": "llama", **SMALL})
    with pytest.raises(ValueError, match="are none without lora"):
        relay.simulate(config=path, dora=True)
    with pytest.raises(ShapeError, match="stores frozen weights, and none are without lora"):
        relay.simulate(config=path, quantize_frozen="fp8")
    with pytest.raises(ShapeError, match=r"lora: adapters are for a model given by a config\.json"):
        relay.simulate("gpt2", lora=4)
    with pytest.raises(ValueError, match="quantize_frozen='int3' must be one of"):
        relay.simulate(config=path, lora=4, quantize_frozen="int3")
    refused = CliRunner().invoke(main, ["plan", "--layers", "1", "--hidden", "64", "--lora", "4"])
    assert refused.exit_code == 2
    assert "adapters are for a model given by a config.json" in refused.stderr
