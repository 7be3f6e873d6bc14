"""The host: the memory in which the eager parameter server keeps its state, and the queue of its tasks.

The host is accounted like a device: a ledger gives the bytes of each state. No optimizer's arithmetic is here.
Invariant: memory is in the ledger before it exists, so the ledger is never below what is allocated, and an allocation
beyond the capacity raises `OutOfMemory` and changes nothing.

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
    """The cost of a host task: `bytes` that it reads and writes in host memory. Only hosts that model time use it."""

    bytes: int = 0


class Ledger:
    """Bytes of host memory by state (such as `master weights`) and dtype. Safe to use from several threads."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, torch.dtype], int] = {}
        self._lock = threading.Lock()

    def add(self, state: str, dtype: torch.dtype, size: int) -> None:
        """Add `size` bytes to a state; a negative size subtracts."""
        with self._lock:
            total = self._rows.get((state, dtype), 0) + size
            if total:
                self._rows[(state, dtype)] = total
            else:
                self._rows.pop((state, dtype), None)

    def rows(self) -> list[tuple[str, torch.dtype, int]]:
        """A tuple (state, dtype, bytes) for each row, in the order of first use."""
        with self._lock:
            return [(state, dtype, size) for (state, dtype), size in self._rows.items()]

    @property
    def total(self) -> int:
        """Bytes of all states."""
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

    Args:
        capacity: the limit of its memory in bytes; None for no limit.
        worker: the thread that runs tasks; a thread of the host's own unless given. A device that computes on the
            host's cores gives its compute queue, because two threads that each use all cores slow each other down.
        locked: page-locked memory for what crosses the link, as far as its budget goes; None for pageable memory.
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
        """Allocate a flat tensor, aligned to 64 bytes and not initialised, and add it to the ledger.

        Args:
            count: the number of elements.
            dtype: the dtype of the elements.
            state: the row of the ledger, such as `master weights`.
            crosses: whether the tensor will be sent over the link, so that it should be page-locked.

        Raises:
            OutOfMemory: the capacity would be exceeded, or the system refuses the memory.
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

    def require(self, size: int, what: str) -> None:
        """Raise OutOfMemory if `size` more bytes, for `what`, would exceed the capacity. Nothing is allocated."""
        self._account.charge(size, what)
        self._account.release(size)

    def free(self, tensor: torch.Tensor, state: str) -> None:
        """Remove a tensor of `alloc` from the ledger's row `state`. Its memory is freed with its last reference."""
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
        """Submit a task. Tasks run in the order of submission.

        Args:
            task: a function of no arguments.
            wait: events of any device or host, after which the task runs.
            label: the name of the task, for errors.
            work: its cost, for hosts that model time.

        Returns:
            The event of the task's end; an error of the task is raised where it is waited for.
        """
        return self._worker.submit(task, wait, label)

    @property
    def worker(self) -> Worker:
        """The thread that runs the tasks."""
        return self._worker

    def memory(self) -> MemoryUse:
        """Bytes in use, peak and capacity."""
        return self._account.use()

    @property
    def page_locked(self) -> int:
        """Bytes of page-locked memory in use."""
        return self._locked.in_use if self._locked is not None else 0

    def follow(self, other: Host) -> None:
        """Run tasks on the worker of another host from now on: that of the device that replaces a lost device.

        Memory and ledger stay as they are. The other host must not be used afterwards.
        """
        if self._own_worker:
            self._worker.close()
        self._worker, self._own_worker = other._worker, other._own_worker

    def close(self) -> None:
        """Wait for the queued tasks. Closing twice is harmless."""
        if self._own_worker:
            self._worker.close()
        else:
            self._worker.drain()
