"""Events of other devices and of the host's own threads, as the simulator's calls wait for them.

Each is given a stand-in among the device's own events: it takes no time of the virtual clock, and has run when what it
stands for has ended. A submission never blocks on one, and nobody waits for one while holding the device's lock, for
it may end by what another thread submits here.
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

    def expect(self, one: SimulatedEvent) -> None:
        """Take a stand-in in."""
        if _ended(one):
            run(one)
        else:
            self._expected.append(one)

    def take_in(self) -> None:
        """Let calls go on whose events have ended meanwhile."""
        if self._expected:
            arrived = [one for one in self._expected if _ended(one)]
            self._expected = [one for one in self._expected if one not in arrived]
            for one in arrived:
                self._order.arrived(one)

    def await_all(self) -> None:
        """Wait for all of them. Not under the device's lock."""
        await_foreign_events(self._expected)


def await_foreign_events(events: Sequence[SimulatedEvent]) -> None:
    """Wait for what the stand-ins among the events stand for. Its errors are for those who wait on it."""
    for event in events:
        if event.outside is not None:
            with contextlib.suppress(Exception):  # an interrupt of the waiting itself goes on
                event.outside.wait()


def _ended(one: SimulatedEvent) -> bool:
    return one.outside is None or one.outside.done()
