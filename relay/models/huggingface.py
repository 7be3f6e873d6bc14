"""Models in the form of Hugging Face's `transformers`: their cache, and their folders.

It goes by what such a model has (a configuration with `use_cache`, a `save_pretrained`), not by what class it is, and
works without `transformers` being installed. Invariant: no file is unpickled, and a model is never held twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from relay.errors import RelayError


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """While open, the model does not keep keys and values for generation: in training they are thrown away.

    A cache is an object that each layer changes as it passes through; there is no such thing between segments.
    """
    changed = []
    for module in model.modules():
        settings = getattr(module, "config", None)
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
    """Write a folder that `from_pretrained` loads: configuration, and weights as safetensors in shards.

    `state` are the weights under the model's names. Raises TypeError for a model that is not made like
    `transformers`' own.
    """
    save = getattr(model, "save_pretrained", None)
    if save is None:
        raise TypeError(
            f"{type(model).__name__} has no save_pretrained, so there is no configuration to write beside the weights. "
            "For models of your own, write trainer.state_dict() with safetensors.torch.save_file."
        )
    save(str(folder), state_dict=dict(state), max_shard_size=shard_size)


@contextmanager
def empty_weights() -> Iterator[None]:
    """While open, new modules have their parameters on the meta device, without memory; `load_weights` fills them.

    Buffers are made as always: what is computed at the start (position tables) is in no file.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # one that is tied stays what it is
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Fill a model from a folder's safetensors, tensor by tensor: no more is held than the model and one tensor.

    Parameters on the meta device get memory as they come. Raises RelayError where a tensor is missing, unknown to the
    model, or of another shape.
    """
    from safetensors import safe_open

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise RelayError(f"{folder} holds no .safetensors files.")
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    names: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                places.setdefault(id(tensor), []).append((module, key))
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
                        f"{'no such tensor' if target is None else tuple(target.shape)}. Make the model from the "
                        "folder's own config.json."
                    )
                missing.pop(id(target), None)
                if not target.is_meta:
                    with torch.no_grad():
                        target.copy_(stored.get_tensor(name))
                    continue
                filled = nn.Parameter(
                    stored.get_tensor(name).to(target.dtype, copy=True), requires_grad=target.requires_grad
                )
                for module, key in places[id(target)]:
                    module._parameters[key] = filled
    if missing:
        some = ", ".join(list(missing.values())[:5])
        raise RelayError(f"{folder} lacks {len(missing)} of the model's tensors: {some}.")
