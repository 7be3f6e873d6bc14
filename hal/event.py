"""The event: the only thing that orders calls on different queues.

Contracts 1 to 3 of `hal.device` speak of it. An event is made by submitting a call and by nothing else.
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
        """Block until the call has ended; raise its error if it failed (contract 3)."""

    @abc.abstractmethod
    def span(self) -> tuple[float, float]:
        """When the call started and ended, in seconds on a clock that all queues of the device share.

        Only for a call that is done. Both are zero where the device does not measure.
        """

    def elapsed(self) -> float:
        """Seconds from start to end; only for a call that is done."""
        start, end = self.span()
        return end - start
