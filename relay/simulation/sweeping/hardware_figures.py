"""Figures of a machine that a sweep varies, such as `link.down` or `device.memory`, and machines that have them.

A figure is read in its own unit, as in a description of hardware (`hal.spec`). Other figures that mean the same part
follow: an achieved figure and its peak keep their share, since it is the part that becomes faster.

Invariant: no achieved figure of the machine that results is above its peak.
"""

from __future__ import annotations

from typing import Any

from hal.spec import COLUMNS, Machine, Spec
from hal.spec.units import RATIO, parse_quantity

_FOLLOWING: dict[str, dict[str, tuple[str, ...]]] = {
    "device": {
        "bandwidth": ("bandwidth_achieved",),
        **{f"peak_{kind}": (f"achieved_{kind}",) for kind in ("fp32", "fp16", "bf16")},
    },
    "link": {"peak": ("down", "up", "both"), "down": ("both",), "up": ("both",)},
    "host": {
        "bandwidth": ("bandwidth_achieved", "optimizer_bandwidth"), "bandwidth_achieved": ("optimizer_bandwidth",),
    },
}  # fmt: skip
"""By part and figure: those that change by the same factor."""

_PEAKS: dict[str, dict[str, str]] = {
    "device": {"bandwidth_achieved": "bandwidth", **{f"achieved_{k}": f"peak_{k}" for k in ("fp32", "fp16", "bf16")}},
    "link": {"down": "peak", "up": "peak"},
    "host": {"bandwidth_achieved": "bandwidth"},
}
"""By part and figure: the peak that is raised where the figure exceeds it."""


def is_figure(name: str) -> bool:
    """Whether a name is that of a figure of a machine: `device.`, `link.` or `host.` and a cell of its description."""
    part, _, figure = name.partition(".")
    return figure in COLUMNS.get(part, {})


def read_figure(name: str, text: str) -> float:
    """The value of a figure in SI units. Raises ValueError for another unit, or a value out of bounds."""
    part, _, figure = name.partition(".")
    column = COLUMNS[part][figure]
    value = parse_quantity(_number(text) if column.dimension == RATIO else text, column.dimension)
    if not column.low <= value <= column.high:
        raise ValueError(
            f"{name}={text} is out of bounds: expected {column.low:g} to {column.high:g} {column.dimension}."
        )
    return value


def _number(text: str) -> Any:
    """A number as it is written, or the text itself, which the parser of quantities refuses."""
    try:
        return float(text)
    except ValueError:
        return text


def with_figure(machine: Machine, name: str, value: float) -> Machine:
    """The machine with one figure of its device, link or host, for all of its devices.

    Raises ValueError for a part that would draw more watts idle than busy.
    """
    part, _, figure = name.partition(".")
    changed = machine.with_values(part, **_values(getattr(machine, part), part, figure, value))
    spec = getattr(changed, part)
    if figure.startswith("power") and spec["power_idle"] > spec["power_busy"]:
        raise ValueError(
            f"{name}: {spec.title} would draw {spec['power_idle']:g} W while it is idle and {spec['power_busy']:g} W "
            "while it is busy."
        )
    return changed


def _values(spec: Spec, part: str, figure: str, value: float) -> dict[str, float]:
    """The figure and those that follow it."""
    values = {figure: value}
    known = spec.has(figure) or figure in ("bandwidth_achieved", "optimizer_bandwidth", "both")
    for other in _FOLLOWING[part].get(figure, ()) if known and spec[figure] else ():
        if spec.has(other):
            values[other] = spec[other] * value / spec[figure]
    peak = _PEAKS[part].get(figure)
    if peak is not None and spec.has(peak) and value > spec[peak]:
        values[peak] = value
    if part == "link" and "both" in values:
        values["both"] = min(values["both"], values.get("down", spec["down"]) + values.get("up", spec["up"]))
    return values
