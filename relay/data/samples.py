"""What in a batch belongs to samples: the batch's length, and its nested containers cut by sample.

Tensors are cut along dimension 0. A list with one entry for each sample (images of different sizes, boxes of each
image) is cut by entries; a tuple is never cut, but the tensors in it are. What shares the batch's length by chance and
could be meant either way raises BatchError, which names it. Nothing is flattened or weighed here
(`relay.data.microbatches`). Invariant: every sample is in one of the pieces, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from relay.errors import BatchError
from relay.graph.pytree import tensor_leaves

Content = dict[str, Any]
"""A batch by parts: `inputs` (for a whole model a dict, by the names of its arguments) and, for a list, `targets`."""

Pieces = Callable[[slice], Any]
"""Gives the part of one leaf that belongs to a range of samples."""


def holds_tensors(content: Content, whole_model: bool) -> bool:
    """Whether there is a tensor in the batch."""
    return any(_tensors(part) for _, part in _named(content, whole_model))


def length_of(content: Content, shared: Sequence[str], whole_model: bool) -> int:
    """The most frequent length along dimension 0 of the tensors outside of lists; of all, if there are only lists."""
    parts = [part for name, part in _named(content, whole_model) if name not in shared]
    outside = [leaf for part in parts for leaf in _flat(part, _is_list)[0] if not _is_list(leaf)]
    lengths = _lengths(outside) or _lengths(parts)
    if not lengths:
        raise BatchError(
            "The batch holds only scalar tensors, which have no dimension to cut. Tensors need a batch dimension."
        )
    return max(dict.fromkeys(lengths), key=lengths.count)


def has_lists(content: Content, size: int, shared: Sequence[str], whole_model: bool) -> bool:
    """Whether there are lists that may have one entry for each sample. Then pieces differ in what they nest."""
    parts = [part for name, part in _named(content, whole_model) if name not in shared]
    return any(
        _is_by_sample(leaf, size) for part in parts for leaf in _flat(part, lambda value: _is_by_sample(value, size))[0]
    )


def are_cut(content: Content, size: int, count: int, shared: Sequence[str], whole_model: bool) -> list[bool]:
    """For each tensor, in order, whether it is cut. Raises BatchError for one that all `count` pieces would share."""
    found = []
    for name, part in _named(content, whole_model):
        for tensor in _tensors(part):
            if name not in shared and tensor.dim() > 0 and len(tensor) != size:
                raise _uncut(tensor, name, size, count, whole_model)
            found.append(name not in shared and tensor.dim() > 0)
    return found


def cut(
    content: Content, size: int, ranges: Sequence[slice], shared: Sequence[str], whole_model: bool
) -> list[Content]:
    """The content of each range of samples, with lists cut as well. Raises BatchError for what cannot be cut."""
    named = _named(content, whole_model)
    made: list[list[Any]] = [[] for _ in ranges]
    for name, part in named:
        leaves, rebuild = _flat(part, lambda value: _is_by_sample(value, size))
        pieces_of = [_pieces_of(leaf, name, size, len(ranges), name in shared, whole_model) for leaf in leaves]
        for samples, row in zip(ranges, made, strict=True):
            row.append(rebuild([pieces(samples) for pieces in pieces_of]))
    contents: list[Content] = []
    for row in made:
        parts = {name: part for (name, _), part in zip(named, row, strict=True)}
        contents.append({"inputs": parts} if whole_model else parts)
    return contents


def _named(content: Content, whole_model: bool) -> list[tuple[str, Any]]:
    """The parts of a batch by the names that errors and `shared_inputs=` use: for a whole model, of its arguments."""
    return list((content["inputs"] if whole_model else content).items())


def _flat(part: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The leaves of a part, and the function that nests others as they are. Most parts are one tensor."""
    if isinstance(part, torch.Tensor):
        return [part], lambda leaves: leaves[0]
    leaves, spec = pytree.tree_flatten(part, is_leaf=is_leaf)
    return leaves, lambda others: pytree.tree_unflatten(others, spec)


def _tensors(leaf: Any) -> list[torch.Tensor]:
    return [leaf] if isinstance(leaf, torch.Tensor) else tensor_leaves(leaf)[0]


def _lengths(parts: Sequence[Any]) -> list[int]:
    return [int(tensor.shape[0]) for part in parts for tensor in _tensors(part) if tensor.dim() > 0]


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_by_sample(value: Any, size: int) -> bool:
    """Whether a value is a list that may have one entry for each sample: `size` entries of one type."""
    return isinstance(value, list) and len(value) == size and len({type(entry) for entry in value}) == 1


def _pieces_of(leaf: Any, name: str, size: int, count: int, shared: bool, whole_model: bool) -> Pieces:
    """How a leaf is cut. Raises BatchError for one that cannot be, or that could be in two ways."""
    if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == size and not shared:
        return leaf.__getitem__
    if shared or (isinstance(leaf, torch.Tensor) and leaf.dim() == 0):
        return lambda samples: leaf
    if _is_by_sample(leaf, size):
        tensors, _ = tensor_leaves(leaf)
        if not tensors or all(tensor.dim() > 0 and len(tensor) == size for tensor in tensors):
            what = f"tensors of length {size}" if tensors else "entries that are no tensors"
            per_sample = "stack them in one tensor" if tensors else "make a tensor of them"
            raise BatchError(
                f"{name!r} is a list of {size} {what}, and the batch has {size} samples too: whether each entry "
                f"belongs to one sample cannot be known, so the batch cannot be cut into {count} micro-batches. If it "
                f"does, {per_sample}; if each entry is meant for the whole batch, give them as a tuple."
            )
        return lambda samples: leaf[samples]
    tensors, tree = tensor_leaves(leaf)
    for tensor in tensors:
        if tensor.dim() > 0 and len(tensor) != size:
            raise _uncut(tensor, name, size, count, whole_model)
    return lambda samples: tree.fill([tensor[samples] if tensor.dim() > 0 else tensor for tensor in tensors])


def _uncut(tensor: torch.Tensor, name: str, size: int, count: int, whole_model: bool) -> BatchError:
    shape = tuple(tensor.shape)
    by_sample = "give a list with one tensor for each sample if its rows belong to samples"
    if whole_model:
        return BatchError(
            f"The tensor {name!r} of the batch has shape {shape}, and the batch has {size} samples, so it cannot be "
            f"cut into {count} micro-batches. Name it in shared_inputs=[{name!r}] if every micro-batch takes all of "
            f"it; {by_sample}; or use microbatches=1."
        )
    return BatchError(
        f"A tensor of the {name} has shape {shape}, and the batch has {size} samples, so it cannot be cut into {count} "
        f"micro-batches. Inputs and targets must have the same length along dimension 0; {by_sample}; or use "
        "microbatches=1. A whole model can name it in shared_inputs=."
    )
