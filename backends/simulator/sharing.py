"""Max-min fair sharing: how fast each of a few calls runs when together they want more than there is.

Progressive filling (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2): all calls are given bytes a second
at the same growing rate; a call stops growing when it has all it wants or when a rate that it needs is used up.
Invariant: no rate is exceeded, and no call could be faster without slowing one that is no better off.
"""

from __future__ import annotations

from collections.abc import Sequence

from hal.spec import Machine

SLACK = 1e-12
_DOWN, _UP = 0, 1


class SharedRates:
    """The rates, in bytes a second, that the calls of some devices on one host share.

    They are the host's memory and each device's, and each link's two directions together. With `one_link` all devices
    are behind one link, of which they share each direction as well.
    """

    def __init__(self, machines: Sequence[Machine], one_link: bool) -> None:
        first = machines[0]
        self.devices = len(machines)
        self._one_link = one_link and self.devices > 1
        links = machines[:1] if self._one_link else machines
        self.rates = [first.host["bandwidth_achieved"]]
        self.rates += [machine.device["bandwidth_achieved"] for machine in machines]
        self._links = len(self.rates)
        self.rates += [machine.link["both"] for machine in links]
        self._directions = len(self.rates)
        if self._one_link:
            self.rates += [first.link["down"], first.link["up"]]

    def demand(self, device: int, kind: int, wants: tuple[float, float, float]) -> tuple[float, ...]:
        """What a call on a kind of lane wants of each rate; `wants` is of host memory, device memory and link."""
        demand = [0.0] * len(self.rates)
        demand[0], demand[1 + device] = wants[0], wants[1]
        demand[self._links + (0 if self._one_link else device)] = wants[2]
        if self._one_link and kind in (_DOWN, _UP):
            demand[self._directions + kind] = wants[2]
        return tuple(demand)


def speeds(demands: Sequence[tuple[float, ...]], rates: Sequence[float]) -> list[float]:
    """The speed of each call, 1 being undisturbed. `demands[i][k]` is what call i wants of rate k at full speed."""
    if all(sum(column) <= rate for column, rate in zip(zip(*demands, strict=True), rates, strict=True)):
        return [1.0] * len(demands)
    speed = [1.0] * len(demands)
    left = list(rates)
    wants = [max(demand) for demand in demands]
    growing = [number for number, want in enumerate(wants) if want > 0]
    level = 0.0
    while growing:
        # The level at which the first call is satisfied, or the first rate is used up.
        satisfied = min(wants[number] for number in growing)
        step = satisfied - level
        draw = [sum(demands[number][k] / wants[number] for number in growing) for k in range(len(rates))]
        for k, drawn in enumerate(draw):
            if drawn > 0:
                step = min(step, left[k] / drawn)
        level += step
        for k, drawn in enumerate(draw):
            left[k] -= step * drawn
        full = [k for k, rate in enumerate(rates) if left[k] <= rate * SLACK]
        stopped = [
            number
            for number in growing
            if wants[number] <= level * (1 + SLACK) or any(demands[number][k] > 0 for k in full)
        ]
        for number in stopped:
            speed[number] = min(1.0, level / wants[number])
        growing = [number for number in growing if number not in stopped]
    return speed
