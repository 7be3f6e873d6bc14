"""Hugging Face configurations as shapes: a `config.json` holds the sizes, and its `model_type` the architecture.

What a configuration leaves out (gates, tied embedding and head, the attention mask) is the default of its `model_type`
in transformers, which need not be installed. A model that is not a row of equal layers between an embedding and a head
is refused, because its parameters would be counted wrongly. No weights and no code are read.

Invariant: the notes name every assumption and every part that is not counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relay.simulation.described.transformer_shape import ModelShape, ShapeError


@dataclass(frozen=True)
class Family:
    """The architecture that models of one `model_type` share, and that a configuration may leave out.

    `gated`: three matrices in the feed-forward network. `tied`: embedding and head are one matrix. `learned`: a
    trained table of positions of finite length. `causal`: a position attends only to itself and those before it.
    """

    gated: bool = False
    tied: bool = True
    learned: bool = False
    causal: bool = True


_MEMBERS = {
    Family(gated=True, tied=False): (
        "llama mistral ministral ministral3 phi3 qwen2 qwen3 olmo olmo2 olmo3 stablelm granite exaone exaone4 cwm "
        "internlm3 hyperclovax seed_oss helium glm glm4 diffllama"
    ),
    Family(gated=True): "gemma gemma2 gemma3_text cohere cohere2 smollm3 ernie4_5 granite_swa modernbert-decoder",
    Family(gated=True, tied=False, causal=False): "eurobert",
    Family(gated=True, causal=False): "modernbert nomic_bert gte",
    Family(learned=True): "gpt2 gpt-sw3 gpt_bigcode gpt_neo opt biogpt openai-gpt",
    Family(learned=True, causal=False): (
        "bert roberta roberta-prelayernorm camembert xlm-roberta xlm-roberta-xl distilbert electra ernie mpnet ibert "
        "data2vec-text megatron-bert big_bird nystromformer yoso mra"
    ),
    Family(causal=False): "esm",
    Family(tied=False): "gpt_neox gptj codegen phi persimmon arcee apertus nemotron jais2",
    Family(): "bloom mpt falcon starcoder2 gpt_neox_japanese",
}
FAMILIES = {name: family for family, names in _MEMBERS.items() for name in names.split()}
"""The family of each `model_type`, with the defaults of the configuration classes in transformers."""

_NO_ROWS = {
    "is an encoder with a decoder": (
        "t5 t5gemma t5gemma2 mt5 umt5 longt5 pix2struct switch_transformers bart mbart mvp plbart pegasus pegasus_x "
        "bigbird_pegasus marian blenderbot blenderbot-small led m2m_100 nllb-moe fsmt prophetnet xlm-prophetnet "
        "encoder-decoder speech-encoder-decoder vision-encoder-decoder whisper speech_to_text speecht5 "
        "seamless_m4t seamless_m4t_v2 moonshine musicgen musicgen_melody trocr udop nougat rag florence2 "
        "pop2piano canary dia"
    ),
    "is a model of images, sounds or several of these": (
        "clip clip_text_model clip_vision_model clipseg clvp chinese_clip altclip align siglip siglip2 flava blip "
        "bridgetower xclip owlvit owlv2 groupvit vilt vit vit_mae deit beit swin swinv2 dinov2 wav2vec2 "
        "wav2vec2-conformer wav2vec2-bert hubert wavlm unispeech unispeech-sat sew sew-d data2vec-audio "
        "data2vec-vision clap encodec bark moshi git"
    ),
    "has a recurrent state instead of attention, in all of its layers or some": (
        "mamba mamba2 falcon_mamba falcon_h1 rwkv xlstm recurrent_gemma jamba bamba zamba zamba2 nemotron_h lfm2 "
        "lfm2_moe qwen3_next qwen3_5 qwen3_5_text kimi_linear minimax olmo_hybrid granitemoehybrid"
    ),
    "has layers of another kind than a transformer's": (
        "albert reformer funnel fnet perceiver canine xlnet squeezebert convbert mobilebert hrm_text dbrx deberta "
        "deberta-v2 luke longformer"
    ),
}
_REFUSED = {name: what for what, names in _NO_ROWS.items() for name in names.split()}
_STATES = ("state_size", "ssm_state_size", "d_state", "mamba_d_state", "ssm_cfg")
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention", "global", "local")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_OTHER_WIDTHS = ("embedding_size", "word_embed_proj_dim")
_GATED = ("silu", "swish", "swiglu")  # activations that mean a gate, for an unknown model_type

_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocabulary": ("vocab_size",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "ffn_hidden_size"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_size": ("head_dim",),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
}
_REQUIRED = ("layers", "hidden", "heads", "vocabulary")
_MULTI_QUERY = ("gpt_bigcode", "falcon")  # one head of keys and values by default


@dataclass(frozen=True)
class Configuration:
    """The shape in a configuration, the length of its table of learned positions (0 for none), and the assumptions."""

    shape: ModelShape
    positions: int = 0
    notes: tuple[str, ...] = ()


def read_configuration(path: str | Path) -> Configuration:
    """Read a Hugging Face `config.json`.

    Raises ShapeError where a size is missing or of the wrong type, and for a model that is not a row of equal layers.
    """
    return configuration_of(_read(path), path)


def configuration_of(outer: Mapping[str, Any], path: str | Path) -> Configuration:
    """The shape in a configuration. `path` names it in errors and notes. Raises ShapeError."""
    inner = outer.get("text_config") or {}
    if not isinstance(inner, dict):
        raise ShapeError(f"{path}: text_config should be an object; received {inner!r:.100}.")
    config = {**outer, **inner}
    kinds = [str(table.get("model_type") or "").strip().lower() for table in (outer, inner)]
    _refuse_other_architectures(config, kinds, path)
    kind = kinds[1] or kinds[0]
    family = FAMILIES.get(kind)
    notes = []
    if family is None:
        family = _guessed(config, kind)
        unknown = f"has the model_type {kind!r}, which is not known here" if kind else "has no model_type"
        layers = "layers with gates, like those of Llama" if family.gated else "layers like those of GPT-2"
        matrices = "one matrix" if family.tied else "two matrices"
        attention = "causal" if family.causal else "bidirectional"
        notes.append(
            f"{path} {unknown}. Assumed: {layers}, {matrices} for embedding and head unless the file says otherwise, "
            f"and {attention} attention."
        )
    parts = [part for part in ("vision", "audio") if f"{part}_config" in outer]
    if parts:
        notes.append(f"{path} has a {' and an '.join(parts)} part, which is not counted: only the text part is.")
    found = {field: _whole(config, names, path) for field, names in _NAMES.items()}
    for field in _REQUIRED:
        if field not in found or found[field] is None:
            raise ShapeError(f"{path} has no {field}: expected one of {', '.join(_NAMES[field])}.")
    positions = found.pop("positions") or 0
    sizes = {field: value for field, value in found.items() if value is not None}
    if kind == "mpt" and isinstance(config.get("expansion_ratio"), int):
        sizes["ffn"] = config["expansion_ratio"] * sizes["hidden"]
    if _flag(config, "multi_query", kind in _MULTI_QUERY, path):
        grouped = kind == "falcon" and _flag(config, "new_decoder_architecture", False, path)
        sizes["kv_heads"] = sizes.get("kv_heads", 1) if grouped else 1
    tied = _flag(config, "tie_word_embeddings", family.tied, path)
    causal = family.causal or _flag(config, "is_decoder", False, path)
    try:
        shape = ModelShape(**sizes, gated=family.gated, tied=tied, causal=causal)
    except ShapeError as wrong:
        raise ShapeError(f"{path}: {wrong}") from wrong
    return Configuration(shape, positions if family.learned else 0, tuple(notes))


def _read(path: str | Path) -> dict[str, Any]:
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as failure:
        raise ShapeError(f"The configuration {str(path)!r} cannot be read: {failure.strerror}.") from failure
    except (ValueError, RecursionError) as wrong:
        raise ShapeError(f"{path} is not JSON: {wrong}") from wrong
    if not isinstance(config, dict):
        raise ShapeError(f"{path} should hold one object, as a Hugging Face config.json does.")
    return config


def _guessed(config: Mapping[str, Any], kind: str) -> Family:
    """The family assumed for a `model_type` that is not listed: gates by the activation, an encoder by its name."""
    activation = config.get("hidden_act", config.get("activation_function", "gelu"))
    return Family(gated=activation in _GATED, causal="bert" not in kind)


def _whole(config: Mapping[str, Any], names: tuple[str, ...], path: str | Path) -> int | None:
    """The first of those keys that has a value; None where all are missing or null."""
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None:
        return None
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ShapeError(f"{path} should hold whole numbers for sizes; received {name} = {value!r:.100}.")
    return value


def _flag(config: Mapping[str, Any], name: str, default: bool, path: str | Path) -> bool:
    """The flag in the configuration, or the default where it is missing or null."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ShapeError(f"{path}: {name} should be true, false or null; received {value!r:.100}.")
    return value


def _refuse_other_architectures(config: dict[str, Any], kinds: list[str], path: str | Path) -> None:
    """Raise ShapeError for a model that is not a row of equal layers between an embedding and a head.

    Its parameters would be counted wrongly; those of a mixture of experts by a large factor.
    """
    found = next(_other_architectures(config, kinds), None)
    if found is not None:
        raise ShapeError(
            f"{path} {found}, which is not a plain transformer. relay.simulate(module, example=batch) takes any "
            "module, also on torch's meta device."
        )


def _other_architectures(config: Mapping[str, Any], kinds: list[str]) -> Iterator[str]:
    hidden = next((config[name] for name in _NAMES["hidden"] if config.get(name) is not None), None)
    for name in _EXPERTS:
        count = config.get(name)
        if isinstance(count, (int, float)) and count > 1:
            yield f"has layers of {count:g} experts"
    for kind in kinds:
        if kind in _REFUSED:
            yield f"is of model_type {kind!r} and {_REFUSED[kind]}"
    if config.get("is_encoder_decoder") or ("decoder_layers" in config and "encoder_layers" in config):
        yield "is an encoder with a decoder"
    for name in _OTHER_WIDTHS:
        if config.get(name) not in (None, hidden):
            yield f"has embeddings of {config[name]} before layers of {hidden}"
    if "num_hidden_groups" in config:
        yield "uses the same layers several times"
    if any(config.get(name) is not None for name in _STATES):
        yield "has a recurrent state instead of attention, in all of its layers or some"
    if config.get("kv_lora_rank") is not None:
        yield "has latent attention: keys and values of few dimensions that are projected up again"
    kinds_of_layers = config.get("layer_types")
    if isinstance(kinds_of_layers, list):
        strange = sorted({str(kind) for kind in kinds_of_layers} - set(_ATTENTION))
        if strange:
            yield f"has layers of {', '.join(strange)}"
