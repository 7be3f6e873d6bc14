"""What of a script's arguments and model Relay cannot do, refused by name before anything is built.

Each entry says what the argument asks for and what to write instead. Nothing is changed here. Invariant: an argument
that would have no effect, or another one than in the library's own trainer, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from relay.options import OPTIONS, refuse_unknown

FROM_ARGUMENTS = {
    "clip_grad_norm": "max_grad_norm",
    "precision": "bf16 or fp16",
    "param_groups": "weight_decay, or optimizers=(optimizer, None) with groups of your own",
    "seed": "seed",
    "on_nonfinite": "logging_nan_inf_filter",
    "loss_weight": "nothing: it is the loss of the library's trainer",
    "shared_inputs": "nothing: a batch of the collator is cut by its rows",
}
"""Options of `relay=` that the training arguments decide, with the argument that does."""

FAMILIES = (
    "bnb", "8bit", "4bit", "paged", "galore", "apollo", "lomo", "grokadamw", "schedule_free", "stable_adamw",
    "anyprecision", "npu", "xla", "muon", "dion",
)  # fmt: skip
"""Parts of names of `optim` that belong to optimizers with kernels or loops of their own."""

HOST_STASH = "use relay={'stash': 'host'}, with which the inputs of layers wait in host memory."

TRL = ("SFTTrainer", "DPOTrainer", "RewardTrainer")
"""The trainers of trl that run on Relay."""


def check_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `relay=`. Raises TypeError for one that is not known, ValueError for one of the arguments'."""
    refuse_unknown("hf.RelayTrainer", given, OPTIONS)
    for name, instead in FROM_ARGUMENTS.items():
        if name in given:
            raise ValueError(
                f"relay={{{name!r}: {given[name]!r}}} has no effect here: the training arguments decide it. "
                f"Use {instead}."
            )
    return dict(given)


def check_class(trainer: type) -> None:
    """Raise TypeError for a trainer of trl, or of a library over it, whose loop is another than a step on a batch."""
    for base in trainer.__mro__:
        if base.__module__.split(".")[0] != "trl" or not base.__name__.endswith("Trainer"):
            continue
        if base.__name__ not in (*TRL, "_BaseTrainer"):
            raise TypeError(
                f"{base.__name__} of trl does not run on Relay: its step generates text, or trains several models. "
                f"relay.hf.RelayMixin goes with transformers.Trainer and with trl's {', '.join(TRL)}."
            )


def check_arguments(args: Any, microbatches: int) -> None:
    """Raise ValueError for training arguments that Relay cannot follow."""
    found: list[str] = []

    def refuse(name: str, reason: str) -> None:
        found.append(f"{name}={getattr(args, name, None)!r}: {reason}")

    if getattr(args, "fsdp", None):
        refuse("fsdp", "Relay sends layers from host memory itself, so nothing is left to shard. Leave it out.")
    if getattr(args, "deepspeed", None):
        refuse("deepspeed", "Relay takes its place: weights and states are in host memory. Leave it out.")
    if getattr(args, "parallelism_config", None) is not None:
        refuse("parallelism_config", "Relay runs one process on one device. Leave it out.")
    if args.world_size > 1:
        found.append(f"{args.world_size} processes: Relay runs in one process here. Start the script without torchrun.")
    if args.torch_compile:
        refuse("torch_compile", "Relay traces and compiles the layers itself. Leave it out.")
    if args.use_liger_kernel:
        refuse(
            "use_liger_kernel", "its kernels are autograd functions of one GPU. For long sequences and large "
            "vocabularies use relay={'head_chunk_tokens': 'auto'}.",
        )  # fmt: skip
    if args.neftune_noise_alpha is not None:
        refuse("neftune_noise_alpha", "its noise would be drawn anew in the backward pass. Leave it out.")
    for name in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name):
            refuse(name, "evaluation runs in the precision of training. Leave it out.")
    optim = str(getattr(args.optim, "value", args.optim))
    if any(family in optim for family in FAMILIES):
        refuse(
            "optim", "this optimizer updates on the GPU, in kernels of its own. Use 'adamw_torch_fused', and for "
            "narrow states relay={'state_dtype': 'int8'}; for others relay={'optimizer': relay.Lion(lr=...)}.",
        )  # fmt: skip
    if (getattr(args, "activation_checkpointing_kwargs", None) or {}).get("offload"):  # type: ignore[union-attr]
        refuse("activation_checkpointing_kwargs", HOST_STASH)
    if getattr(args, "activation_offloading", False):
        refuse("activation_offloading", HOST_STASH)
    if args.debug:
        refuse("debug", "its hooks look at every activation. Leave it out; a loss that is not finite is logged.")
    if getattr(args, "predict_with_generate", False):
        refuse("predict_with_generate", "evaluate with the loss, and call trainer.generate(...) for text.")
    if microbatches > 1 and args.gradient_accumulation_steps > 1:
        found.append(
            f"relay={{'microbatches': {microbatches}}} with gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps}: each accumulated batch is a micro-batch already. Use one of the two."
        )
    if found:
        raise ValueError("Relay cannot follow these training arguments:\n  " + "\n  ".join(found))


def check_model(model: nn.Module) -> None:
    """Raise ValueError for a model whose weights are packed or spread by another library."""
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None) is not None:
        raise ValueError(
            f"{type(model).__name__} is quantized by its library, whose kernels work on the weights where they lie. "
            "Load it without quantization_config."
        )
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise ValueError(
            f"{type(model).__name__} is spread over {', '.join(sorted(devices))}. Load it without device_map: Relay "
            "keeps the model in host memory and sends its layers to the device."
        )
