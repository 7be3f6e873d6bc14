"""The outputs of a model by name: attributes or keys of what it returns, for training steps that give them back.

Nothing is computed here. Invariant: the tensors of a name are those that the model would return under it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from relay.graph.pytree import TensorTree, tensor_leaves
from relay.partition.segments import NamedOutput, Partition

WHOLE = "output"
"""The name of all that a list of modules returns, if its output has nothing of that name."""


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
