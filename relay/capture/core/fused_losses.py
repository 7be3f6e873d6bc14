"""Decompositions of PyTorch's fused linear cross-entropy, which computes gradients in its forward.

Part of the core lowering (`relay.capture.core.lowering`). The ops are private to PyTorch and newer than the oldest
PyTorch that Relay runs with, so they are in the table only where PyTorch has them. Chunks are not kept: they change
memory, not results.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _scaled(
    rows: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, classes: Tensor | None, reduction: str,
    ignored: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Log-probabilities, what each row counts, and its target's class in range, as an index and as ones."""
    logits = rows @ weight.t()
    logs = torch.log_softmax(logits if bias is None else logits + bias, 1)
    counted = target != ignored
    inside = torch.where(counted, target, torch.zeros_like(target))
    counts = counted.to(rows.dtype)
    if classes is not None:
        counts = counts * classes.index_select(0, inside).to(rows.dtype)
    if reduction == "mean":
        counts = counts / counts.sum()
    chosen = torch.arange(len(weight), device=rows.device) == inside.unsqueeze(1)
    return logs, counts, inside, chosen.to(rows.dtype)


def _whole(
    rows: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, classes: Tensor | None, reduction: str,
    ignored: int, smoothing: float, chunk: int, policy: str, dtype: torch.dtype, retain: bool, for_rows: bool,
    for_weight: bool, for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss, and the gradients of those of rows, weight and bias that are asked for."""
    logs, counts, inside, chosen = _scaled(rows, weight, target, bias, classes, reduction, ignored)
    loss = -(logs.gather(1, inside.unsqueeze(1)).squeeze(1) * counts).sum()
    gradient = (logs.exp() - chosen) * counts.unsqueeze(1)
    nothing = rows.new_empty((0, 0))
    return (
        loss,
        gradient @ weight if for_rows else nothing,
        gradient.t() @ rows if for_weight else nothing,
        gradient.sum(0) if for_bias else rows.new_empty((0,)),
    )


def _each(
    rows: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, classes: Tensor | None, ignored: int,
    chunk: int, policy: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The loss of each row."""
    logs, counts, inside, _ = _scaled(rows, weight, target, bias, classes, "none", ignored)
    return -(logs.gather(1, inside.unsqueeze(1)).squeeze(1) * counts)


def fused_losses() -> dict[Any, Callable[..., Any]]:
    """The decompositions by overload, of the ops that this PyTorch has."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.nn.modules.linear_cross_entropy")  # it registers them, at the first call else
    own: dict[str, Callable[..., Any]] = {
        "_linear_cross_entropy_batch_chunked": _whole,
        "_linear_cross_entropy_batch_chunked_no_reduction": _each,
    }
    return {
        getattr(torch.ops.torch_nn, name).default: function
        for name, function in own.items()
        if hasattr(torch.ops.torch_nn, name)
    }
