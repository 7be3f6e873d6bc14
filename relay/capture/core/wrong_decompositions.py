"""What PyTorch's tracing computes otherwise than PyTorch's own kernels do, kept out of every trace.

Some ops have a second implementation in Python that is traced in place of the op. One that gives other values must
not be: the traced layer would train towards something else than the same layer in plain PyTorch, and nobody would
know. It mends nothing outside of a trace. Invariant: after `own_kernels` PyTorch is as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import DispatchKey

aten = torch.ops.aten

WRONG: list[Any] = [aten.multilabel_margin_loss_forward.default]
"""multilabel_margin_loss_forward: the Python form (torch 2.11 to 2.14) also sums the margins of the places behind a
row's first -1, which the kernel ends at. `tests/test_pooling_and_losses.py` holds the two against each other."""


@contextlib.contextmanager
def own_kernels() -> Iterator[None]:
    """Within it, those ops are traced as ops, and not as their implementation in Python."""
    taken = {op: op.py_kernels.pop(DispatchKey.Autograd) for op in WRONG if DispatchKey.Autograd in op.py_kernels}
    for op in taken:
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernel in taken.items():
            op.py_kernels[DispatchKey.Autograd] = kernel
            op._dispatch_cache.clear()
