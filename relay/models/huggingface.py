"""Models in the style of Hugging Face's `transformers`: their key-value cache, and building them without weights.

Their folders are read by `relay.models.load_pretrained` and written by `relay.models.save_pretrained`. Invariant: a
model is as it was when a context of this file ends, and `transformers` need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


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


@contextmanager
def empty_weights() -> Iterator[None]:
    """While open, new modules have their parameters on the meta device, without memory.

    `relay.models.load_weights` fills them. Buffers get memory as usual, since those that a constructor computes
    (position tables) are in no file.
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
