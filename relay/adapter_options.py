"""The options of adapters and of the weights that they freeze, in one place: name, type, default, range and help.

`relay finetune`, `relay simulate` and `relay plan` take theirs from here; `relay.models.adapters` and
`relay.models.quantized` do what they mean. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from relay.option_schema import Count, Positive, options_of


class AdapterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How adapters are put into a model, and how the weights that they freeze are stored."""

    lora: Annotated[
        Count | None,
        Meta(description="Train adapters of this rank beside frozen weights, instead of the weights (LoRA, by peft)."),
    ] = None
    lora_alpha: Annotated[Positive | None, Meta(description="Scale of the adapters; twice the rank if not given.")] = (
        None
    )
    lora_dropout: Annotated[Annotated[float, Meta(ge=0, lt=1)], Meta(description="Dropout before the adapters.")] = 0.0
    lora_targets: Annotated[
        str | None,
        Meta(
            description="Names of the layers that get adapters, separated by commas, such as q_proj,v_proj; all linear "
            "layers but the head if not given."
        ),
    ] = None
    dora: Annotated[bool, Meta(description="Train the magnitudes of the adapted weights too (DoRA). With --lora.")] = (
        False
    )
    quantize_frozen: Annotated[
        Literal["nf4", "int8", "fp8"] | None,
        Meta(
            description="Store frozen linear layers in so few bits, on the host and over the link; the device unpacks "
            "them in the slot. With --lora."
        ),
    ] = None


ADAPTER_OPTIONS = options_of(AdapterOptions)
"""The options of adapters, by name."""


def check_adapter_options(own: AdapterOptions) -> None:
    """Raise ValueError for options of adapters without adapters."""
    if own.lora is None:
        for name in ("lora_alpha", "lora_targets", "dora", "lora_dropout"):
            if getattr(own, name):
                raise ValueError(
                    f"{name} is of adapters, and there are none without lora. Give lora=8, or leave it out."
                )
