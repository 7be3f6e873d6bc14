"""A thread that runs submitted calls in order: the queue of devices that are driven from the host, and the host's own.

It is not a thread pool: a worker is one in-order queue. Invariant: calls run in the order of submission; a call whose
awaited events failed does not run and fails with the first of those errors; the worker itself never ends because of a
call's error.

The hand-over is made of bare locks, because it is on the path of every call: an event is a lock that is released once,
when the call has ended.

Workers are joined at exit. Daemon threads freeze during interpreter shutdown, which would block their waiters, or abort
the process from native code.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter

from hal.errors import HalError
from hal.event import Event

logger = logging.getLogger(__name__)

PATIENCE_AT_EXIT = 60.0
"""Seconds that the exit of the process waits for calls that still run. A device that hangs must not block it."""


class WorkerEvent(Event):
    """The completion of a call on a worker."""

    __slots__ = ("_end", "_latch", "_start", "error", "finished")

    def __init__(self) -> None:
        self.finished = False
        self.error: BaseException | None = None
        self._start = 0.0
        self._end = 0.0
        self._latch = threading.Lock()
        self._latch.acquire()

    def done(self) -> bool:
        return self.finished

    def settle(self) -> None:
        """Block until the call has ended, without raising its error."""
        if not self.finished:
            # Released once by the worker; every waiter passes the latch on to the next.
            self._latch.acquire()
            self._latch.release()

    def wait(self) -> None:
        self.settle()
        if self.error is not None:
            raise self.error

    def span(self) -> tuple[float, float]:
        return self._start, self._end

    def finish(self, start: float, end: float, error: BaseException | None) -> None:
        """Record start, end and error of the call, and wake its waiters. Called once."""
        self._start, self._end, self.error = start, end, error
        self.finished = True
        self._latch.release()


def first_error(wait: Sequence[Event]) -> BaseException | None:
    """Block until all events of `wait` have ended. Returns the first error in the order of `wait`, or None."""
    error: BaseException | None = None
    for event in wait:
        if isinstance(event, WorkerEvent):
            event.settle()
            if error is None:
                error = event.error
        else:
            try:
                event.wait()
            except BaseException as failure:  # passed on to the waiters of this call
                error = error or failure
    return error


class Worker:
    """A thread with an in-order queue of calls. The thread starts with the first call and ends with `close`.

    Args:
        name: the name of the queue, for errors and the thread's name.
        on_start: called first on the thread.
    """

    def __init__(self, name: str, on_start: Callable[[], None] | None = None) -> None:
        self.name = name
        self._calls: deque[tuple[Callable[[], None], Sequence[Event], WorkerEvent, str]] = deque()
        self._ready = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._on_start = on_start
        self._closed = False
        self._lock = threading.Lock()  # one thread starts, and nothing is queued after the end

    def submit(self, call: Callable[[], None], wait: Sequence[Event], label: str) -> WorkerEvent:
        """Queue a call.

        Args:
            call: a function of no arguments, run on the thread.
            wait: the events that must end before it; if one failed, the call fails with the first error and is not run.
            label: the name of the call, for errors.

        Raises:
            HalError: the worker is closed.
        """
        event = WorkerEvent()
        with self._lock:
            if self._closed:
                raise HalError(f"queue {self.name!r} is closed, so {label} cannot be submitted. Open the device again.")
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=f"relay-{self.name}", daemon=True)
                with _running_lock:
                    _running.add(self)
                self._thread.start()
            self._calls.append((call, wait, event, label))
        self._ready.release()
        return event

    def drain(self) -> None:
        """Block until all queued calls have ended, with or without errors."""
        if self._thread is not None and not self._closed:
            self.submit(_nothing, (), "drain").settle()

    def close(self) -> None:
        """Run all queued calls, then end the thread. Closing twice is harmless."""
        if self._take_no_more():
            self._join()

    def _take_no_more(self) -> bool:
        """Make the thread end after the queued calls. False if that was done before."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
        if self._thread is not None:
            self._ready.release()
        return True

    def _join(self, seconds: float | None = None) -> bool:
        """Wait for the end of the thread, at most `seconds`. True if it has ended."""
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        if self._on_start is not None:
            self._on_start()
        while True:
            self._ready.acquire()
            if not self._calls:
                return  # the release of `close`
            call, wait, event, label = self._calls.popleft()
            error = first_error(wait)
            start = perf_counter()
            if error is None:
                try:
                    call()
                except HalError as failure:
                    error = failure
                except (Exception, SystemExit) as failure:
                    error = HalError(f"{label} failed on queue {self.name!r}: {type(failure).__name__}: {failure}")
                    error.__cause__ = failure
                except BaseException as failure:  # raised in the waiters, not in this thread
                    error = failure
            event.finish(start, perf_counter(), error)
            # A finished call may refer to gigabytes: drop it before the thread blocks.
            del call, wait, event, error


_running: weakref.WeakSet[Worker] = weakref.WeakSet()
_running_lock = threading.Lock()


@atexit.register
def _end_all() -> None:
    """At exit: run all queued calls, and end all threads."""
    with _running_lock:
        workers = list(_running)
    for worker in workers:  # all workers first, because one may wait for another
        worker._take_no_more()
    deadline = monotonic() + PATIENCE_AT_EXIT
    for worker in workers:
        if not worker._join(max(0.0, deadline - monotonic())):
            logger.warning("The process exits while queue %r still runs a call.", worker.name)


def _nothing() -> None:
    """A call that ends when all calls before it have."""
