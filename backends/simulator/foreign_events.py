"""Events of other devices and of the host's own threads, as the simulator's calls wait for them.

Each is given a stand-in among the device's own events: it takes no time of the virtual clock, and has run when what it
stands for has ended. A submission never blocks on such an event, and the lock of the device is not held while one
is waited for, because its end may need a call that another thread submits here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from backends.simulator.clock import HOST, NOTHING, Owner, SimulatedEvent
from backends.simulator.orders import Order, run
from hal.event import Event


def stand_in(event: Event, owner: Owner, number: int, now: float) -> SimulatedEvent:
    """The stand-in of an event, under a number of the owner's, at a time of its clock."""
    result = SimulatedEvent(owner, number, HOST, "an event from elsewhere", NOTHING)
    result.start = result.end = now
    result.finished = True
    result.outside = event
    result.call = event.wait
    return result


class Arrivals:
    """The stand-ins whose events have not ended yet."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._expected: list[SimulatedEvent] = []

    def expect(self, substitute: SimulatedEvent) -> None:
        """Take a stand-in in."""
        if _ended(substitute):
            run(substitute)
        else:
            self._expected.append(substitute)

    def take_in(self) -> None:
        """Let calls go on whose events have ended meanwhile."""
        if self._expected:
            arrived = [substitute for substitute in self._expected if _ended(substitute)]
            self._expected = [substitute for substitute in self._expected if substitute not in arrived]
            for substitute in arrived:
                self._order.arrived(substitute)

    def await_all(self) -> None:
        """Wait for all of them. Not under the device's lock."""
        await_foreign_events(self._expected)


def await_foreign_events(events: Sequence[SimulatedEvent]) -> None:
    """Wait for what the stand-ins among the events stand for. Its errors are for those who wait on it."""
    for event in events:
        if event.outside is not None:
            with contextlib.suppress(Exception):  # an interrupt of the waiting itself goes on
                event.outside.wait()


def _ended(substitute: SimulatedEvent) -> bool:
    return substitute.outside is None or substitute.outside.done()
