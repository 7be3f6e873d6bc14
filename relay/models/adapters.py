"""LoRA and DoRA adapters, by peft: put into a model, taken up again from a folder, and merged into its weights.

Their options are in `relay.adapter_options`. Nothing is trained or saved here. Invariant: with adapters the model's own
weights are frozen, but those of a new head.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from relay.adapter_options import AdapterOptions
from relay.errors import RelayError
from relay.models.quantized import quantized_class, unpack

TASK_TYPES = {
    "causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "classification": "SEQ_CLS", "regression": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
}  # fmt: skip


def add_adapters(model: nn.Module, own: AdapterOptions, task: str, base: str, new: Sequence[str] = ()) -> Any:
    """The model with new adapters. `task` is one of `TASK_TYPES`; a head of any other is trained in full.

    So are the modules named in `new`, which the folder `base` does not have: their numbers go with the adapters.

    Raises RelayError for targets that the model does not have.
    """
    peft = _peft()
    targets: Any = "all-linear" if own.lora_targets is None else [name.strip() for name in own.lora_targets.split(",")]
    if own.lora_targets is not None:
        _check_targets(model, own.lora_targets, targets)
    heads = [*_heads(model), *new] if task not in ("causal", "seq2seq") else None
    config = peft.LoraConfig(
        r=own.lora, lora_alpha=own.lora_alpha or 2 * (own.lora or 0), lora_dropout=own.lora_dropout, use_dora=own.dora,
        target_modules=targets, task_type=TASK_TYPES.get(task), modules_to_save=heads,
        exclude_modules=[f"{name}.{part}" for name in new for part, _ in model.get_submodule(name).named_modules()],
    )  # fmt: skip
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
            warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
            warnings.simplefilter("ignore", FutureWarning)  # peft's own use of transformers
            adapted = peft.get_peft_model(model, config)
    except ValueError as wrong:
        reason = " ".join(str(wrong).split())[:200]
        raise RelayError(f"{type(model).__name__} takes no such adapters: {reason}") from wrong
    adapted.peft_config["default"].base_model_name_or_path = base
    return adapted


def _check_targets(model: nn.Module, given: str, targets: Sequence[str]) -> None:
    """Raise RelayError for a name of which no layer's ends, as peft compares them."""
    names = [name for name, _ in model.named_modules()]
    absent = [one for one in targets if not one or not any(f".{name}".endswith(f".{one}") for name in names)]
    if absent:
        linear = {name.rpartition(".")[2] for name, module in model.named_modules() if quantized_class(module)}
        raise RelayError(
            f"lora_targets={given!r} does not fit {type(model).__name__}: no layer is named {absent[0]!r}. Its linear "
            f"layers are named {', '.join(sorted(linear))}."
        )


def load_adapters(model: nn.Module, folder: Path) -> Any:
    """The model with the adapters of a folder, to be trained on."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft's own use of transformers
            return _peft().PeftModel.from_pretrained(model, str(folder), is_trainable=True)
    except (ValueError, RuntimeError, OSError, KeyError) as wrong:
        reason = " ".join(str(wrong).split())[:300]
        raise RelayError(f"The adapters in {folder} do not fit {type(model).__name__}: {reason}") from wrong


def merged(adapted: Any) -> nn.Module:
    """The model with its adapters added to its weights; packed ones are unpacked."""
    unpack(adapted)
    model: nn.Module = adapted.merge_and_unload()
    return model


def _heads(model: nn.Module) -> list[str]:
    """The modules beside the base model, which a new task trains in full."""
    base = getattr(model, "base_model_prefix", "")
    return [name for name, child in model.named_children() if name != base and any(True for _ in child.parameters())]


def _peft() -> Any:
    try:
        import peft
    except ImportError as absent:
        raise RelayError(f"Adapters need the package {absent.name!r}: pip install -e '.[hf]'") from absent
    return peft
