"""What a model returns: its loss, and outputs by name, which training steps give back.

A whole model returns its loss as the attribute or key `loss`, alone, or as the only scalar of a tuple or list. Nothing
else is taken for one. Invariant: the tensors of a name are those that the model would return under it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from relay.errors import PartitionError
from relay.graph.pytree import TensorTree, tensor_leaves
from relay.partition.segments import NamedOutput, Partition

WHOLE = "output"
"""The name of all that a list of modules returns, if its output has nothing of that name."""


def scalar_loss(loss: Any) -> torch.Tensor:
    """A loss without dimensions; one of a single element, which PyTorch's backward takes too, loses them.

    Raises PartitionError for anything else.
    """
    if not isinstance(loss, torch.Tensor):
        raise PartitionError(f"The loss must be a scalar tensor; got {type(loss).__name__}.")
    if loss.numel() != 1 or not loss.dtype.is_floating_point:
        raise PartitionError(
            f"The loss must be a scalar of a floating-point dtype; got shape {tuple(loss.shape)} of {loss.dtype}. "
            "Reduce it, for example with .mean()."
        )
    return loss.reshape(()) if loss.dim() else loss


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss in what a whole model returns, or None. Raises PartitionError if it is not a scalar."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if named is not None:
        return scalar_loss(named)
    scalars = _scalars(output)
    return scalars[0][1] if len(scalars) == 1 else None


def _scalars(output: Any) -> list[tuple[int, torch.Tensor]]:
    """The scalars that may be a loss, with their positions: the output itself, or entries of a tuple or list."""
    entries = output if isinstance(output, (tuple, list)) else [output]
    return [
        (position, entry)
        for position, entry in enumerate(entries)
        if isinstance(entry, torch.Tensor) and entry.dim() == 0 and entry.is_floating_point()
    ]


def no_loss(model: str, partition: Partition) -> PartitionError:
    """The error for a model whose output has no loss, with what it returned instead."""
    values = [partition.values[number] for number in partition.results]
    output = partition.result_tree.fill([torch.empty(one.shape, dtype=one.dtype, device="meta") for one in values])
    kind, advice = type(output).__name__, ""
    if scalars := _scalars(output):
        positions = " and ".join(str(position) for position, _ in scalars)
        found = f"a {kind} with {len(scalars)} scalars, at positions {positions}; which of them is the loss is unknown"
    elif isinstance(output, torch.Tensor):
        found = f"a tensor of shape {tuple(output.shape)}"
    elif isinstance(output, (tuple, list)):
        found = f"a {kind} of {len(output)} without a scalar"
    else:
        known = list(output) if isinstance(output, Mapping) else list(getattr(output, "__dict__", {}))
        names = ", ".join(map(str, known)) or "nothing"
        found = f"a {kind} whose loss is None" if "loss" in known else f"a {kind} with {names}"
        advice = " Does the batch hold labels?"
    return PartitionError(
        f"{model} returned no loss for this batch, but {found}. A whole model must return its loss as the attribute or "
        f"key 'loss', alone, or as the only scalar of a tuple.{advice}"
    )


def named_outputs(partition: Partition, names: Sequence[str], whole_model: bool) -> dict[str, NamedOutput]:
    """The outputs of these names. Raises ValueError for a name that the model's output does not have."""
    return outputs_in(partition.result_tree, len(partition.results), names, whole_model)


def outputs_in(tree: TensorTree, count: int, names: Sequence[str], whole_model: bool) -> dict[str, NamedOutput]:
    """The same for a model whose output is `tree`, with `count` tensors in it."""
    if not names:
        return {}
    marks = [torch.empty(0) for _ in range(count)]
    number = {id(mark): position for position, mark in enumerate(marks)}
    output = tree.fill(marks)
    found: dict[str, NamedOutput] = {}
    for name in names:
        tensors, part = tensor_leaves(_part(output, name, whole_model))
        found[name] = NamedOutput(tuple(number[id(tensor)] for tensor in tensors), part)
    return found


def _part(output: Any, name: str, whole_model: bool) -> Any:
    if isinstance(output, Mapping) and name in output:
        return output[name]
    if not isinstance(output, torch.Tensor) and not name.startswith("_") and hasattr(output, name):
        return getattr(output, name)
    if name == WHOLE and not whole_model:
        return output
    if isinstance(output, Mapping):
        known = [str(key) for key in output]
    else:
        known = list(getattr(output, "_fields", None) or getattr(output, "__dict__", {}))
    has = ", ".join(known) if known and not isinstance(output, torch.Tensor) else "no names"
    hint = "" if whole_model else f" For all that the last module returns, write {WHOLE!r}."
    raise ValueError(
        f"outputs= asks for {name!r}, which the output of the model does not have. Its output is a "
        f"{type(output).__name__} with {has}.{hint}"
    )
