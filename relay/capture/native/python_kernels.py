"""The Python forms that PyTorch traces in place of its own kernels, kept out of traces.

Some ops have a second implementation in Python, registered for the Autograd key or as CompositeImplicitAutograd. Plain
PyTorch never runs it; tracing does, in place of the op. Many round otherwise than the kernel (resampling, margin
losses), so a native graph is traced without any of them but for those of `KEPT`. Core graphs are made of simple ops
and need them, but for those of `WRONG`.

It changes nothing outside of a trace. Invariant: after `own_kernels` PyTorch is as it was.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import DispatchKey

aten = torch.ops.aten

KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
"""Where a Python form stands in for a kernel in a trace."""

WRONG: tuple[Any, ...] = (aten.multilabel_margin_loss_forward.default,)
"""multilabel_margin_loss_forward: the Python form (torch 2.11 to 2.14) also sums the margins of the places behind a
row's first -1, which the kernel ends at. `tests/relay/capture/core/test_pooling_and_losses.py` compares the two."""

KEPT: dict[str, str] = {
    "aten::native_batch_norm": "the kernel changes the running statistics without its schema declaring it",
    "aten::cudnn_batch_norm": "the kernel changes the running statistics without its schema declaring it",
    "aten::dropout": "masks are drawn from a key; `relay.capture.random_ops` gives the result the kernel's rounding",
    "aten::istft": "the kernel reads values of the window, to check it",
    "aten::tensor_split.tensor_indices_or_sections": "the kernel reads the indices",
}
"""Python forms that native graphs are traced with, by the name of the op, and why. A test holds each of them against
its kernel."""


def has_python_form(op: torch._ops.OpOverload) -> bool:
    """Whether a trace would run Python in place of the op."""
    return not op.py_kernels.keys().isdisjoint(KEYS)


def python_forms() -> list[torch._ops.OpOverload]:
    """All overloads of ATen that have a Python form. One that has is among the attributes of its packet."""
    attributes = sum(len(vars(packet)) for packet in _packets())
    return [op for op in _overloads(attributes) if op.py_kernels and has_python_form(op)]


def _packets() -> list[torch._ops.OpOverloadPacket]:
    return [packet for packet in vars(aten).values() if isinstance(packet, torch._ops.OpOverloadPacket)]


@functools.lru_cache(maxsize=1)
def _overloads(attributes: int) -> list[torch._ops.OpOverload]:
    """The overloads among so many attributes of packets, which PyTorch adds as they are first read."""
    of_all = (value for packet in _packets() for value in vars(packet).values())
    return [value for value in of_all if isinstance(value, torch._ops.OpOverload)]


@contextlib.contextmanager
def own_kernels(native: bool) -> Iterator[None]:
    """Within it, ops are traced as ops, and not as their implementation in Python: for native graphs all but `KEPT`,
    else those that are `WRONG` alone."""
    ops = [op for op in python_forms() if op.name() not in KEPT] if native else WRONG
    taken = [(op, key, op.py_kernels.pop(key)) for op in ops for key in KEYS if key in op.py_kernels]
    for op, _, _ in taken:
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, key, kernel in taken:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()
