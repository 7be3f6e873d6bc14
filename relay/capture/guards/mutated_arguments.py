"""Lists, dicts and objects that a layer is given and changes: what it puts into them belongs to what it makes.

A layer's call stands in a graph by its tensors: those it is given and those it returns. A layer that appends to a list
or sets a key of a dict hands tensors on in another way. That is told by comparing what it was given before and after;
what it was given is then part of its output, and is written back to the caller's own lists, dicts and objects.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from relay.graph.pytree import tensor_leaves


@dataclass(frozen=True)
class Unchanged:
    """Stands for a tensor that a layer was given and left where it was, or put elsewhere: by its place."""

    place: int


def call_observed(forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """What `forward(*args, **kwargs)` returns, and (args, kwargs) as they are afterwards; None if nothing changed."""
    tensors, before = tensor_leaves((args, kwargs))
    result = forward(*args, **kwargs)
    after, tree = tensor_leaves((args, kwargs))
    if tree == before and all(one is other for one, other in zip(after, tensors, strict=True)):
        return result, None
    places = {id(tensor): Unchanged(place) for place, tensor in enumerate(tensors)}
    return result, tree.fill([places.get(id(tensor), tensor) for tensor in after])


def write_back(owned: Any, changed: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Make the caller's nest hold what the changed one holds; returns what is to stand in the place of `owned`.

    `tensors` are those that the layer was given.
    """
    if isinstance(changed, Unchanged):
        return tensors[changed.place]
    if isinstance(changed, list):
        kept = owned if isinstance(owned, list) else []
        kept[:] = [write_back(_item(kept, place), one, tensors) for place, one in enumerate(changed)]
        return kept
    if type(changed) is tuple:
        return tuple(write_back(_item(owned, place), one, tensors) for place, one in enumerate(changed))
    if isinstance(changed, MutableMapping):
        into = owned if type(owned) is type(changed) else changed
        new = {key: write_back(into.get(key), one, tensors) for key, one in changed.items()}
        into.clear()
        into.update(new)
        return into
    if isinstance(changed, (torch.Tensor, nn.Module, type)) or not hasattr(changed, "__dict__"):
        return changed
    into = owned if type(owned) is type(changed) else changed
    for name, value in list(vars(changed).items()):
        # also where the class is frozen
        object.__setattr__(into, name, write_back(vars(into).get(name), value, tensors))
    return into


def _item(nest: Any, place: int) -> Any:
    """What stands in a list or tuple at a place, or None."""
    return nest[place] if isinstance(nest, (list, tuple)) and place < len(nest) else None
