"""Which attributes a module's code looks at while it is traced.

Two layers that differ only in what is never read (a number that says which layer it is, used by caches alone) compute
the same, and one capture serves both. What is read decides every branch that Python takes, so a layer equal in all
that was read would have read the same, and come to the same graph.

Python has one hook that sees every read, `__getattribute__` of the class. Ways that touch less were weighed: to give
the instances a subclass for the while changes `type(module)`, on which code branches; a profile function does not
see attributes; parameters alone (`torch.func.functional_call`, parametrizations) are not what layers differ in. So
`nn.Module` has the hook while a recording is open. It hands every read on as it is, notes those of the recording
thread alone, and what was there before is put back when the last recording ends, however it ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Reads = dict[int, set[str] | None]
"""Names of attributes by the identity of the module; None where all of them count."""

_HOOK = "__getattribute__"
_lock = threading.Lock()
_own_code = nn.Module.__init__.__code__.co_filename


class _Open(threading.local):
    """The recordings that this thread has open, the innermost last."""

    def __init__(self) -> None:
        self.recordings: list[Reads] = []


class _Hook:
    """The hook on `nn.Module`, there while any thread records."""

    def __init__(self) -> None:
        self.open = _Open()
        self._users = 0
        self._before: Any = None

    def hold(self) -> None:
        """Put the hook in place, if it is not."""
        with _lock:
            self._users += 1
            if self._users == 1:
                self._before = nn.Module.__dict__.get(_HOOK)
                setattr(nn.Module, _HOOK, self._watching(self._before or object.__getattribute__))

    def release(self) -> None:
        """Take it away once nobody needs it."""
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
            for reads in mine.recordings:
                seen = reads.get(id(module))
                if seen is not None:
                    if name != "__dict__":
                        seen.add(name)
                    elif sys._getframe(1).f_code.co_filename != _own_code:
                        reads[id(module)] = None  # somebody looks at everything
            return plain(module, name)

        return watching


_hook = _Hook()


@contextmanager
def recorded_reads(module: nn.Module) -> Iterator[Reads]:
    """Record what this thread reads of a module and of those within it while open."""
    _hook.hold()
    try:
        hook = nn.Module.__getattribute__
        reads: Reads = {id(one): set() if type(one).__getattribute__ is hook else None for one in module.modules()}
        _hook.open.recordings.append(reads)
        try:
            yield reads
        finally:
            _hook.open.recordings.pop()
    finally:
        _hook.release()


@contextmanager
def reads_unrecorded() -> Iterator[None]:
    """While open, what this thread reads is not noted: code runs that is captured later by itself."""
    open_here = _hook.open
    recordings, open_here.recordings = open_here.recordings, []
    try:
        yield
    finally:
        open_here.recordings = recordings
