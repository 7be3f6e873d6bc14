"""Ops whose C++ code computes otherwise for tensor subclasses, which fake tensors are, than for plain tensors.

PyTorch avoids there what a trace cannot hold, such as selecting by values. The other way rounds otherwise. Where plain
tensors would take a way that a trace cannot hold, the layer is not a graph, and runs eagerly. The gradient of products
is one that a trace can hold (`relay.capture.native.product_gradient`).

Nothing changes outside of a trace. The sweep over PyTorch's samples compares forward and backward of all ops
(`tests/relay/capture/sweep`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import DispatchKey

from relay.capture.guards.messages import NotAGraph
from relay.capture.native.product_gradient import product, product_along

aten = torch.ops.aten

_MEAN = 1
_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_AUTOGRAD = DispatchKey.Autograd


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


def _masked_fill(op: Any) -> Any:
    """The gradient of the value that is filled in is the sum over those elements alone that it filled."""

    def guarded(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> Any:
        if value.requires_grad and torch.is_grad_enabled():
            raise NotAGraph("masked_fill with a value that requires a gradient", "sums the elements that it filled")
        return op._op_dk(_AUTOGRAD, x, mask, value)

    return guarded


_GUARDED = {
    aten.cross_entropy_loss.default: (_COMPOSITE, _cross_entropy_loss),
    aten.masked_fill.Tensor: (_AUTOGRAD, _masked_fill(aten.masked_fill.Tensor)),
    aten.masked_fill_.Tensor: (_AUTOGRAD, _masked_fill(aten.masked_fill_.Tensor)),
    aten.prod.default: (_AUTOGRAD, product),
    aten.prod.dim_int: (_AUTOGRAD, product_along),
}


@contextlib.contextmanager
def eager_branches() -> Iterator[None]:
    """While open, a trace takes the ways that plain tensors take, or raises NotAGraph."""
    for op, (key, kernel) in _GUARDED.items():
        op.py_kernels[key] = kernel
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, (key, _) in _GUARDED.items():
            del op.py_kernels[key]
            op._dispatch_cache.clear()
