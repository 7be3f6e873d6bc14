"""Max-min fair sharing: how fast each of a few calls runs when together they want more than there is.

Progressive filling (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2): all calls are given bytes a second
at the same growing rate; a call stops growing when it has all it wants or when a rate that it needs is used up.
Invariant: no rate is exceeded, and no call could be faster without slowing one that is no better off.
"""

from __future__ import annotations

from collections.abc import Sequence

SLACK = 1e-12


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
