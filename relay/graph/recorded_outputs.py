"""What hooks inside a layer record for the model around it: `transformers` collects attentions and router logits so.

Its hooks append to lists of a collector, which is a context variable of that library. A layer that runs by itself gets
a collector of its own, and what that holds afterwards is a part of the layer's output. Without `transformers` there is
nothing here. Invariant: the collector of the code around the layer is as before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

_LIBRARY = "transformers.utils.output_capturing"
_BY_LAYERS = "hidden_states"
"""Recorded by hooks of the layers themselves, which run around a layer and not in it."""


def _collector() -> Any:
    return getattr(sys.modules.get(_LIBRARY), "_active_collector", None)


def recorded_names() -> tuple[str, ...]:
    """The names of what the code around collects from within layers."""
    variable = _collector()
    around = None if variable is None else variable.get()
    return tuple(name for name, held in (around or {}).items() if isinstance(held, list) and name != _BY_LAYERS)


@contextmanager
def recording(names: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
    """While open, what hooks record under these names comes into the lists that are yielded."""
    inner: dict[str, list[Any]] = {name: [] for name in names}
    variable = _collector()
    if variable is None or not names:
        yield inner
        return
    token = variable.set(inner)
    try:
        yield inner
    finally:
        variable.reset(token)


def record(recorded: Mapping[str, Sequence[Any]]) -> None:
    """Add what a layer recorded to what the code around it collects."""
    variable = _collector()
    around = variable.get() if variable is not None else None
    for name, values in recorded.items():
        if around is not None and name in around:
            around[name].extend(values)
