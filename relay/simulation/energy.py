"""The energy of a simulated step: one model of power, summed over a timeline or drawn along it.

A device draws its idle watts all the time and its busy watts while it computes. A host draws its idle watts all the
time and its busy watts while a host task runs or the link carries data, because the host is at one end of the link.
Nothing is measured here.

Invariant: the integral of `power` over the step equals `joules`.
"""

from __future__ import annotations

from hal.spec import Machine
from hal.spec.timeline import Timeline

ENERGY_ERROR = 0.37
"""Energy from board power is wrong by up to this share either way: published comparisons are 27 to 37 % off."""


def joules(machine: Machine, timeline: Timeline) -> float:
    """Energy of device and host from the start to the end of a timeline."""
    return idle(machine) * timeline.now + _above_idle(machine, timeline.busy["compute"], timeline.beside)


def joules_waiting(machine: Machine, timeline: Timeline) -> float:
    """The part of `joules` that is spent while the device computes nothing."""
    waiting = timeline.now - timeline.busy["compute"]
    return idle(machine) * waiting + _above_idle(machine, 0.0, timeline.beside_alone)


def power(machine: Machine, timeline: Timeline) -> list[tuple[float, float]]:
    """The power over a recorded timeline: pairs of seconds and the watts that are drawn from then on."""
    compute_changes: dict[float, int] = {0.0: 0, timeline.now: 0}
    other_changes: dict[float, int] = {}
    for span in (*timeline.spans, *timeline.unfinished):
        changes = compute_changes if span.lane == "compute" else other_changes
        for time, change in ((span.start, 1), (span.end, -1)):
            changes[time] = changes.get(time, 0) + change
    found = []
    computing = others = 0
    for time in sorted({*compute_changes, *other_changes}):
        computing += compute_changes.get(time, 0)
        others += other_changes.get(time, 0)
        found.append((time, idle(machine) + _above_idle(machine, float(computing > 0), float(others > 0))))
    return found


def idle(machine: Machine) -> float:
    """Watts of all devices and the host while they are idle."""
    return sum(one.device["power_idle"] for one in machine.each) + machine.host["power_idle"]


def _above_idle(machine: Machine, device: float, host: float) -> float:
    """What devices and host draw beyond idle when they are busy for that many seconds, each device for as many."""
    busy_times = [*((one.device, device) for one in machine.each), (machine.host, host)]
    return sum((spec["power_busy"] - spec["power_idle"]) * busy for spec, busy in busy_times)
