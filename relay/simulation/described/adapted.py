"""A model on the meta device with adapters beside frozen weights, and these stored in few bits, as in `relay finetune`.

Adapters are put in by the code that trains (`relay.models.adapters`, `relay.models.quantized`). Nothing is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from relay.adapter_options import ADAPTER_OPTIONS, AdapterOptions, check_adapter_options
from relay.models.adapters import add_adapters
from relay.models.quantized import pack_frozen
from relay.options import checked
from relay.simulation.described.transformer_shape import ShapeError


def adapter_options(given: dict[str, Any]) -> AdapterOptions:
    """The options of adapters, checked. Raises ValueError for values that are not allowed or contradict each other."""
    own = AdapterOptions(**checked(given, ADAPTER_OPTIONS))
    check_adapter_options(own)
    if own.quantize_frozen is not None and own.lora is None:
        raise ShapeError(
            f"quantize_frozen={own.quantize_frozen!r} stores frozen weights, and none are without lora. Give lora=16, "
            "or leave it out."
        )
    return own


def adapted(model: nn.Module, own: AdapterOptions, half: bool) -> tuple[nn.Module, tuple[str, ...]]:
    """The model with its adapters, and notes on what is trained.

    With `half`, a run in half precision, frozen weights have the dtype that the configuration stores them in.
    """
    if own.lora is None:
        return model, ()
    stored = getattr(model.config, "dtype", None)
    if half and isinstance(stored, torch.dtype):
        model = model.to(stored)
    count = sum(parameter.numel() for parameter in model.parameters())
    with torch.device("meta"):
        built: nn.Module = add_adapters(model, own, _task(model), "")
    trained = sum(parameter.numel() for parameter in built.parameters() if parameter.requires_grad)
    notes = [f"Adapters of rank {own.lora}: {trained:,} parameters are trained, beside a model of {count:,}."]
    if own.quantize_frozen is not None:
        packed = pack_frozen(built, own.quantize_frozen)
        if not packed.layers:
            raise ShapeError(f"{type(model).__name__} has no frozen nn.Linear that quantize_frozen could pack.")
        notes.append(
            f"{packed.layers} frozen linear layers are stored in {own.quantize_frozen}; their weights are not among "
            "the parameters above."
        )
    return built, tuple(notes)


def _task(model: Any) -> str:
    name = type(model).__name__
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return "causal"
    if name.endswith("ForConditionalGeneration") and model.main_input_name == "input_ids":
        return "seq2seq" if model.config.is_encoder_decoder else "causal"
    return "classification" if name.endswith("ForSequenceClassification") else ""
