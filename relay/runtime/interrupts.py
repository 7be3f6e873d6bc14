"""Ctrl-C during a step is deferred until the step has ended.

A step that is interrupted while it is submitted would leave some layers updated and others not. Outside the main
thread, or where SIGINT is ignored or handled outside Python, nothing is deferred. Invariant: the previous handler is
restored afterwards, and an interrupt is never lost.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

PATIENCE = 3
"""At this many Ctrl-C the step is abandoned, and the state can no longer be trusted."""


class DeferredInterrupt:
    """A context that defers Ctrl-C. `count` is how many came."""

    def __init__(self) -> None:
        self.count = 0
        self._before: Any = None

    def __enter__(self) -> DeferredInterrupt:
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._before = handler
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count >= PATIENCE:
            self._before(number, frame)

    def deliver(self) -> None:
        """Call the previous handler for an interrupt that was deferred."""
        if self.count and self._before is not None:
            self.count = 0
            self._before(signal.SIGINT, None)
