"""The stall watchdog: says what a step waits for when it has waited too long.

It ends nothing: a slow disk or a debugger are no reason to lose a run. Invariant: it reads and writes nothing that
the step uses, and without a time given there is no thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic
from types import TracebackType

logger = logging.getLogger("relay")


class Watchdog:
    """Around waiting: after every `seconds` it logs what `describe` gives, as an error. None: it does nothing."""

    def __init__(self, seconds: float | None, describe: Callable[[], str]) -> None:
        self._seconds = seconds
        self._describe = describe
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if self._seconds is not None:
            self._thread = threading.Thread(target=self._watch, name="relay-watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        start = monotonic()
        while not self._ended.wait(self._seconds):
            logger.error("A step has been waited for for %.0f s.\n%s", monotonic() - start, self._describe())
