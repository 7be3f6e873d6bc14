"""The points of a sweep: which settings are tried, and what a simulated step gives at each.

Nothing is read from or written to files here (`table`, `heat_map`). Invariant: every combination has a point; one that
does not fit, or is impossible, has its reason in place of figures.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hal.spec import SpecError
from relay.simulation.described.transformer_shape import ShapeError
from relay.simulation.host_cache import HostCache
from relay.simulation.ranges.ranged import Ranged
from relay.simulation.simulate import machine_of, simulate
from relay.simulation.sweeping.hardware_figures import is_figure, with_figure

MOST_POINTS = 100_000

_MACHINE = ("device", "link", "host", "software", "count", "one_link", "calibration")


@dataclass(frozen=True)
class Axis:
    """One option that is swept: its name as a user writes it, and its values by the text of each.

    `argument` is the argument of `relay.simulate`; None for a figure of the machine.
    """

    name: str
    argument: str | None
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Point:
    """What came of one combination. `verdict` is "fits", "does not fit" or "impossible", and `reason` the cause."""

    verdict: str
    reason: str = ""
    unit: str = ""
    speed: Ranged | None = None
    step_seconds: Ranged | None = None
    mfu: Ranged | None = None
    joules_per_unit: Ranged | None = None
    days: Ranged | None = None
    kilowatt_hours: Ranged | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    step_width_without_calibration: float | None = None
    bottleneck: str = ""


RANGES = ("speed", "step_seconds", "mfu", "joules_per_unit", "days", "kilowatt_hours")
"""The fields of a point that are ranges."""

FIELDS = tuple(each.name for each in fields(Point))


def combinations(axes: Sequence[Axis]) -> Iterator[tuple[str, ...]]:
    """The texts of the values of each combination, the last axis changing fastest."""
    return itertools.product(*(axis.values for axis in axes))


class Sweep:
    """Points of one model, whose other options are `fixed`, simulated one by one."""

    def __init__(self, model: str | None, fixed: Mapping[str, Any], axes: Sequence[Axis], tokens: float | None) -> None:
        self._model = model
        self._fixed = fixed
        self._axes = axes
        self._tokens = tokens
        self._host_cache = HostCache()

    def point(self, texts: Sequence[str]) -> Point:
        """The point of a combination, given by the text of each axis's value."""
        varied = [(axis, axis.values[text]) for axis, text in zip(self._axes, texts, strict=True)]
        options = dict(self._fixed) | {axis.argument: value for axis, value in varied if axis.argument is not None}
        if options.get("microbatches") is None:
            options["microbatches"] = options["batch"]
        model = options.pop("model", self._model)
        try:
            figures = [(axis.name, value) for axis, value in varied if is_figure(axis.name)]
            if figures and options["calibration"] is None:
                parts = {name: options.pop(name) for name in _MACHINE}
                machine = machine_of(**parts)
                for name, value in figures:
                    machine = with_figure(machine, name, value)
                options["device"] = machine
            found = simulate(model, host_cache=self._host_cache, must_fit=None, **options)
        except (SpecError, ShapeError, ValueError) as wrong:
            return Point("impossible", " ".join(str(wrong).split()))
        memory = found.memory
        point = Point("", "", found.unit, device_bytes=memory.device_total, host_bytes=memory.host_total)
        if not found.fits:
            return replace(point, verdict="does not fit", reason=" ".join(found.shortfalls))
        tokens = self._tokens
        return replace(
            point,
            verdict="fits",
            speed=found.speed,
            step_seconds=found.step_time,
            mfu=found.mfu,
            joules_per_unit=found.joules_per_token,
            days=None if tokens is None else found.days(tokens),
            kilowatt_hours=None if tokens is None else found.kilowatt_hours(tokens),
            step_width_without_calibration=None if found.narrowing is None else found.narrowing[0],
            bottleneck=found.bottleneck,
        )


def count_of(axes: Sequence[Axis]) -> int:
    """How many combinations the axes have. Raises ValueError for more than are simulated in one sweep."""
    count = 1
    for axis in axes:
        count *= len(axis.values)
    if count > MOST_POINTS:
        raise ValueError(f"These values have {count:,} combinations, and a sweep takes at most {MOST_POINTS:,}.")
    return count
