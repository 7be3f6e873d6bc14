"""Where a simulated step's energy goes: one model of power, summed over a timeline or drawn along it.

A device draws its idle watts all the time and its busy watts while it computes; a host its idle watts all the time and
its busy watts while a host task runs or something crosses the link, whose far end it is. Nothing is measured here, and
board power is not the power drawn: see `relay.simulation.ENERGY_ERROR`.

Invariant: what `power` says, integrated over the step, is `joules`.
"""

from __future__ import annotations

from hal.spec import Machine
from hal.spec.timeline import Timeline


def joules(machine: Machine, timeline: Timeline) -> float:
    """Energy of device and host from a timeline's first moment to its last."""
    return idle(machine) * timeline.now + _swing(machine, timeline.busy["compute"], timeline.beside)


def joules_waiting(machine: Machine, timeline: Timeline) -> float:
    """The part of `joules` that is spent while nothing computes."""
    still = timeline.now - timeline.busy["compute"]
    return idle(machine) * still + _swing(machine, 0.0, timeline.beside_alone)


def power(machine: Machine, timeline: Timeline) -> list[tuple[float, float]]:
    """Seconds and the watts that are drawn from then on, from 0 to the end of a recorded timeline."""
    computing: dict[float, int] = {0.0: 0, timeline.now: 0}
    beside: dict[float, int] = {}
    for span in (*timeline.spans, *timeline.unfinished):
        lane = computing if span.lane == "compute" else beside
        for at, change in ((span.start, 1), (span.end, -1)):
            lane[at] = lane.get(at, 0) + change
    found = []
    computes = others = 0
    for at in sorted({*computing, *beside}):
        computes += computing.get(at, 0)
        others += beside.get(at, 0)
        found.append((at, idle(machine) + _swing(machine, float(computes > 0), float(others > 0))))
    return found


def idle(machine: Machine) -> float:
    """Watts of device and host that do nothing."""
    return machine.device["power_idle"] + machine.host["power_idle"]


def _swing(machine: Machine, device: float, host: float) -> float:
    """What is drawn beyond idle by a device and a host that are busy for so long."""
    times = (machine.device, device), (machine.host, host)
    return sum((spec["power_busy"] - spec["power_idle"]) * busy for spec, busy in times)
