"""Compiled functions and reentrant checkpoints in a model's code, run as the plain code that they wrap.

`torch.compile`, as a decorator or by `module.compile()`, and `torch.utils.checkpoint(use_reentrant=True)` change how
code runs, not what it computes, and neither can be traced. Relay compiles and recomputes segments itself, so both are
bypassed while a model's code is traced or run. Other threads keep their checkpoints; what they have compiled runs
eagerly for that time. Invariant: PyTorch's settings and classes are as before once nobody bypasses any more.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

_lock = threading.Lock()


class _Depth(threading.local):
    """How many bypasses this thread has open."""

    depth = 0


class _Bypass:
    """What is in place while any thread bypasses."""

    def __init__(self) -> None:
        self.mine = _Depth()
        self._users = 0
        self._stack = ExitStack()

    def hold(self) -> None:
        with _lock:
            self._users += 1
            if self._users == 1:
                self._put_in_place()
        self.mine.depth += 1

    def release(self) -> None:
        self.mine.depth -= 1
        with _lock:
            self._users -= 1
            if self._users == 0:
                self._stack.close()

    def _put_in_place(self) -> None:
        mine = self.mine

        def apply(cls: Any, function: Any, preserve: Any, *args: Any) -> Any:
            if mine.depth:
                return without_checkpoint(function, args)
            return super(CheckpointFunction, cls).apply(function, preserve, *args)  # type: ignore[misc]

        CheckpointFunction.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
        self._stack.callback(delattr, CheckpointFunction, "apply")
        if "torch._dynamo" in sys.modules:  # else nothing has been compiled
            config: Any = sys.modules["torch._dynamo"].config
            self._stack.enter_context(config.patch(error_on_nested_fx_trace=False))
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))


_bypass = _Bypass()


@contextmanager
def bypassed() -> Iterator[None]:
    """While open, what this thread calls runs without compilers and without reentrant checkpoints."""
    _bypass.hold()
    try:
        yield
    finally:
        _bypass.release()


def without_checkpoint(function: Any, args: Any) -> Any:
    """`function(*args)` as a reentrant checkpoint computes it: no gradient inside unless an argument requires one."""
    trained = any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in args)
    with nullcontext() if trained else torch.no_grad():
        return function(*args)
