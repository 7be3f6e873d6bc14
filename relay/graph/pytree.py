"""Nested containers flattened to lists of tensors, and rebuilt from them.

Models take and return nested containers; the relay moves flat lists of tensors. Classes registered with PyTorch's
pytree are flattened by it. An object of any other class (a dataclass, a namespace, a custom mapping) is flattened by
its attributes and items, and rebuilt as a copy. Shapes and dtypes are not part of the structure.
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
"""Objects nested deeper than this are not flattened: they probably refer to themselves."""


def tensor_leaves(tree: Any, depth: int = 0) -> tuple[list[torch.Tensor], TensorTree]:
    """The tensors of a nested container, in order, and the structure that rebuilds it from other tensors.

    `depth` counts the objects that `tree` is nested in; callers leave it at 0.
    """
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
    """Marks the position of a tensor."""

    def __repr__(self) -> str:
        return "tensor"


_TENSOR = _Tensor()


@dataclass(frozen=True)
class TensorTree:
    """The structure of a nested container without its tensors. Two are equal if structure and constants are equal."""

    spec: Any
    constants: tuple[Any, ...]

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The nested container with these tensors, one for each that was taken out."""
        return self._fill(iter(tensors))

    def places(self) -> list[bool]:
        """For each leaf, whether it is a tensor."""
        return [leaf is _TENSOR for leaf in self.constants]

    def _fill(self, rest: Any) -> Any:
        leaves = [
            next(rest) if leaf is _TENSOR else leaf.build(rest) if isinstance(leaf, _Object) else leaf
            for leaf in self.constants
        ]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class _Object:
    """The structure of an object: a copy of it, its attributes and its items, without their tensors."""

    kind: type
    shell: Any
    attributes: TensorTree
    items: TensorTree

    def build(self, rest: Any) -> Any:
        """A new object of the class `kind`, with tensors from the iterator `rest`."""
        made = copy.copy(self.shell)
        attributes = self.attributes._fill(rest)
        for name, value in self.items._fill(rest).items():
            made[name] = value
        for name, value in attributes.items():
            object.__setattr__(made, name, value)  # works for frozen dataclasses as well
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
    """Whether a constant of a `TensorTree` stands for an object that was flattened by its attributes."""
    return isinstance(constant, _Object)


def _take_object_apart(leaf: Any, depth: int) -> tuple[list[torch.Tensor], _Object] | None:
    """The tensors and the structure of an object that pytree does not know; None if it holds no tensors."""
    if depth >= _DEEPEST or isinstance(leaf, (type, torch.nn.Module)):
        return None
    if dataclasses.is_dataclass(leaf):
        values = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    elif hasattr(leaf, "__dict__"):
        values = dict(vars(leaf))
    else:
        return None
    items = dict(leaf) if isinstance(leaf, MutableMapping) else {}
    # Some mappings hold each item as an attribute as well; such a tensor is taken once.
    attributes = {name: value for name, value in values.items() if not (name in items and items[name] is value)}
    tensors, attribute_tree = tensor_leaves(attributes, depth + 1)
    more, item_tree = tensor_leaves(items, depth + 1)
    if not tensors and not more:
        return None
    return [*tensors, *more], _Object(type(leaf), copy.copy(leaf), attribute_tree, item_tree)
