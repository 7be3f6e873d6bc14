"""Nests of lists, tuples, dicts and other classes with the tensors taken out, and put back.

Models take and return such nests; the relay moves flat lists of tensors. Classes that PyTorch's pytree knows go
apart as it says; an object of any other class (a dataclass, a namespace, a mapping of its own) goes apart by its
attributes and items, and is put together again as a copy. It says nothing of shapes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

_DEEPEST = 8
"""Objects within objects beyond this are left as they are: they refer to themselves."""


def tensor_leaves(tree: Any, depth: int = 0) -> tuple[list[torch.Tensor], TensorTree]:
    """The tensors of a nest, in order, and how to put others in their place."""
    leaves, spec = pytree.tree_flatten(tree)
    tensors: list[torch.Tensor] = []
    rest: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            rest.append(_TENSOR)
            continue
        taken_apart = _take_object_apart(leaf, depth)
        if taken_apart is None:
            rest.append(leaf)
        else:
            tensors += taken_apart[0]
            rest.append(taken_apart[1])
    return tensors, TensorTree(spec, tuple(rest))


class _Tensor:
    """Stands where a tensor was."""

    def __repr__(self) -> str:
        return "tensor"


_TENSOR = _Tensor()


@dataclass(frozen=True)
class TensorTree:
    """A nest with its tensors taken out. Two are equal if they nest alike and hold the same constants."""

    spec: Any
    constants: tuple[Any, ...]

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The nest with these tensors in it."""
        return self._fill(iter(tensors))

    def _fill(self, rest: Any) -> Any:
        leaves = [
            next(rest) if leaf is _TENSOR else leaf.build(rest) if isinstance(leaf, _Object) else leaf
            for leaf in self.constants
        ]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class _Object:
    """An object with its tensors taken out: a copy of it, its attributes and its items."""

    kind: type
    shell: Any
    attributes: TensorTree
    items: TensorTree

    def build(self, rest: Any) -> Any:
        """A new object of the kind."""
        made = copy.copy(self.shell)
        attributes = self.attributes._fill(rest)
        for name, value in self.items._fill(rest).items():
            made[name] = value
        for name, value in attributes.items():
            object.__setattr__(made, name, value)  # also where the class is frozen
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and (self.kind, self.attributes, self.items) == (
            other.kind,
            other.attributes,
            other.items,
        )

    def __hash__(self) -> int:
        return hash(self.kind)

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({self.attributes.constants}, {self.items.constants})"


def is_taken_apart(constant: Any) -> bool:
    """Whether one of a tree's constants is an object that went apart by its attributes, its tensors not in it."""
    return isinstance(constant, _Object)


def _take_object_apart(leaf: Any, depth: int) -> tuple[list[torch.Tensor], _Object] | None:
    """The tensors of an object that pytree does not know; None where it holds none."""
    if depth >= _DEEPEST or isinstance(leaf, (type, torch.nn.Module)):
        return None
    if dataclasses.is_dataclass(leaf):
        held = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    elif hasattr(leaf, "__dict__"):
        held = dict(vars(leaf))
    else:
        return None
    items = dict(leaf) if isinstance(leaf, MutableMapping) else {}
    # A mapping that keeps its items as attributes too names each tensor twice: it is taken once.
    attributes = {name: value for name, value in held.items() if not (name in items and items[name] is value)}
    tensors, attribute_tree = tensor_leaves(attributes, depth + 1)
    more, item_tree = tensor_leaves(items, depth + 1)
    if not tensors and not more:
        return None
    return [*tensors, *more], _Object(type(leaf), copy.copy(leaf), attribute_tree, item_tree)
