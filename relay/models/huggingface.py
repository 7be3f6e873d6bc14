"""Models in the style of Hugging Face's `transformers`: their key-value cache, and their folders.

A model is recognised by its attributes (a configuration with `use_cache`, a method `save_pretrained`), not by its
class, and `transformers` need not be installed. Invariant: no file is unpickled, and no second copy of a model is in
memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from relay.errors import RelayError


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """While open, `use_cache` is off in the model's configurations.

    Training has no use for the cache of keys and values, and an object that every layer changes cannot pass between
    segments.
    """
    changed: list[Any] = []
    for module in model.modules():
        settings: Any = getattr(module, "config", None)
        if getattr(settings, "use_cache", None) is True and not isinstance(settings, dict):
            settings.use_cache = False
            changed.append(settings)
    try:
        yield
    finally:
        for settings in changed:
            settings.use_cache = True


def save_pretrained(
    model: nn.Module, state: Mapping[str, torch.Tensor], folder: str | Path, shard_size: str = "5GB"
) -> None:
    """Write a folder that `from_pretrained` loads: the configuration, and the weights as safetensors in shards.

    `state` maps the model's names to the weights. No shard is larger than `shard_size`. Raises TypeError for a model
    without `save_pretrained`.
    """
    save = getattr(model, "save_pretrained", None)
    if save is None:
        raise TypeError(
            f"{type(model).__name__} has no save_pretrained, so it has no configuration to write beside the weights. "
            "Write trainer.state_dict() with safetensors.torch.save_file instead."
        )
    save(str(folder), state_dict=dict(state), max_shard_size=shard_size)


@contextmanager
def empty_weights() -> Iterator[None]:
    """While open, new modules have their parameters on the meta device, without memory. `load_weights` fills them.

    Buffers get memory as usual, since those that a constructor computes (position tables) are in no file.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # a tied parameter is on it already
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Load a model's tensors from the safetensors files of a folder, one tensor at a time.

    Parameters on the meta device get memory as they are loaded, so the memory in use is that of the model and one
    tensor. Raises RelayError if a tensor is missing, unknown to the model, or of another shape.
    """
    from safetensors import safe_open

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise RelayError(f"The folder {folder} holds no .safetensors files. Use a folder that save_pretrained wrote.")
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    names: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                owners.setdefault(id(tensor), []).append((module, key))
                names[f"{path}.{key}" if path else key] = tensor
    missing = {id(tensor): name for name, tensor in names.items() if isinstance(tensor, nn.Parameter)}
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 -- not a mapping
                target = names.get(name)
                shape = tuple(stored.get_slice(name).get_shape())
                if target is None or shape != tuple(target.shape):
                    raise RelayError(
                        f"{file.name} holds {name} of shape {shape}; the model has "
                        f"{'no such tensor' if target is None else tuple(target.shape)}. Build the model from "
                        "the config.json of the folder."
                    )
                missing.pop(id(target), None)
                if not target.is_meta:
                    with torch.no_grad():
                        target.copy_(stored.get_tensor(name))
                    continue
                filled = nn.Parameter(
                    stored.get_tensor(name).to(target.dtype, copy=True), requires_grad=target.requires_grad
                )
                for module, key in owners[id(target)]:
                    module._parameters[key] = filled
    if missing:
        some = ", ".join(list(missing.values())[:5])
        raise RelayError(
            f"The folder {folder} lacks {len(missing)} of the model's tensors: {some}. Use the folder of this model."
        )
