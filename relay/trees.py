"""Nests of lists, tuples, dicts and registered classes with the tensors taken out, and put back.

Models take and return such nests; the relay moves flat lists of tensors. It says nothing of shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


def tensor_leaves(tree: Any) -> tuple[list[torch.Tensor], TensorTree]:
    """The tensors of a nest of lists, tuples, dicts and registered classes, and how to put others in their place."""
    leaves, spec = pytree.tree_flatten(tree)
    places = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
    constants = tuple(None if place else leaf for leaf, place in zip(leaves, places, strict=True))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tensors, TensorTree(spec, places, constants)


@dataclass(frozen=True)
class TensorTree:
    """A nest with its tensors taken out."""

    spec: Any
    places: tuple[bool, ...]
    constants: tuple[Any, ...]

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The nest with these tensors in it."""
        rest = iter(tensors)
        leaves = [next(rest) if place else leaf for place, leaf in zip(self.places, self.constants, strict=True)]
        return pytree.tree_unflatten(leaves, self.spec)
