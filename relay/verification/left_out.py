"""Layers of a whole model that plain PyTorch leaves out, as `step(batch, active_layers=...)` does.

A layer that is left out returns the first tensor that it is given, nested as its own output is. To find the nest, a
copy of the layer runs once, without gradients. Nothing is compared here. Invariant: the layers, their buffers and the
random generators are as before when the context has ended.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from relay.graph.pytree import TensorTree, tensor_leaves


@contextmanager
def left_out(layers: Sequence[nn.Module], views: Sequence[torch.Tensor]) -> Iterator[None]:
    """While open, these layers return their first tensor unchanged. `views` that they hold are not copied."""
    with ExitStack() as replaced:
        for layer in layers:
            replaced.enter_context(_returning_first(layer, views))
        yield


@contextmanager
def _returning_first(layer: nn.Module, views: Sequence[torch.Tensor]) -> Iterator[None]:
    own = vars(layer).get("forward")
    nests: list[TensorTree] = []

    def restore() -> None:
        vars(layer).pop("forward", None)
        if own is not None:
            vars(layer)["forward"] = own

    def first_tensor(*args: Any, **kwargs: Any) -> Any:
        if not nests:
            restore()
            copied = copy.deepcopy(layer, {id(view): view for view in views})
            layer.forward = first_tensor  # type: ignore[method-assign]
            with _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.no_grad():
                nests.append(tensor_leaves(copied.forward(*args, **kwargs))[1])
        return nests[0].fill(tensor_leaves((args, kwargs))[0][:1])

    layer.forward = first_tensor  # type: ignore[method-assign]
    try:
        yield
    finally:
        restore()
