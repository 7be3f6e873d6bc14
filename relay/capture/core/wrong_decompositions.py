"""Ops whose implementation in PyTorch's tracing gives other values than their kernels, kept out of every trace.

Some ops have a second implementation in Python, which is traced in place of the op. If it gives other values than the
kernel, the traced layer would silently train differently from the same layer in plain PyTorch. Nothing changes outside
of a trace. Invariant: after `own_kernels` PyTorch is as it was before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import DispatchKey

aten = torch.ops.aten

WRONG: list[Any] = [aten.multilabel_margin_loss_forward.default]
"""multilabel_margin_loss_forward: the Python form (torch 2.11 to 2.14) also sums the margins of targets after a
row's first -1, where the kernel stops. `tests/relay/capture/core/test_pooling_and_losses.py` compares the two."""


@contextlib.contextmanager
def own_kernels() -> Iterator[None]:
    """While open, these ops are traced as ops, and not as their implementation in Python."""
    taken = {op: op.py_kernels.pop(DispatchKey.Autograd) for op in WRONG if DispatchKey.Autograd in op.py_kernels}
    for op in taken:
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernel in taken.items():
            op.py_kernels[DispatchKey.Autograd] = kernel
            op._dispatch_cache.clear()
