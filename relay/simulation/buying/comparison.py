"""Machines side by side, each alone at its own best plan: speed, days, energy, cost, and what would help most.

The plans come from `relay.simulation.plan`. Nothing is printed here.
Invariant: rows are in the order of cost where prices are known, else of speed; machines that do not fit come last.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from relay.simulation.buying.prices import Prices
from relay.simulation.plan import NoFeasiblePlan, Plan
from relay.simulation.ranges.ranged import Ranged
from relay.simulation.search import name_of
from relay.simulation.simulate import options_of, simulate

CHINCHILLA = 20
"""Tokens a parameter that make the most of a budget of arithmetic: J. Hoffmann et al., arXiv 2203.15556, table 3."""


@dataclass(frozen=True)
class Row:
    """One machine. `missing` says why a run does not fit; then the figures are None."""

    machine: str
    plan: str = ""
    missing: str = ""
    unit: str = "tokens"
    tokens: float = 0.0
    speed: Ranged | None = None
    days: Ranged | None = None
    kilowatt_hours: Ranged | None = None
    cost: Ranged | None = None
    co2_kilograms: Ranged | None = None
    bottleneck: str = ""
    helps_most: str = ""


def compare(
    machines: Sequence[str],
    choose: Callable[[str], Plan],
    prices: Prices,
    tokens: float | None,
    chinchilla: bool,
    limits: dict[str, Any],
) -> list[Row]:
    """The machines with their best plans, which `choose` gives by name.

    `tokens` is what a run trains on, or `chinchilla` tokens a parameter. `limits` are `host_memory` and `capacity`.
    """
    rows = []
    for name in machines:
        try:
            chosen = choose(name)
        except NoFeasiblePlan as missing:
            rows.append(Row(name, missing=str(missing)))
            continue
        found = chosen.expected
        count = CHINCHILLA * found.memory.parameters if chinchilla else tokens
        assert count is not None
        days, energy = found.days(count), found.kilowatt_hours(count)
        again = simulate(found.shape, sensitivity=True, must_fit=None, **limits, **options_of(found))
        part = max(again.sensitivity, key=lambda part: again.sensitivity[part])
        rows.append(
            Row(
                name, name_of(found), "", found.unit, count, found.speed, days, energy,
                prices.cost(name, days, energy), prices.kilograms_of_co2(energy), found.bottleneck,
                f"10 % more of {part}: {again.sensitivity[part]:.1%} of the step",
            )
        )  # fmt: skip
    return sorted(rows, key=_rank)


def _rank(row: Row) -> tuple[bool, float]:
    if row.speed is None:
        return True, 0.0
    return False, row.cost.middle if row.cost is not None else -row.speed.middle


_FIGURES = ("speed", "days", "kilowatt_hours", "cost", "co2_kilograms")


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows with every range as its three numbers."""
    return [
        {
            one.name: value.as_json() if isinstance(value := getattr(row, one.name), Ranged) else value
            for one in fields(Row)
        }
        for row in rows
    ]


def as_csv(rows: Sequence[Row]) -> str:
    """The rows as a table with three columns for each range."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = [one.name for one in fields(Row)]
    writer.writerow([
        column for name in names for column in ([f"{name}_{end}" for end in ("low", "middle", "high")]
        if name in _FIGURES else [name])
    ])  # fmt: skip
    for row in rows:
        cells: list[Any] = []
        for name in names:
            value = getattr(row, name)
            if name in _FIGURES:
                cells += ["", "", ""] if value is None else [f"{number:.6g}" for number in value.as_json().values()]
            else:
                cells.append(value)
        writer.writerow(cells)
    return file.getvalue()


def as_text(rows: Sequence[Row]) -> str:
    """The rows as lines for people: each figure with its range."""
    lines = []
    for place, row in enumerate(rows, 1):
        if row.speed is None or row.days is None or row.kilowatt_hours is None:
            lines += [f"-. {row.machine}: does not fit", f"   {row.missing}", ""]
            continue
        lines.append(f"{place}. {row.machine}: {row.speed.text(_number)} {row.unit}/s")
        lines.append(f"   {row.tokens:.3g} {row.unit}: {row.days.text(_number)} days, "
                     f"{row.kilowatt_hours.text(_number)} kWh")  # fmt: skip
        if row.cost is not None:
            lines.append(f"   cost {row.cost.text(_number)}")
        if row.co2_kilograms is not None:
            lines.append(f"   CO2 {row.co2_kilograms.text(_number)} kg")
        lines += [f"   {row.plan}", f"   bottleneck {row.bottleneck}; {row.helps_most}", ""]
    return "\n".join(lines).rstrip()


def _number(value: float) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def write_picture(rows: Sequence[Row], path: str) -> None:
    """Bars of cost where it is known, else of speed, with their ranges. Raises ModuleNotFoundError for matplotlib."""
    from matplotlib.figure import Figure

    priced = any(row.cost is not None for row in rows)
    fitting = [(row, row.cost if priced else row.speed) for row in rows]
    shown = [(row, figure) for row, figure in fitting if figure is not None]
    figure = Figure(figsize=(8, 1.5 + 0.5 * len(shown)), layout="constrained")
    axis = figure.add_subplot()
    middles = [found.middle for _, found in shown]
    errors = [[found.middle - found.low for _, found in shown], [found.high - found.middle for _, found in shown]]
    axis.barh([row.machine for row, _ in shown], middles, xerr=errors, capsize=4)
    axis.invert_yaxis()
    axis.set_xlabel("cost of the run" if priced else f"{shown[0][0].unit if shown else 'tokens'} a second")
    figure.savefig(path, dpi=150)
