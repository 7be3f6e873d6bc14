"""A pool of a few persistent threads that share the work on a range, together with the calling thread.

It is not a queue of tasks: `work_through` returns when the range is done. Invariants: a piece of the range begins at a
multiple of the alignment, so that no two threads write to one cache line; which thread works on which piece is random,
so the work may depend on the bounds of a piece only; calls from several threads share the pool, and each finishes even
if all of the pool's threads are busy.

Work that releases the interpreter lock gains from it.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

PATIENCE_AT_EXIT = 5.0  # seconds

PIECES_A_THREAD = 8
"""More pieces than threads, so that a busy core can take fewer."""


class _Range:
    """The range of one call. Threads take pieces until none is left, and the last to finish wakes the caller."""

    def __init__(self, work: Callable[[int, int], None], size: int, piece: int) -> None:
        self._work = work
        self._size = size
        self._piece = piece
        self._next = 0
        self._unfinished = -(-size // piece)
        self._lock = threading.Lock()
        self._finished = threading.Lock()
        self._finished.acquire()
        self._error: BaseException | None = None

    def work(self) -> None:
        """Work on pieces until all are taken."""
        while True:
            with self._lock:
                begin = self._next
                if begin >= self._size:
                    return
                self._next = begin + self._piece
            try:
                self._work(begin, min(begin + self._piece, self._size))
            except BaseException as error:
                self._error = error
            with self._lock:
                self._unfinished -= 1
                if self._unfinished == 0:
                    self._finished.release()

    def join(self) -> None:
        """Wait for the pieces that other threads took, and raise an error of any of them."""
        self._finished.acquire()
        if self._error is not None:
            raise self._error


class _Pool:
    """Daemon threads that work on ranges. They are started when first needed, and never more than needed."""

    def __init__(self) -> None:
        self._ranges: SimpleQueue[_Range | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def share(self, count: int, work: _Range) -> None:
        with self._lock:
            while len(self._threads) < count:
                name = f"relay-optimizer-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._serve, args=(self._ranges,), name=name, daemon=True))
                self._threads[-1].start()
        for _ in range(count):
            self._ranges.put(work)

    def end(self, seconds: float) -> None:
        """End all threads, and wait for each for so many seconds at most."""
        for _ in self._threads:
            self._ranges.put(None)
        for thread in self._threads:
            thread.join(seconds)

    @staticmethod
    def _serve(ranges: SimpleQueue[_Range | None]) -> None:
        while (work := ranges.get()) is not None:
            work.work()
            del work  # it may refer to gigabytes


_pool = _Pool()


@atexit.register
def _end_pool() -> None:
    """A thread that let go of tensors while the interpreter ends would abort the process."""
    _pool.end(PATIENCE_AT_EXIT)


def _forget_pool() -> None:
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    # Threads do not survive a fork, and a lock held by one of them would never be released.
    os.register_at_fork(after_in_child=_forget_pool)


def work_through(
    work: Callable[[int, int], None], size: int, *, alignment: int, threads: int | None, smallest: int
) -> None:
    """Call `work(begin, end)` for pieces that make up the range from 0 to `size`, and return when all are done.

    Args:
        work: called from several threads at once.
        size: the end of the range.
        alignment: every `begin` is a multiple of it.
        threads: how many threads work on it, including the caller; torch.get_num_threads() if None.
        smallest: a size below which a second thread costs more than it gains.
    """
    threads = torch.get_num_threads() if threads is None else threads
    threads = min(threads, max(1, size // smallest))
    if threads == 1:
        work(0, size)
        return
    piece = -(-size // (threads * PIECES_A_THREAD))
    shared = _Range(work, size, -(-piece // alignment) * alignment)
    _pool.share(threads - 1, shared)
    shared.work()
    shared.join()
