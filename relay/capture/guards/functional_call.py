"""Calling a module with other tensors instead of its parameters and buffers.

`torch.func.functional_call` replaces tensors by name. A submodule that a module holds under two names has two names for
each of its tensors, and replacing both leaves the replacement in the module. Here each attribute of each module has
exactly one name, and tied tensors are replaced everywhere. Invariant: the module is the same afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer attribute of a module and its submodules, each once, with the first name for it."""
    for path, owner in module.named_modules():
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None:
                yield (f"{path}.{name}" if path else name), tensor


def tensor_at(module: nn.Module, name: str) -> torch.Tensor:
    """The parameter or buffer of that name."""
    owner, _, own_name = name.rpartition(".")
    found: torch.Tensor = getattr(module.get_submodule(owner), own_name)
    return found


def call_with(
    module: nn.Module, originals: Sequence[torch.Tensor], others: Sequence[torch.Tensor], args: Any, kwargs: Any = None
) -> Any:
    """`module(*args, **kwargs)` with each of the tensors `originals` replaced by its counterpart in `others`."""
    other_of = {id(original): other for original, other in zip(originals, others, strict=True)}
    for original, other in zip(originals, others, strict=True):
        carry_attributes(vars(original), other)
    state = {name: other_of[id(tensor)] for name, tensor in named_tensors(module) if id(tensor) in other_of}
    return torch.func.functional_call(module, state, tuple(args), kwargs or {}, tie_weights=False)


def carry_attributes(attributes: Mapping[str, Any], other: torch.Tensor) -> None:
    """Copy the attributes that code has set on a parameter (`weight.gain = 2.0`) to the tensor that replaces it."""
    if attributes and vars(other) is not attributes:
        vars(other).update(attributes)


@contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """Restore all parameters and buffers of a module on exit. A trace replaces them by name."""
    tables: list[tuple[Any, Any]] = [
        (table, dict(table)) for part in module.modules() for table in (part._parameters, part._buffers)
    ]
    try:
        yield
    finally:
        for table, before in tables:
            table.update(before)
