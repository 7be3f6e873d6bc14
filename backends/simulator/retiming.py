"""The calls of a run, kept in order, and timed again for other machines.

A run's schedule does not look at the clock, so on faster or slower hardware it submits the same calls, and waits for
the same of them between. Nothing of the schedule runs again: only the clock does, with what the same calls cost there.
Invariant: for the machines of the run itself the times come out as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.simulator.clock import HOST, NOTHING, Account, Clock, Cost, Owner, SimulatedEvent
from backends.simulator.cost import CostModel
from backends.simulator.sharing import SharedRates
from hal.spec import Machine
from hal.spec.timeline import LANES

_SUBMIT, _MARK = -1, -2
"""What stands in a tape where no number of a call does: the next call is submitted; a moment is marked."""


class Tape:
    """The calls of a run: kept when they are submitted, and what was waited for between them."""

    def __init__(self) -> None:
        self._entries: list[int] = []
        self._calls: list[tuple[int, Cost, tuple[int, ...]]] = []
        self._numbers: dict[SimulatedEvent, int] = {}

    def keep(self, event: SimulatedEvent, waits: Sequence[SimulatedEvent]) -> None:
        """A call was submitted. When all events of `waits` have ended, all that it waits for has."""
        numbers = self._numbers
        self._calls.append((event.lane, event.cost, tuple([numbers[other] for other in waits])))
        numbers[event] = len(numbers)
        self._entries.append(_SUBMIT)

    def awaited(self, event: SimulatedEvent) -> None:
        """The thread that submits waits for a call."""
        self._entries.append(self._numbers[event])

    def mark(self) -> None:
        """This moment is of interest."""
        self._entries.append(_MARK)

    def retimed(self, machines: Sequence[Machine], one_link: bool) -> list[float]:
        """The times of the marks, in seconds, on these machines."""
        clock = _TimesOnly(SharedRates(machines, one_link), machines[0].device.host_cores)
        models = [CostModel(machine) for machine in machines]
        costs: dict[tuple[int, Cost], Cost] = {}
        events: list[SimulatedEvent] = []
        calls = iter(self._calls)
        times: list[float] = []
        owner = Owner()
        for entry in self._entries:
            if entry == _MARK:
                times.append(clock.now)
            elif entry != _SUBMIT:
                clock.run_until(events[entry])
            else:
                lane, kept, waits = next(calls)
                device = 0 if lane == HOST else lane // len(LANES)
                cost = costs.get((device, kept))
                if cost is None:
                    cost = costs[device, kept] = NOTHING if kept.again is None else kept.again(models[device])
                event = SimulatedEvent(owner, len(events), lane, "", cost)
                pending = [other for other in [events[number] for number in waits] if not other.finished]
                events.append(event)
                clock.submit(event, pending, pending)
        return times


class _TimesOnly(Clock):
    """A clock that keeps no account of what the devices do meanwhile."""

    def _count(self, account: Account, device: int, passed: float, target: SimulatedEvent) -> None:
        pass
