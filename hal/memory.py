"""Counting bytes: the account of a device's memory, and sizes as people write them.

An account does not allocate; whoever allocates charges it first. Invariant: `in_use` never passes `capacity`, and
`peak` is the largest `in_use` there has been since the last `reset_peak`.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from fractions import Fraction

from hal.errors import OutOfMemory

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_size(text: str | int) -> int:
    """Bytes meant by a size such as `256MB` (256 * 10**6), `256MiB` (256 * 2**20), `1.5GB` or `4096`.

    Raises ValueError for anything else, and for sizes that are not positive.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
        if match is None or match.group(2).lower() not in _UNITS:
            raise ValueError(f"{text!r} is not a size. Expected a number with MB, MiB, GB, GiB ..., such as 256MB.")
        size = int(Fraction(match.group(1)) * _UNITS[match.group(2).lower()])  # exact, where floats lose bytes
    if size <= 0:
        raise ValueError(f"{text!r} is not a size above zero bytes.")
    return size


def format_size(size: float) -> str:
    """Bytes as a person reads them, in decimal units: 1_530_000 -> `1.53 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use now, the peak, and the capacity (None when nobody set one)."""

    in_use: int
    peak: int
    capacity: int | None


class MemoryAccount:
    """Bytes in use against a capacity. Safe to call from several threads."""

    def __init__(self, owner: str, capacity: int | None) -> None:
        self._owner = owner
        self._capacity = capacity
        self._in_use = 0
        self._peak = 0
        self._lock = threading.Lock()

    def charge(self, size: int, what: str) -> None:
        """Count `size` bytes as used. Raises OutOfMemory, and counts nothing, where that passes the capacity."""
        if size < 0:
            raise ValueError(f"{what} cannot have {size} bytes")
        with self._lock:
            if self._capacity is not None and self._in_use + size > self._capacity:
                raise OutOfMemory(f"{what} on {self._owner}", size, self._in_use, self._capacity)
            self._in_use += size
            self._peak = max(self._peak, self._in_use)

    def refused(self, size: int, what: str) -> OutOfMemory:
        """Take back a charge whose memory the system did not give; returns the error to raise."""
        self.release(size)
        use = self.use()
        capacity = use.in_use if use.capacity is None else use.capacity
        return OutOfMemory(f"{what} on {self._owner}", size, use.in_use, capacity, "The system refused the memory.")

    def release(self, size: int) -> None:
        """Give `size` charged bytes back."""
        with self._lock:
            self._in_use -= size

    def use(self) -> MemoryUse:
        """The figures now."""
        with self._lock:
            return MemoryUse(self._in_use, self._peak, self._capacity)

    def reset_peak(self) -> None:
        """Start a new peak from the bytes in use now."""
        with self._lock:
            self._peak = self._in_use
