"""Ops whose C++ code computes otherwise for tensor subclasses, which fake tensors are, than for plain tensors.

PyTorch avoids there what a trace cannot hold, such as selecting by values. The other way rounds otherwise. Where plain
tensors would take the way that a trace cannot hold, the layer is not a graph, and runs eagerly.

Nothing changes outside of a trace. Only forward code is covered here; the sweep over PyTorch's samples compares
forward and backward of all ops (`tests/relay/capture/sweep`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import DispatchKey

from relay.capture.guards.messages import NotAGraph

aten = torch.ops.aten

_MEAN = 1
_COMPOSITE = DispatchKey.CompositeImplicitAutograd


def _cross_entropy_loss(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """The mean over smoothed labels with class weights divides by a sum over the targets that are not ignored."""
    if weight is not None and label_smoothing and reduction == _MEAN and not target.is_floating_point():
        raise NotAGraph(
            "cross_entropy with class weights and label smoothing", "selects the weights of those targets that count"
        )
    return aten.cross_entropy_loss.default._op_dk(
        _COMPOSITE, logits, target, weight, reduction, ignore_index, label_smoothing
    )


_GUARDED = {aten.cross_entropy_loss.default: _cross_entropy_loss}


@contextlib.contextmanager
def refused_subclass_branches() -> Iterator[None]:
    """While open, a trace that would take such a way raises NotAGraph."""
    for op, guard in _GUARDED.items():
        op.py_kernels[_COMPOSITE] = guard
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op in _GUARDED:
            del op.py_kernels[_COMPOSITE]
            op._dispatch_cache.clear()
