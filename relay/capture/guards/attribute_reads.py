"""Which attributes the code of a module reads while it is traced.

Two layers that differ only in attributes that are never read (a layer index that only caches use) compute the same, and
one capture serves both. The attributes that are read decide every branch that Python takes, so a layer that is equal in
all of them would read the same attributes and give the same graph.

The only hook in Python that sees every read is `__getattribute__` of the class. The alternatives do not serve: a
temporary subclass of the instances changes `type(module)`, on which code may branch; a profile function does not see
attributes; and parameters (`torch.func.functional_call`, parametrizations) are not what layers differ in. So
`nn.Module` has the hook while `recorded_reads` is open in any thread. Invariant: the hook returns every attribute
unchanged, records reads of the threads that opened it alone, and is removed when the last of them leaves.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Reads = dict[int, set[str] | None]
"""Names of the attributes read, by the id of the module; None if all of them count as read."""

_HOOK = "__getattribute__"
_lock = threading.Lock()
_own_code = nn.Module.__init__.__code__.co_filename


class _Open(threading.local):
    """The reads that this thread is recording, the innermost last."""

    def __init__(self) -> None:
        self.open_reads: list[Reads] = []


class _Hook:
    """The hook on `nn.Module`, in place while any thread records."""

    def __init__(self) -> None:
        self.open = _Open()
        self._users = 0
        self._before: Any = None

    def hold(self) -> None:
        """Put the hook in place, unless another thread has."""
        with _lock:
            self._users += 1
            if self._users == 1:
                self._before = nn.Module.__dict__.get(_HOOK)
                setattr(nn.Module, _HOOK, self._watching(self._before or object.__getattribute__))

    def release(self) -> None:
        """Remove the hook, unless another thread needs it."""
        with _lock:
            self._users -= 1
            if self._users == 0:
                if self._before is None:
                    delattr(nn.Module, _HOOK)
                else:
                    setattr(nn.Module, _HOOK, self._before)
                self._before = None

    def _watching(self, plain: Callable[[Any, str], Any]) -> Callable[[nn.Module, str], Any]:
        mine = self.open

        def watching(module: nn.Module, name: str) -> Any:
            for reads in mine.open_reads:
                seen = reads.get(id(module))
                if seen is not None:
                    if name != "__dict__":
                        seen.add(name)
                    elif sys._getframe(1).f_code.co_filename != _own_code:
                        reads[id(module)] = None  # code that reads `__dict__` may read every attribute
            return plain(module, name)

        return watching


_hook = _Hook()


@contextmanager
def recorded_reads(module: nn.Module) -> Iterator[Reads]:
    """While open, record which attributes of a module and its submodules this thread reads. Yields them."""
    _hook.hold()
    try:
        hook = nn.Module.__getattribute__
        reads: Reads = {id(part): set() if type(part).__getattribute__ is hook else None for part in module.modules()}
        _hook.open.open_reads.append(reads)
        try:
            yield reads
        finally:
            _hook.open.open_reads.pop()
    finally:
        _hook.release()


@contextmanager
def reads_unrecorded() -> Iterator[None]:
    """While open, what this thread reads is not noted: code runs that is captured later by itself."""
    open_here = _hook.open
    open_reads, open_here.open_reads = open_here.open_reads, []
    try:
        yield
    finally:
        open_here.open_reads = open_reads
