"""Ctrl-C for commands: each press has its meaning, also while the main thread is stuck in a driver's call.

The first press ends the run after the step, the second stops waiting for the step (`relay.runtime.step_guard` does
both), and the third, which is this module's, ends the process at once. Not for use in a library: it ends the process.
Invariant: a thread counts the presses, so the third works whatever the main thread waits for.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import TracebackType

EXIT_CODE = 128 + signal.SIGINT

FIRST = "Stopping; a step that runs is finished first. Ctrl-C again does not wait for it."
SECOND = "Not waiting for the step any more, and closing the device. Ctrl-C once more ends the process at once."


class CountedInterrupts:
    """A context that says what each Ctrl-C does, and ends the process at the third.

    Does nothing outside the main thread, and where another's `signal.set_wakeup_fd` is in place.

    Args:
        say: receives a line for the user, on another thread.
        at_the_end: gives the last line before the process ends: what is saved, and how to continue.
    """

    def __init__(self, say: Callable[[str], None], at_the_end: Callable[[], str]) -> None:
        self.count = 0
        self.at_the_end = at_the_end
        self._say = say
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> CountedInterrupts:
        if threading.current_thread() is not threading.main_thread():
            return self
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            reading.close()
            writing.close()
            return self
        self._sockets = reading, writing
        self._thread = threading.Thread(target=self._count, args=(reading,), name="relay-interrupts", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # After the second the process ends, and what hangs may hang it: the third must still work then.
        if self._sockets is not None and self._thread is not None and self.count < 2:
            signal.set_wakeup_fd(-1)
            self._sockets[1].close()  # which ends the thread
            # A thread that let go of the trainer while the interpreter ends would abort the process.
            self._thread.join()

    def _count(self, reading: socket.socket) -> None:
        with reading:
            while numbers := reading.recv(16):
                for number in numbers:
                    if number == signal.SIGINT:
                        self.count += 1
                        self._answer()

    def _answer(self) -> None:
        if self.count < 3:
            self._say(FIRST if self.count == 1 else SECOND)
            return
        try:
            print(f"\nrelay: {self.at_the_end()}", file=sys.stderr, flush=True)
        finally:
            os._exit(EXIT_CODE)
