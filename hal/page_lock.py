"""Page-locked host memory: pieces that a device reaches by DMA at full speed, exact in size, with a budget.

Pageable memory crosses a link at about a sixth of the speed. PyTorch's own pinned allocator rounds sizes up to a power
of two; here a piece is mapped by itself, page-aligned, and locked in its own size. A `PageLocker` is a device's way of
locking (`mlock` for the host itself; a driver's registration for a GPU); the budget is counted here. Where locking is
refused the memory stays pageable and a warning gives the reason, once.

Invariant: `in_use` never exceeds `budget`, and a piece is either locked whole or not at all.
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
    """A way of locking allocated memory. Addresses are those of the process; sizes are in bytes."""

    def lock(self, address: int, size: int) -> str:
        """Lock memory. Returns an empty string, or the reason if it is refused."""

    def unlock(self, address: int, size: int) -> None:
        """Unlock memory that `lock` locked."""


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
    """Page-locked memory in pieces.

    Args:
        locker: how memory is locked.
        budget: the limit in bytes; None for no limit but the locker's.
    """

    def __init__(self, locker: PageLocker, budget: int | None) -> None:
        self._locker = locker
        self.budget = budget
        self.in_use = 0
        self._pieces: dict[int, tuple[mmap.mmap, int]] = {}
        self._warned = False

    def alloc(self, size: int, what: str) -> torch.Tensor | None:
        """Allocate locked memory.

        Args:
            size: bytes.
            what: what the memory is for, as the warning names it.

        Returns:
            A flat uint8 tensor; None if the budget is used up or locking is refused, after a warning the first time.
        """
        if size == 0:
            return None
        if self.budget is not None and self.in_use + size > self.budget:
            self._warn(what, size, f"the budget of {format_size(self.budget)} for page-locked memory is used up")
            return None
        memory = mmap.mmap(-1, size)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        reason = self._locker.lock(tensor.data_ptr(), size)
        if reason:
            self._warn(what, size, reason)
            return None
        self.in_use += size
        self._pieces[tensor.data_ptr()] = (memory, size)
        return tensor

    def free(self, tensor: torch.Tensor) -> bool:
        """Unlock a piece. Its memory is freed with its last reference. Returns False if the tensor is no piece."""
        piece = self._pieces.pop(tensor.data_ptr(), None)
        if piece is None:
            return False
        _, size = piece
        self._locker.unlock(tensor.data_ptr(), size)
        self.in_use -= size
        return True

    def _warn(self, what: str, size: int, reason: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{what} ({format_size(size)}) stays pageable: {reason}. Transfers of pageable memory are several "
                "times slower. Raise the limit, or lower what has to cross the link.",
                RuntimeWarning,
                stacklevel=3,
            )


def give_back_free_memory() -> None:
    """Return freed memory that the C library retains to the system, if it can (glibc's malloc_trim).

    Blocks of a few megabytes stay with the process otherwise, so that a model whose tensors are copied and freed one
    by one would take its memory twice.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(ctypes.c_size_t(0))
