"""`torch.inference_mode` in the forward of a model, which a trace does not record.

A trace records `torch.no_grad` and `torch.enable_grad`, but not inference mode. For training they have the same effect:
tensors made under either have no gradient; inference mode only adds errors when these are used in a backward. So
inference mode is traced as no_grad. Only the context manager is replaced. Invariant: other threads are not affected.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """While open, `torch.inference_mode` on this thread acts as `torch.set_grad_enabled`."""
    mode: Any = torch.inference_mode
    thread = threading.get_ident()
    enter, leave = mode.__enter__, mode.__exit__

    def enter_without_gradients(self: Any) -> None:
        if threading.get_ident() != thread:
            enter(self)
            return
        self.gradients_before = torch.is_grad_enabled()
        # inference_mode(False) turns gradients on, also within no_grad.
        torch.set_grad_enabled(not self.mode)

    def leave_as_it_was(self: Any, *raised: Any) -> None:
        if threading.get_ident() != thread:
            leave(self, *raised)
            return
        torch.set_grad_enabled(self.gradients_before)

    mode.__enter__, mode.__exit__ = enter_without_gradients, leave_as_it_was
    try:
        yield
    finally:
        mode.__enter__, mode.__exit__ = enter, leave
