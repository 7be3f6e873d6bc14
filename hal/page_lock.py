"""Page-locked host memory: pieces that a device can reach by DMA at full speed, exact in size, with a budget.

Pageable memory crosses a link at about a sixth of the speed. What PyTorch's own pinned allocator hands out is
rounded up to a power of two; here a piece is mapped by itself, page-aligned, and locked as it is. A `PageLocker` is
a device's way of locking (`mlock` for the host itself; a driver's registration for a GPU); the budget is counted
here. Where locking is refused the memory stays pageable and a warning says so, once, with the reason.

Invariant: `in_use` never passes `budget`, and a piece is either locked whole or not at all.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import mmap
import os
import warnings
from typing import Protocol

import torch

from hal.spec.units import format_size


class PageLocker(Protocol):
    """How a device locks memory that is already there."""

    def lock(self, address: int, size: int) -> str:
        """Lock it; the reason as text where that is refused, else an empty string."""

    def unlock(self, address: int, size: int) -> None:
        """The reverse."""


class Mlock:
    """The operating system's own page lock (`mlock(2)`), limited by `ulimit -l`."""

    def __init__(self) -> None:
        name = ctypes.util.find_library("c")
        self._libc = ctypes.CDLL(name, use_errno=True) if name else None

    def lock(self, address: int, size: int) -> str:
        if self._libc is None or not hasattr(self._libc, "mlock"):
            return "this system has no mlock"
        if self._libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)) == 0:
            return ""
        return f"mlock: {os.strerror(ctypes.get_errno())} (see `ulimit -l`)"

    def unlock(self, address: int, size: int) -> None:
        if self._libc is not None:
            self._libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(size))


class LockedMemory:
    """Maps and locks pieces within a budget of bytes (None: as much as the locker allows)."""

    def __init__(self, locker: PageLocker, budget: int | None) -> None:
        self._locker = locker
        self.budget = budget
        self.in_use = 0
        self._pieces: dict[int, tuple[mmap.mmap, int]] = {}
        self._warned = False

    def alloc(self, size: int, what: str) -> torch.Tensor | None:
        """`size` bytes of locked memory as a flat uint8 tensor, or None where the budget or the system refuses."""
        if size == 0:
            return None
        if self.budget is not None and self.in_use + size > self.budget:
            self._say(what, size, f"the budget of {format_size(self.budget)} for page-locked memory is used up")
            return None
        memory = mmap.mmap(-1, size)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        reason = self._locker.lock(tensor.data_ptr(), size)
        if reason:
            self._say(what, size, reason)
            return None
        self.in_use += size
        self._pieces[tensor.data_ptr()] = (memory, size)
        return tensor

    def free(self, tensor: torch.Tensor) -> bool:
        """Unlock a piece; False where the tensor is none of these. Its memory goes with its last reference."""
        piece = self._pieces.pop(tensor.data_ptr(), None)
        if piece is None:
            return False
        _, size = piece
        self._locker.unlock(tensor.data_ptr(), size)
        self.in_use -= size
        return True

    def _say(self, what: str, size: int, reason: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{what} ({format_size(size)}) stays pageable: {reason}. Transfers of pageable memory are several "
                "times slower. Raise the limit, or lower what has to cross the link.",
                RuntimeWarning,
                stacklevel=3,
            )


def give_back_free_memory() -> None:
    """Return memory that was freed and that the C library keeps to the system, where it can (glibc's malloc_trim).

    Blocks of a few megabytes stay with the process otherwise: a model that moves, tensor by tensor, from one place to
    another would be held twice.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(ctypes.c_size_t(0))
