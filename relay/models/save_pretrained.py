"""Saves a model as a Hugging Face folder that `from_pretrained` loads, one tensor at a time.

The library's own `save_pretrained` converts all weights at once and copies those that share memory, as all do in the
store of a trainer; it writes the configuration here, and the weights where it alone knows their form (adapters,
quantized models, models of other libraries). Invariant: the host holds the tensors of one conversion beyond the model,
and weights that were in the folder are replaced only when all new ones have been written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hal.spec.units import parse_size
from relay.checkpoint.atomic_file import write_whole
from relay.checkpoint.shards import NAMES, ShardWriter, TensorPlan
from relay.models.load_pretrained import INDEX, SINGLE
from relay.models.weight_conversion import Conversion, is_transformers_model, plan_saving


def save_pretrained(
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
    folder: str | Path,
    shard_size: str = "5GB",
    masters: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a folder that `from_pretrained` loads: the configuration, and the weights as safetensors in shards.

    `state` maps the model's names to the weights, and `masters` some of them to the float32 that is written in their
    place, each made when it is looked up. No shard is larger than `shard_size`, except for a tensor that is.
    Raises TypeError for a model without `save_pretrained`.
    """
    save: Callable[..., Any] | None = getattr(model, "save_pretrained", None)
    if save is None:
        raise TypeError(
            f"{type(model).__name__} has no save_pretrained, so it has no configuration to write beside the weights. "
            "Write trainer.state_dict() with safetensors.torch.save_file instead."
        )
    if not _streams(model):
        save(str(folder), state_dict={**state, **(masters or {})}, max_shard_size=shard_size)
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = _distinct(model, state)
    wide = {} if masters is None else masters
    dtypes = {name: torch.float32 if name in wide else tensor.dtype for name, tensor in state.items()}
    plan = plan_saving(
        model,
        {name: torch.empty(tensor.shape, dtype=dtypes[name], device="meta") for name, tensor in state.items()},
    )
    shards = _shards(plan, parse_size(shard_size))
    partial = [folder / f".{name}.partial" for name in shards]
    try:
        _write(plan, wide, state, dict(zip(partial, shards.values(), strict=True)))
        save(str(folder), state_dict={})  # the configuration; it removes shards of an earlier save
        for path, name in zip(partial, shards, strict=True):
            path.replace(folder / name)
    finally:
        for path in partial:
            path.unlink(missing_ok=True)
    if len(shards) > 1:
        (folder / SINGLE).unlink(missing_ok=True)  # an earlier save's: readers would prefer it to the index
        _write_index(model, folder, shards)
    else:
        (folder / INDEX).unlink(missing_ok=True)


def _streams(model: nn.Module) -> bool:
    """Whether the form of the folder is known here: the model's own weights, as the installed library names them."""
    return (
        is_transformers_model(model)
        and find_spec("transformers.conversion_mapping") is not None
        and not getattr(model, "_hf_peft_config_loaded", False)
        and getattr(model, "hf_quantizer", None) is None
    )


def _distinct(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors to save: of tied ones the one that the model's class declares as the source, else the first."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    unsaved = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    kept: dict[tuple[int, torch.Size, torch.dtype], str] = {}
    for name, tensor in state.items():
        if name not in unsaved:
            key = (tensor.data_ptr() if tensor.numel() else id(tensor), tensor.shape, tensor.dtype)
            if key not in kept or kept[key] in tied:
                kept[key] = name
    names = set(kept.values())
    return {name: tensor for name, tensor in state.items() if name in names}


def _shards(plan: Sequence[Conversion], most: int) -> dict[str, list[TensorPlan]]:
    """The files, with their tensors in the order in which the plan gives them."""
    parts: list[list[TensorPlan]] = [[]]
    size = 0
    for conversion in plan:
        for name, tensor in conversion.results.items():
            one = TensorPlan(name, NAMES[tensor.dtype], tuple(tensor.shape))
            if parts[-1] and size + one.size > most:
                parts.append([])
                size = 0
            parts[-1].append(one)
            size += one.size
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{number:05}-of-{len(parts):05}.safetensors": part for number, part in enumerate(parts, 1)}


def _write(
    plan: Sequence[Conversion],
    masters: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    shards: Mapping[Path, list[TensorPlan]],
) -> None:
    def weight(name: str) -> torch.Tensor:
        return (masters[name] if name in masters else state[name]).detach()

    tensors = (
        tensor
        for conversion in plan
        for tensor in conversion.convert({name: weight(name) for name in conversion.sources}).values()
    )
    for path, part in shards.items():
        path.unlink(missing_ok=True)  # of a process that was killed as it wrote
        writer = ShardWriter(path, part, {"format": "pt"})
        try:
            for _ in part:
                writer.add(next(tensors).contiguous())
        except BaseException:
            writer.abandon()
            raise
        writer.close()


def _write_index(model: nn.Module, folder: Path, shards: Mapping[str, list[TensorPlan]]) -> None:
    content = {
        "metadata": {
            "total_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "total_size": sum(one.size for part in shards.values() for one in part),
        },
        "weight_map": {one.key: name for name, part in shards.items() for one in part},
    }
    write_whole(folder / INDEX, json.dumps(content, indent=2, sort_keys=True) + "\n")
