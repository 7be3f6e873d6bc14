"""Correcting the dtypes of the statistics of norms in a traced graph.

Under autocast a norm often takes values in bfloat16 or float16 and parameters in float32. Its kernel then returns mean
and deviation in float32, but its fake implementation for the CPU (torch 2.11 to 2.14) reports the dtype of the values;
for other devices that of group norm is wrong. The backward refuses statistics stored in the reported dtype. So the op
is run on a few real numbers of the same dtypes, on the device that the graph is for, and the graph's metadata is
corrected.

Shapes, strides and other ops are left alone. Invariant: the reported dtypes are those that the kernel returns, if there
is a kernel on this machine.
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
"""Norms that return statistics besides their result."""

# The smallest input that all of them take: two samples of four channels.
_SHAPE_OF_INPUT = (2, 4)
_SIZES = {"normalized_shape": [4], "N": 2, "C": 4, "HxW": 1, "group": 2}


def correct_statistics(graph: fx.Graph, device: torch.device) -> None:
    """Correct the dtypes of the norms' results in the metadata of a graph that runs on `device`."""
    if device != CPU and missing(device):
        return
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in NORMS:
            continue
        found = _returned(node.target, tuple(_kind(argument) for argument in node.args), device)
        if found is None:
            continue
        reported = node.meta["val"]
        node.meta["val"] = tuple(
            result if result.dtype is dtype else result.to(dtype) for result, dtype in zip(reported, found, strict=True)
        )
        for user in node.users:
            if user.target is operator.getitem:
                user.meta["val"] = node.meta["val"][user.args[1]]


def _kind(argument: Any) -> Any:
    """What matters of an argument for the dtypes of results, as a hashable value."""
    if isinstance(argument, fx.Node):
        return argument.meta["val"].dtype
    return tuple(argument) if isinstance(argument, (list, tuple)) else argument


@functools.cache
def _returned(target: Any, kinds: tuple[Any, ...], device: torch.device) -> tuple[torch.dtype, ...] | None:
    """The dtypes that an op returns for arguments of these kinds; None if it cannot run on the device."""
    arguments: list[Any] = []
    with _disable_current_modes(), torch.no_grad():
        for declared, kind in zip(target._schema.arguments, kinds, strict=False):
            if isinstance(kind, torch.dtype):
                shape = _SHAPE_OF_INPUT if declared.name == "input" else _SHAPE_OF_INPUT[1:]
                arguments.append(torch.ones(shape, dtype=kind, device=device))
            else:
                arguments.append(_SIZES.get(declared.name, kind))
        try:
            return tuple(result.dtype for result in target(*arguments))
        except RuntimeError:  # the layer itself then fails on the device, with the reason
            return None
