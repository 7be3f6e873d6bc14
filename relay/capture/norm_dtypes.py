"""The dtypes in which norms give their statistics, where PyTorch's fake tensors claim others.

Under autocast a norm is often given values rounded to bfloat16 or float16 and parameters in float32. The kernels then
give mean and deviation in float32, their fake forms on the CPU (torch 2.11 to 2.14) claim the dtype of the values; for
other devices it is group norms that are claimed wrong. A backward that is handed statistics stored as claimed refuses
them. So the op itself is asked, on a few real numbers of the same dtypes, on the device that the graph is for.

It corrects what is claimed of these ops and nothing else; shapes and strides stay. Invariant: what these ops claim
is what the kernel returns, wherever there is a kernel to ask.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from relay.capture.trace_for_device import CPU, missing

aten = torch.ops.aten

NORMS: frozenset[Any] = frozenset(
    {
        aten.native_layer_norm.default,
        aten.native_group_norm.default,
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit_no_training.default,
        aten._batch_norm_with_update.default,
        aten._batch_norm_with_update_functional.default,
    }
)
"""Those that return statistics beside their result."""

# The smallest case that all of them take: two samples of four channels.
_SHAPE_OF_INPUT = (2, 4)
_SIZES = {"normalized_shape": [4], "N": 2, "C": 4, "HxW": 1, "group": 2}


def correct_statistics(graph: fx.Graph, device: torch.device) -> None:
    """Let the norms of a graph that runs on `device` claim the dtypes that their kernels return there."""
    if device != CPU and missing(device):
        return
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in NORMS:
            continue
        found = _returned(node.target, tuple(_kind(argument) for argument in node.args), device)
        if found is None:
            continue
        claimed = node.meta["val"]
        node.meta["val"] = tuple(
            one if one.dtype is dtype else one.to(dtype) for one, dtype in zip(claimed, found, strict=True)
        )
        for user in node.users:
            if user.target is operator.getitem:
                user.meta["val"] = node.meta["val"][user.args[1]]


def _kind(argument: Any) -> Any:
    """What of an argument counts for dtypes; something that can be looked up by."""
    if isinstance(argument, fx.Node):
        return argument.meta["val"].dtype
    return tuple(argument) if isinstance(argument, (list, tuple)) else argument


@functools.cache
def _returned(target: Any, kinds: tuple[Any, ...], device: torch.device) -> tuple[torch.dtype, ...] | None:
    """The dtypes that an op returns, given arguments of those kinds; None where it cannot be run."""
    arguments: list[Any] = []
    with _disable_current_modes(), torch.no_grad():
        for declared, kind in zip(target._schema.arguments, kinds, strict=False):
            if isinstance(kind, torch.dtype):
                shape = _SHAPE_OF_INPUT if declared.name == "input" else _SHAPE_OF_INPUT[1:]
                arguments.append(torch.ones(shape, dtype=kind, device=device))
            else:
                arguments.append(_SIZES.get(declared.name, kind))
        try:
            return tuple(one.dtype for one in target(*arguments))
        except RuntimeError:  # the layer fails on such a device as well, and says why
            return None
