"""Machines side by side, each alone: speed, days, energy, cost, and what would help most.

A machine is simulated by the caller: at its own best plan, or at options that are the same for all. Nothing is printed
here.
Invariant: each machine has a row, also where nothing fits or it does not compute in the asked precision; rows are in
the order of cost where prices are known, else of speed; machines on which nothing runs come last.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hal.spec import SpecError
from relay.simulation.buying.prices import Prices
from relay.simulation.plan import NoFeasiblePlan
from relay.simulation.ranges.ranged import Ranged
from relay.simulation.search import name_of
from relay.simulation.simulate import MOST_DEVICES, Simulation, options_of, simulate

CHINCHILLA = 20
"""Tokens a parameter that make the most of a budget of arithmetic: J. Hoffmann et al., arXiv 2203.15556, table 3."""


@dataclass(frozen=True)
class Row:
    """One machine. `missing` says why nothing runs there; then the figures are None."""

    machine: str
    plan: str = ""
    precision: str = ""
    state_dtype: str = ""
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
    run: Callable[[str, int], Simulation],
    prices: Prices,
    tokens: float | None,
    chinchilla: bool,
    limits: dict[str, Any],
) -> list[Row]:
    """The rows of machines. `run` simulates one by the name of its device and the number of them.

    A run that does not fit, NoFeasiblePlan and SpecError become rows too. `tokens` is what a run trains on, or
    `chinchilla` tokens a parameter. `limits` are `host_memory` and `capacity`.
    """
    rows = []
    for name in machines:
        try:
            found = run(*parse_machine(name))
        except (NoFeasiblePlan, SpecError) as missing:
            rows.append(Row(name, missing=str(missing)))
            continue
        plan = name_of(found), found.run.precision, found.run.state_dtype
        if not found.fits:
            rows.append(Row(name, *plan, missing=" ".join(found.shortfalls)))
            continue
        count = CHINCHILLA * found.memory.parameters if chinchilla else tokens
        assert count is not None
        days, energy = found.days(count), found.kilowatt_hours(count)
        gains = found.sensitivity
        if not gains:
            gains = simulate(found.shape, sensitivity=True, must_fit=None, **limits, **options_of(found)).sensitivity
        part = max(gains, key=lambda part: gains[part])
        rows.append(
            Row(
                name, *plan, "", found.unit, count, found.speed, days, energy,
                prices.cost(name, days, energy), prices.kilograms_of_co2(energy), found.bottleneck,
                f"10 % more of {part}: {gains[part]:.1%} of the step",
            )
        )  # fmt: skip
    return sorted(rows, key=_rank)


def parse_machine(text: str) -> tuple[str, int]:
    """The device of a machine and how many of it one host has: `4xrtx-4090`, or `rtx-4090` for one.

    Raises ValueError for a number of devices that is not simulated.
    """
    match = re.fullmatch(r"(\d+)x\s*(.+)", text)
    if match is None:
        return text, 1
    count = int(match[1])
    if not 1 <= count <= MOST_DEVICES:
        raise ValueError(f"{text!r} has {count} devices, and from 1 to {MOST_DEVICES} are simulated together.")
    return match[2], count


def differences(rows: Sequence[Row]) -> list[str]:
    """What the runs that are compared do not have in common, besides the machine: what they compute and store."""
    running = [row for row in rows if row.speed is not None]
    found = []
    for what, name, option in (("precision", "precision", "precision"), ("state dtype", "state_dtype", "state-dtype")):
        values = {row.machine: getattr(row, name) for row in running}
        if len(set(values.values())) > 1:
            each = ", ".join(f"{machine} {value}" for machine, value in values.items())
            found.append(f"The runs differ in {what}: {each}. --{option} VALUE compares like with like.")
    return found


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
            lines += [f"-. {row.machine}: does not run", f"   {row.missing}", ""]
            continue
        lines.append(f"{place}. {row.machine}: {row.speed.text(_number)} {row.unit}/s")
        lines.append(f"   {row.tokens:.3g} {row.unit}: {row.days.text(_number)} days, "
                     f"{row.kilowatt_hours.text(_number)} kWh")  # fmt: skip
        if row.cost is not None:
            lines.append(f"   cost {row.cost.text(_number)}")
        if row.co2_kilograms is not None:
            lines.append(f"   CO2 {row.co2_kilograms.text(_number)} kg")
        lines += [f"   {row.precision}, {row.plan}", f"   bottleneck {row.bottleneck}; {row.helps_most}", ""]
    lines += [f"note: {text}" for text in differences(rows)]
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
