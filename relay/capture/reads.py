"""Which attributes a module's code looks at while it is traced.

Two layers that differ only in what is never read (a number that says which layer it is, used by caches alone) compute
the same, and one capture serves both. What is read decides every branch that Python takes, so a layer equal in all
that was read would have read the same, and come to the same graph.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

Reads = dict[int, set[str] | None]
"""Names of attributes by the identity of the module; None where all of them count."""

_lock = threading.RLock()
_own_code = nn.Module.__init__.__code__.co_filename


@contextmanager
def recorded_reads(module: nn.Module) -> Iterator[Reads]:
    """Record what is read of a module and of those within it while open."""
    reads: Reads = {}
    plain = object.__getattribute__
    for one in module.modules():
        reads[id(one)] = set() if type(one).__getattribute__ is plain else None

    def watching(self: nn.Module, name: str) -> object:
        seen = reads.get(id(self))
        if seen is not None:
            if name != "__dict__":
                seen.add(name)
            elif sys._getframe(1).f_code.co_filename != _own_code:
                reads[id(self)] = None  # somebody looks at everything
        return plain(self, name)

    with _lock:
        nn.Module.__getattribute__ = watching  # type: ignore[method-assign,assignment]
        try:
            yield reads
        finally:
            del nn.Module.__getattribute__
