"""A Hugging Face `config.json` as a model on torch's meta device, built by transformers, and an example of a batch.

No architecture is known by name: transformers builds the model that the file describes, and the relay partitions it as
it partitions one that trains. No weights and no code are read, and no hub is asked.

Invariant: the model has the parameters that transformers gives it; what cannot be built or called is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from relay.adapter_options import AdapterOptions
from relay.simulation.described.adapted import adapted
from relay.simulation.described.example_batch import example_batch, unit_of
from relay.simulation.described.meta_model import MetaModel
from relay.simulation.described.transformer_shape import ShapeError

_MAPPINGS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
)  # fmt: skip
"""Where a class with a loss is looked for, in this order, if the file names none."""


def read_configuration(path: str | Path) -> dict[str, Any]:
    """The object in a `config.json`. Raises ShapeError where it cannot be read or holds something else."""
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as failure:
        raise ShapeError(f"The configuration {str(path)!r} cannot be read: {failure.strerror}.") from failure
    except (ValueError, RecursionError) as wrong:
        raise ShapeError(f"{path} is not JSON: {wrong}") from wrong
    if not isinstance(config, dict):
        raise ShapeError(f"{path} should hold one object, as a Hugging Face config.json does.")
    return config


def build_from_configuration(config: Mapping[str, Any], path: str | Path) -> nn.Module:
    """The model that a configuration describes, on the meta device. `path` names the file in errors."""
    try:
        import transformers
    except ImportError as absent:
        raise ShapeError(
            f"{path} needs the package {absent.name!r}, which builds the model: pip install 'layer-relay[hf]'. Without "
            "it, give the model by --layers and --hidden, or a name with --model."
        ) from absent
    kind = str(config.get("model_type") or "")
    if kind not in transformers.CONFIG_MAPPING:
        raise ShapeError(
            f"{path} has the model_type {kind!r}, which transformers {transformers.__version__} does not know. Install "
            "a version that does, or give the module itself: relay.simulate(module, example=batch)."
        )
    try:
        settings = transformers.CONFIG_MAPPING[kind].from_dict({**config, "quantization_config": None})
        if getattr(settings, "is_encoder_decoder", False) and getattr(settings, "decoder_start_token_id", None) is None:
            settings.decoder_start_token_id = 0  # shapes do not depend on it
        with torch.device("meta"):
            built: nn.Module = _class_of(config, kind, path)(settings)
    except ShapeError:
        raise
    except Exception as wrong:  # each architecture checks its sizes in its own way
        reason = " ".join(str(wrong).split())[:300] or type(wrong).__name__
        raise ShapeError(f"{path} describes a {kind} model that transformers cannot build: {reason}") from wrong
    return built


def configured_model(
    path: str | Path, batch: int, seq: int | None, seconds: float | None, adapters: AdapterOptions, half: bool
) -> MetaModel:
    """The model of a `config.json` with a batch of so many samples.

    `seq` is the number of tokens in a sample, `seconds` the length of its audio; None for models that take no such
    length, or for the usual one. `adapters` are put in, for a run in `half` precision or not. Raises ShapeError.
    """
    config = read_configuration(path)
    built = build_from_configuration(config, path)
    example = example_batch(built, batch, seq, seconds)
    unit = unit_of(example.tensors, bool(getattr(built.config, "is_encoder_decoder", False)))  # type: ignore[arg-type]
    model, notes = adapted(built, adapters, half)
    return MetaModel(model.train(), example.tensors, (*_notes(config, path), *example.notes, *notes), unit)


def _class_of(config: Mapping[str, Any], kind: str, path: str | Path) -> Any:
    """The class with a loss: the one that the file names, or the first of transformers' for this kind of model."""
    import transformers
    from transformers.models.auto import modeling_auto

    for name in config.get("architectures") or ():
        found = getattr(transformers, name, None)
        if found is not None and ("For" in name or name.endswith(("LMHeadModel", "CLIPModel"))):
            return found
    for mapping in _MAPPINGS:
        name = getattr(modeling_auto, mapping, {}).get(kind)
        if isinstance(name, str) and hasattr(transformers, name):
            return getattr(transformers, name)
    raise ShapeError(
        f"{path} describes a {kind} model, for which transformers has no class with a loss. Give the module itself: "
        "relay.simulate(module, example=batch)."
    )


def _notes(config: Mapping[str, Any], path: str | Path) -> tuple[str, ...]:
    quantised = config.get("quantization_config")
    if not isinstance(quantised, Mapping):
        return ()
    method = quantised.get("quant_method", "some method")
    return (
        f"{path} stores its weights quantised ({method}). The model is trained here in float32 masters; "
        "--quantize-frozen stores frozen weights in few bits.",
    )
