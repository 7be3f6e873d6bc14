"""The dtype of the master weights: what a trainer does with a model whose parameters are in half precision.

With `master_weights="fp32"` such a model is converted as `model.float()` converts it, before anything is captured: an
update below 1/256 of a bfloat16 weight would be lost. So it is with "split", whose masters are float32 in two halves
once the store has them (`relay.eps.split_weights`). With "as_given" it stays as it is. The copies that cross the link
are the store's (`relay.eps.store`). Invariant: the model's parameters and buffers stay the same objects, and tensors
that share memory share it afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection

import torch
from torch import nn

HALF = (torch.bfloat16, torch.float16)

CONVERTED = ("fp32", "split")
"""The `master_weights` for which a model in half precision is converted."""


def master_dtype(model: nn.Module, parameter: torch.Tensor, master_weights: str) -> torch.dtype:
    """The dtype in which a parameter of the model is trained."""
    return torch.float32 if parameter.dtype in HALF and _converts(model, master_weights) else parameter.dtype


def refuse_unsplittable(name: str, parameter: torch.Tensor) -> None:
    """Raise ValueError for a trained parameter that is no float32, and cannot be made float32 without loss."""
    if parameter.dtype not in (torch.float32, *HALF):
        raise ValueError(
            f"{name!r} is {parameter.dtype}, and master_weights='split' splits float32 alone. Make it float32, freeze "
            "it with requires_grad_(False), or use master_weights='fp32'."
        )


def to_master_weights(
    model: nn.Module, master_weights: str, precision: str, split: Collection[int] = (), stacklevel: int = 4
) -> None:
    """Convert a model in half precision to float32 where `master_weights` asks for it, with a warning.

    A model of which only frozen parameters are in half precision stays as it is: they have no updates to lose. So do
    tensors whose ids are in `split`: they are halves of float32 masters. `stacklevel` is the warning's.
    """
    trained = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if _trains_in_half(parameter) and id(parameter) not in split
    ]
    if not trained or master_weights not in CONVERTED:
        return
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.dtype in HALF and id(tensor) not in split:
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    dtypes = " and ".join(sorted({str(parameter.dtype) for _, parameter in trained}))
    for tensors in by_storage.values():
        _convert(tensors)
    computes = (
        "The device computes in float32: give batches in float32, or precision='bf16' to compute in bfloat16. "
        if precision == "fp32"
        else ""
    )
    warnings.warn(
        f"The model is in {dtypes} ({trained[0][0]!r} and {len(trained) - 1} more parameters). It is float32 now, "
        f"since small updates are lost in half precision. {computes}master_weights='as_given' trains it as it is.",
        stacklevel=stacklevel,
    )


def refuse_unfrozen_half(frozen: list[tuple[str, nn.Parameter]]) -> None:
    """Raise ValueError if a parameter in half precision that was frozen when the trainer was built is trained now."""
    for name, parameter in frozen:
        if parameter.requires_grad and parameter.dtype in HALF:
            raise ValueError(
                f"{name!r} is {parameter.dtype}, frozen when this trainer was built. Now it requires a gradient, "
                "and the masters of this trainer are float32. Build a new trainer for the model as it is, "
                "or use master_weights='as_given'."
            )


def frozen_half(model: nn.Module, master_weights: str) -> list[tuple[str, nn.Parameter]]:
    """The frozen parameters in half precision, where masters are float32."""
    if master_weights not in CONVERTED:
        return []
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.dtype in HALF]


def _converts(model: nn.Module, master_weights: str) -> bool:
    return master_weights in CONVERTED and any(map(_trains_in_half, model.parameters()))


def _trains_in_half(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad and parameter.dtype in HALF


def _convert(tensors: list[torch.Tensor]) -> None:
    """Convert tensors of one storage to float32. Several keep their places in it, so they share what they shared."""
    if len(tensors) == 1 or len({tensor.dtype for tensor in tensors}) > 1:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        return
    first = tensors[0]
    whole = torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage()).float()
    for tensor in tensors:
        tensor.data = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
