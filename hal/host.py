"""The host: where the eager param-server keeps its state and runs its tasks.

The host is a device too, for accounting: a ledger says, byte for byte, what each state costs. It is not the place
of any optimizer's arithmetic. Invariant: memory handed out is in the ledger before it exists, so the ledger is
never below what is held, and an allocation beyond the capacity raises `OutOfMemory` and leaves it unchanged.

A backend may subclass `Host` to give page-locked memory or a virtual clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hal.event import Event
from hal.memory import MemoryAccount, MemoryUse
from hal.page_lock import LockedMemory
from hal.spec.units import format_size
from hal.worker import Worker


@dataclass(frozen=True)
class HostWork:
    """What a host task costs: `bytes` read and written in host memory. A hint for hosts that model time; hosts that run
    tasks do not look at it."""

    bytes: int = 0


class Ledger:
    """Bytes on the host by state (such as `master weights`) and dtype."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, torch.dtype], int] = {}
        self._lock = threading.Lock()

    def add(self, state: str, dtype: torch.dtype, size: int) -> None:
        """Count `size` more bytes (fewer, where it is negative)."""
        with self._lock:
            total = self._rows.get((state, dtype), 0) + size
            if total:
                self._rows[(state, dtype)] = total
            else:
                self._rows.pop((state, dtype), None)

    def rows(self) -> list[tuple[str, torch.dtype, int]]:
        """(state, dtype, bytes), in the order of first use."""
        with self._lock:
            return [(state, dtype, size) for (state, dtype), size in self._rows.items()]

    @property
    def total(self) -> int:
        """All bytes."""
        with self._lock:
            return sum(self._rows.values())

    def __str__(self) -> str:
        rows = self.rows()
        width = max([len(state) for state, _, _ in rows], default=5)
        lines = [
            f"{state:<{width}}  {str(dtype).removeprefix('torch.'):<8}  {size:>18,} B  {format_size(size):>10}"
            for state, dtype, size in rows
        ]
        total = self.total
        lines.append(f"{'total':<{width}}  {'':<8}  {total:>18,} B  {format_size(total):>10}")
        return "\n".join(lines)


class Host:
    """Host memory with a ledger, and a queue of tasks.

    With `locked` given, memory that crosses the link is page-locked as far as its budget goes; without it the device
    gains nothing from that. With `worker` given, tasks run there, in order with whatever else it runs: a device that
    computes on the host's own cores lends its compute queue, for two threads that each want all cores only slow each
    other down.
    """

    def __init__(
        self, capacity: int | None = None, worker: Worker | None = None, locked: LockedMemory | None = None
    ) -> None:
        self.ledger = Ledger()
        self._locked = locked
        self._account = MemoryAccount("the host", capacity)
        self._own_worker = worker is None
        self._worker = worker if worker is not None else Worker("host")

    def alloc(self, count: int, dtype: torch.dtype, state: str, crosses: bool = False) -> torch.Tensor:
        """A flat tensor of `count` elements for that state, 64-byte aligned, uninitialised, in the ledger.

        `crosses` says that it will be sent over the link, so that it is worth page-locking.
        """
        size = count * dtype.itemsize
        what = f"{state} ({str(dtype).removeprefix('torch.')})"
        self._account.charge(size, what)
        self.ledger.add(state, dtype, size)
        if crosses and self._locked is not None:
            piece = self._locked.alloc(size, what)
            if piece is not None:
                return piece.view(dtype)
        try:
            return torch.empty(count, dtype=dtype)
        except RuntimeError as failure:
            self.ledger.add(state, dtype, -size)
            raise self._account.refused(size, what) from failure

    def free(self, tensor: torch.Tensor, state: str) -> None:
        """Take a tensor of `alloc` out of the ledger. Its memory goes with its last reference."""
        size = tensor.numel() * tensor.dtype.itemsize
        if self._locked is not None:
            self._locked.free(tensor)
        self._account.release(size)
        self.ledger.add(state, tensor.dtype, -size)

    def run(
        self,
        task: Callable[[], None],
        wait: Sequence[Event] = (),
        label: str = "host task",
        work: HostWork | None = None,
    ) -> Event:
        """Run a task after the events of `wait`, in order with the tasks before it. Its error travels along.

        `work` says what it costs, for hosts that model time instead of spending it.
        """
        return self._worker.submit(task, wait, label)

    @property
    def worker(self) -> Worker:
        """Where tasks run."""
        return self._worker

    def memory(self) -> MemoryUse:
        """Bytes in use, peak and capacity."""
        return self._account.use()

    @property
    def page_locked(self) -> int:
        """Bytes of page-locked memory in use."""
        return self._locked.in_use if self._locked is not None else 0

    def follow(self, other: Host) -> None:
        """Run tasks where another host runs them from now on: that of a device which takes the place of a lost one.

        Memory and ledger stay. The other host is not to be used any more.
        """
        if self._own_worker:
            self._worker.close()
        self._worker, self._own_worker = other._worker, other._own_worker

    def close(self) -> None:
        """Finish the queued tasks. Closing twice is harmless."""
        if self._own_worker:
            self._worker.close()
        else:
            self._worker.drain()
