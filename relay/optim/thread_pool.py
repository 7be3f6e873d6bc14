"""A range cut into pieces that a crew of a few persistent threads works through, the caller among them.

It is not a queue of tasks: `work_through` returns when the range is done. Invariants: a piece begins at a multiple
of the alignment, so that no two threads write one cache line; who works on which piece is left to chance, so
the work on a piece may depend on its bounds only; calls from several threads at once share the crew, and each
finishes even if no one of it has time.

The crew gains from work that lets go of the interpreter lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

PIECES_A_THREAD = 8
"""More pieces than threads, for a core that is busy elsewhere takes fewer."""


class _Range:
    """One call's range: threads draw pieces until none is left, and the last to finish wakes the caller."""

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

    def help(self) -> None:
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
        """Wait for pieces that others took, and raise what any of them raised."""
        self._finished.acquire()
        if self._error is not None:
            raise self._error


class _Crew:
    """Daemon threads that take part in ranges; made when first asked for, and never more than asked for."""

    def __init__(self) -> None:
        self._ranges: SimpleQueue[_Range] = SimpleQueue()
        self._count = 0
        self._lock = threading.Lock()

    def invite(self, count: int, work: _Range) -> None:
        with self._lock:
            while self._count < count:
                name = f"relay-crew-{self._count}"
                threading.Thread(target=self._serve, args=(self._ranges,), name=name, daemon=True).start()
                self._count += 1
        for _ in range(count):
            self._ranges.put(work)

    @staticmethod
    def _serve(ranges: SimpleQueue[_Range]) -> None:
        while True:
            ranges.get().help()


_crew = _Crew()


def _forget_crew() -> None:
    global _crew
    _crew = _Crew()


if hasattr(os, "register_at_fork"):
    # Threads do not survive a fork, and a lock held by one of them would never be released.
    os.register_at_fork(after_in_child=_forget_crew)


def work_through(
    work: Callable[[int, int], None], size: int, *, alignment: int, threads: int | None, smallest: int
) -> None:
    """Call `work(begin, end)` for pieces that make up 0 to `size`, and return when all are done.

    alignment: what every begin is a multiple of. threads: how many work on it, the caller included
    (torch.get_num_threads() if None). smallest: a size below which a second thread costs more than it gains.
    """
    threads = torch.get_num_threads() if threads is None else threads
    threads = min(threads, max(1, size // smallest))
    if threads == 1:
        work(0, size)
        return
    piece = -(-size // (threads * PIECES_A_THREAD))
    shared = _Range(work, size, -(-piece // alignment) * alignment)
    _crew.invite(threads - 1, shared)
    shared.help()
    shared.join()
