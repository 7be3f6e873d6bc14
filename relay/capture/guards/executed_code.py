"""Which Python functions have run while a model was traced.

What a function mentions counts only if the function ran: a library's functions lead, name by name, to nearly all of
their library. The interpreter calls a trace function for every function that is entered. The dispatch of ops, by far
the most of what runs in a trace, is left out, as no model's code runs within it: PyTorch's dispatch modes are wrapped
while a recording is open. A trace function that is there already (a debugger's, a coverage tool's) is called as well.
The garbage collector waits meanwhile: the finalizers and callbacks that it runs belong to no model.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

_DISPATCHING = (FunctionalTensorMode, FakeTensorMode, FakeTensor, ProxyTorchDispatchMode)
_NAME = "__torch_dispatch__"
_executed: set[CodeType] = set()
_collecting: list[set[CodeType]] = []


def has_run(code: CodeType) -> bool:
    """Whether code ran in any trace of this process."""
    return code in _executed


@contextmanager
def recorded_code() -> Iterator[set[CodeType]]:
    """While open, all functions that this thread enters count as run, but for the dispatch of ops. Yields them."""
    before: Any = sys.gettrace()
    collects = gc.isenabled()
    ran: set[CodeType] = set()

    def entered(frame: FrameType, event: str, argument: Any) -> Any:
        _executed.add(frame.f_code)
        ran.add(frame.f_code)
        return None if before is None else before(frame, event, argument)

    with ExitStack() as stack:
        for kind in _DISPATCHING:
            stack.callback(setattr, kind, _NAME, kind.__dict__[_NAME])
            setattr(kind, _NAME, _unrecorded(kind.__dict__[_NAME]))
        gc.disable()
        sys.settrace(entered)
        try:
            yield ran
        finally:
            sys.settrace(before)
            if collects:
                gc.enable()
            for collected in _collecting:
                collected |= ran


@contextmanager
def collected_code() -> Iterator[set[CodeType]]:
    """While open, what `recorded_code` records comes together in the set that is yielded."""
    collected: set[CodeType] = set()
    _collecting.append(collected)
    try:
        yield collected
    finally:
        _collecting.pop()


def _unrecorded(dispatch: Any) -> Any:
    """A `__torch_dispatch__` within which nothing is recorded."""
    own = dispatch.__func__ if isinstance(dispatch, (classmethod, staticmethod)) else dispatch

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            return own(*args, **kwargs)
        finally:
            sys.settrace(tracer)

    return wrapper if own is dispatch else type(dispatch)(wrapper)
