"""What models in the form of Hugging Face's `transformers` need of us, beyond being modules.

It goes by what such a model has (a configuration with `use_cache`), not by what class it is, and works without
`transformers` being installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


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
