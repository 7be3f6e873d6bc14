"""A gate: an event of the host that ends when the test opens it, to delay the work that waits for it.

It ends by itself after a while, so that a device which wrongly blocks in a submission fails the test and does not hang.
"""

from __future__ import annotations

import threading
from types import TracebackType

from hal.event import Event
from hal.worker import Worker

LONGEST = 20.0  # seconds
MOMENT = 0.05  # seconds


class Gate:
    """Closed inside its `with` block, unless opened earlier; what waits for `event` runs after."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._worker = Worker("gate")
        self.event: Event = self._worker.submit(self._stand, (), "gate")
        self.timed_out = False

    def open(self) -> None:
        """End the event."""
        self._open.set()

    def hold(self) -> None:
        """Stay closed for a moment: a call that wrongly does not wait has most likely run by then."""
        self._open.wait(MOMENT)

    def _stand(self) -> None:
        self.timed_out = not self._open.wait(LONGEST)

    def __enter__(self) -> Gate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open()
        self._worker.close()
        if kind is None:
            assert not self.timed_out, "a submission blocked: it must return while what it waits for is not done"


def failed(error: BaseException) -> Event:
    """An event of a host task that raised `error`."""
    worker = Worker("failing")

    def fail() -> None:
        raise error

    event = worker.submit(fail, (), "a task that fails")
    worker.close()
    return event
