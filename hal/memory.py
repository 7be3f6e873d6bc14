"""Counting bytes: the account of a device's or a host's memory.

An account does not allocate; its user charges it before allocating. Invariant: `in_use` never exceeds `capacity`, and
`peak` is the largest `in_use` since the last `reset_peak`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from hal.errors import OutOfMemory


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use now, the peak, and the capacity (None for no limit).

    `allocator_peak` is the peak that the runtime's own allocator reports, where it reports one.
    """

    in_use: int
    peak: int
    capacity: int | None
    allocator_peak: int | None = None


class MemoryAccount:
    """Bytes in use against a capacity. Safe to call from several threads."""

    def __init__(self, owner: str, capacity: int | None) -> None:
        self._owner = owner
        self._capacity = capacity
        self._in_use = 0
        self._peak = 0
        self._lock = threading.Lock()

    def charge(self, size: int, what: str) -> None:
        """Count `size` bytes as used.

        Args:
            size: bytes.
            what: what the memory is for, as the error names it.

        Raises:
            OutOfMemory: the capacity would be exceeded; nothing is counted.
            ValueError: `size` is negative.
        """
        if size < 0:
            raise ValueError(f"{what} cannot have {size} bytes")
        with self._lock:
            if self._capacity is not None and self._in_use + size > self._capacity:
                raise OutOfMemory(f"{what} on {self._owner}", size, self._in_use, self._capacity)
            self._in_use += size
            self._peak = max(self._peak, self._in_use)

    def refused(self, size: int, what: str) -> OutOfMemory:
        """Undo a charge whose memory the system refused. Returns the error to raise."""
        self.release(size)
        use = self.use()
        capacity = use.in_use if use.capacity is None else use.capacity
        return OutOfMemory(f"{what} on {self._owner}", size, use.in_use, capacity, "The system refused the memory.")

    def release(self, size: int) -> None:
        """Count `size` charged bytes as free."""
        with self._lock:
            self._in_use -= size

    def use(self) -> MemoryUse:
        """Bytes in use, peak and capacity."""
        with self._lock:
            return MemoryUse(self._in_use, self._peak, self._capacity)

    def reset_peak(self) -> None:
        """Start a new peak from the bytes in use now."""
        with self._lock:
            self._peak = self._in_use
