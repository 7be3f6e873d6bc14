"""The event: the completion of one submitted call, and the only thing that orders calls on different queues.

The contracts 1 to 3 of `hal.device` are about events. It is not a flag that a caller can set: an event is made by
submitting a call and by nothing else.
"""

from __future__ import annotations

import abc


class Event(abc.ABC):
    """The completion of one submitted call."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether the call has ended, well or badly. Never blocks."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Block until the call has ended. Raises the error of a call that failed (contract 3)."""

    @abc.abstractmethod
    def span(self) -> tuple[float, float]:
        """Start and end of a call that is done, in seconds on a clock that all queues of the device share.

        Both are zero where the device does not measure time.
        """

    def elapsed(self) -> float:
        """Seconds from start to end of a call that is done."""
        start, end = self.span()
        return end - start
