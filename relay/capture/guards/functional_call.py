"""The parameters and buffers of a module by place, and running it with others in their places.

`torch.func.functional_call` knows tensors by name. A module that is part of another in two places has two names for
each of its tensors, and replacing both leaves the module with the replacement for good; here every place has one
name, however many paths lead to it, and tied tensors are replaced in all their places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def places(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every place in which a module holds a parameter or a buffer, once, with the first path to it."""
    for path, owner in module.named_modules():  # each module once
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None:
                yield (f"{path}.{name}" if path else name), tensor


def call_with(
    module: nn.Module, originals: Sequence[torch.Tensor], others: Sequence[torch.Tensor], args: Any, kwargs: Any = None
) -> Any:
    """`module(*args, **kwargs)` with each of `originals` replaced by its counterpart, wherever it is held."""
    other_of = {id(original): other for original, other in zip(originals, others, strict=True)}
    for original, other in zip(originals, others, strict=True):
        carry_attributes(vars(original), other)
    state = {name: other_of[id(tensor)] for name, tensor in places(module) if id(tensor) in other_of}
    return torch.func.functional_call(module, state, tuple(args), kwargs or {}, tie_weights=False)


def carry_attributes(attributes: Mapping[str, Any], other: torch.Tensor) -> None:
    """What code has set on a parameter (`weight.gain = 2.0`) stands on what takes its place too: code may read it."""
    if attributes and vars(other) is not attributes:
        vars(other).update(attributes)


@contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """Afterwards every place holds the parameter or buffer that it holds now: a trace replaces them by name."""
    held = [(table, dict(table)) for one in module.modules() for table in (one._parameters, one._buffers)]
    try:
        yield
    finally:
        for table, before in held:
            table.update(before)
