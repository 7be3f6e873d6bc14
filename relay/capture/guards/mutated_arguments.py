"""Layers that change the lists, dicts, objects or tensors that they take as arguments.

A block call has tensors as inputs and outputs. A layer that appends to a list or sets a key of a dict passes tensors on
in another way, which is found by comparing its arguments before and after the call. The changed arguments then become
part of the layer's output, and are written back to the caller's lists, dicts and objects. A layer that writes to a
tensor is found by its ops, and is given a copy, since its recompute needs what it was given.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from relay.graph.pytree import tensor_leaves
from relay.graph.recorded_outputs import recording


@dataclass(frozen=True)
class MemoryUse:
    """What a layer does to the memory of its arguments: the numbers of those that it `writes` to, and whether its
    outputs share memory with one of them, with each other, or with its parameters and buffers."""

    writes: frozenset[int] = frozenset()
    shares_arguments: bool = False
    shares_others: bool = False


class WatchedMemory(TorchDispatchMode):
    """While open, the memory that ops write to is collected."""

    def __init__(self) -> None:
        super().__init__()
        self._written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for position, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = args[position] if position < len(args) else kwargs.get(argument.name)
                    self._written |= _memory_of([one for one in _listed(given) if isinstance(one, torch.Tensor)])
        return func(*args, **kwargs)

    def use(self, given: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], layer: nn.Module) -> MemoryUse:
        """What a call of `layer` did to the tensors that it was `given`, while this was open."""
        made = [memory for one in outputs for memory in _memory_of([one])]
        return MemoryUse(
            frozenset(number for number, one in enumerate(given) if _memory_of([one]) & self._written),
            bool(_memory_of(given).intersection(made)),
            len(made) != len(set(made)) or bool(_memory_of([*layer.parameters(), *layer.buffers()]).intersection(made)),
        )


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _memory_of(tensors: Sequence[torch.Tensor]) -> set[int]:
    return {one.untyped_storage()._cdata for one in tensors if one.layout is torch.strided}


@dataclass(frozen=True)
class Unchanged:
    """Stands for a tensor that a layer took as an argument and left in its arguments, by its index among them."""

    index: int


def call_observed(forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The result of `forward(*args, **kwargs)`, and (args, kwargs) after the call, or None if they did not change."""
    tensors, before = tensor_leaves((args, kwargs))
    result = forward(*args, **kwargs)
    after, tree = tensor_leaves((args, kwargs))
    if tree == before and all(current is given for current, given in zip(after, tensors, strict=True)):
        return result, None
    unchanged: dict[int, Any] = {id(tensor): Unchanged(index) for index, tensor in enumerate(tensors)}
    return result, tree.fill([unchanged.get(id(tensor), tensor) for tensor in after])


def call_recorded(forward: Callable[..., Any], args: Any, kwargs: Any, names: Sequence[str]) -> tuple[Any, Any]:
    """A layer's whole output and what of it is beside its result: (changed, recorded).

    The output is its result; (its result, its changed arguments) if it changed some; and (that, what hooks recorded
    under the `names`) if there is such.
    """
    with recording(names) as inner:
        result, given = call_observed(forward, args, kwargs)
    recorded = {name: values for name, values in inner.items() if values}
    output = result if given is None else (result, given)
    return ((output, recorded) if recorded else output), (given is not None, tuple(recorded))


def write_back(owned: Any, changed: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Update the caller's nested arguments `owned` to hold what `changed` holds. Returns the replacement for `owned`.

    `tensors` are the tensors among the arguments of the layer.
    """
    if isinstance(changed, Unchanged):
        return tensors[changed.index]
    if isinstance(changed, list):
        own = owned if isinstance(owned, list) else []
        own[:] = [write_back(_item(own, index), item, tensors) for index, item in enumerate(changed)]
        return own
    if type(changed) is tuple:
        return tuple(write_back(_item(owned, index), item, tensors) for index, item in enumerate(changed))
    if isinstance(changed, MutableMapping):
        into = owned if type(owned) is type(changed) else changed
        new = {key: write_back(into.get(key), item, tensors) for key, item in changed.items()}
        into.clear()
        into.update(new)
        return into
    if isinstance(changed, (torch.Tensor, nn.Module, type)) or not hasattr(changed, "__dict__"):
        return changed
    into = owned if type(owned) is type(changed) else changed
    for name, value in list(vars(changed).items()):
        # works for frozen dataclasses as well
        object.__setattr__(into, name, write_back(vars(into).get(name), value, tensors))
    return into


def _item(nest: Any, index: int) -> Any:
    """The item of a list or tuple at an index, or None."""
    return nest[index] if isinstance(nest, (list, tuple)) and index < len(nest) else None
