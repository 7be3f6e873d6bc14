"""`torch.inference_mode` in a model's forward, which a trace does not record.

A trace keeps where gradients go off and on (`torch.no_grad` and its like), and nothing of inference mode. For a model
that trains the two are one: nothing made in either has a gradient. What inference mode adds are errors for those who
would use its tensors in a backward. So while a model is traced the one stands for the other. It knows only
Python's context manager.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """While open, `torch.inference_mode` on this thread turns gradients off and on, as `torch.set_grad_enabled`."""
    mode: Any = torch.inference_mode
    thread = threading.get_ident()
    enter, leave = mode.__enter__, mode.__exit__

    def enter_without_gradients(self: Any) -> None:
        if threading.get_ident() != thread:
            enter(self)
            return
        self.gradients_before = torch.is_grad_enabled()
        # inference_mode(False) turns them on, also within no_grad.
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
