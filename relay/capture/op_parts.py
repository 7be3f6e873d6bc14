"""What a single op is made of: its decomposition into simpler ops, for analyses that know the simpler ones alone."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's table; to make it takes longer than to trace an op."""
    return dict(core_aten_decompositions())


def parts_of(target: Callable[..., Any], args: Any, kwargs: Any) -> fx.GraphModule | None:
    """The graph of one call, its tensors the inputs in order; None where it has no parts or cannot be traced.

    `args` and `kwargs` hold fake tensors.
    """
    leaves, form = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def call(given: list[torch.Tensor]) -> list[torch.Tensor]:
        rest = iter(given)
        filled = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        own_args, own_kwargs = pytree.tree_unflatten(filled, form)
        results = target(*own_args, **own_kwargs)
        return [results] if isinstance(results, torch.Tensor) else list(results)

    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            traced = make_fx(call, _decompositions(), tracing_mode="fake")(tensors)
    except Exception:  # whatever the decomposition raises: the op then has no parts to look at
        return None
    calls = [node for node in traced.graph.nodes if node.op == "call_function"]
    return None if any(node.target == target for node in calls) else traced
