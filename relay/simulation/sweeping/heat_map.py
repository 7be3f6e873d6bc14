"""Heat maps of a sweep: one picture for each figure, its first two options as rows and columns.

Further options give a panel for each combination of their values. matplotlib is imported only to draw.
Invariant: a combination without the figure is drawn as what it is, "does not fit" or "impossible".
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relay.simulation.sweeping.points import Axis, Point

MAPS = {
    "speed": ("speed", "a second", 1.0),
    "energy": ("joules_per_unit", "joules each", 1.0),
    "device-memory": ("device_bytes", "GB of the device", 1e-9),
    "host-memory": ("host_bytes", "GB of the host", 1e-9),
}
"""By name: the figure of a point, what its numbers are, and the factor from SI units."""

MOST_PANELS = 12


def panels_of(axes: Sequence[Axis]) -> int:
    """How many panels a map of these options has."""
    count = 1
    for axis in axes[2:]:
        count *= len(axis.values)
    return count


def write_maps(stem: Path, axes: Sequence[Axis], points: Mapping[tuple[str, ...], Point]) -> list[Path]:
    """Write a picture of each figure beside the table. Raises ModuleNotFoundError without matplotlib."""
    from matplotlib.figure import Figure

    units = {point.unit for point in points.values() if point.unit}
    rows = list(axes[0].values)
    columns = list(axes[1].values) if len(axes) > 1 else [""]
    panels = list(itertools.product(*(axis.values for axis in axes[2:])))
    written = []
    for name, (field, what, factor) in MAPS.items():
        size = (2.5 + 0.9 * len(columns)) * len(panels), 2.2 + 0.6 * len(rows)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(1, len(panels), squeeze=False)[0]
        second = columns if len(axes) > 1 else None
        tables = [_table(points, rows, second, further, field, factor) for further in panels]
        known = [value for table in tables for line in table for value in line if value == value]
        least, most = (min(known), max(known)) if known else (0.0, 1.0)
        image: Any = None
        for axis, further, table in zip(grid, panels, tables, strict=True):
            image = axis.imshow(table, aspect="auto", cmap="viridis", vmin=least, vmax=most)
            axis.set_xticks(range(len(columns)), columns)
            axis.set_yticks(range(len(rows)), rows)
            axis.set_ylabel(axes[0].name)
            axis.set_xlabel(axes[1].name if len(axes) > 1 else "")
            names = (each.name for each in axes[2:])
            axis.set_title(", ".join(f"{one}={value}" for one, value in zip(names, further, strict=True)), fontsize=9)
            for row, line in enumerate(table):
                for column, value in enumerate(line):
                    point = points[_key(rows[row], columns[column] if len(axes) > 1 else None, further)]
                    text = point.verdict.replace(" not ", " not\n") if value != value else f"{value:,.3g}"
                    light = value == value and (value - least) > 0.6 * (most - least)
                    colour = "black" if value != value or light else "white"
                    axis.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
        unit = units.pop() if len(units) == 1 else "units"
        units.add(unit)
        label = {"speed": f"{unit} a second", "energy": f"joules, per {unit}"}.get(name, what)
        figure.colorbar(image, ax=list(grid), label=label)
        path = stem.with_name(f"{stem.name}-{name}.png")
        figure.savefig(path, dpi=150)
        written.append(path)
    return written


def _key(row: str, column: str | None, further: tuple[str, ...]) -> tuple[str, ...]:
    return (row, *(() if column is None else (column,)), *further)


def _table(
    points: Mapping[tuple[str, ...], Point],
    rows: Sequence[str],
    columns: Sequence[str] | None,
    further: tuple[str, ...],
    field: str,
    factor: float,
) -> list[list[float]]:
    """The figure for each row and column; NaN where a point has none."""
    return [
        [_value(points[_key(row, column, further)], field, factor) for column in columns or (None,)] for row in rows
    ]


def _value(point: Point, field: str, factor: float) -> float:
    found = getattr(point, field)
    if found is None:
        return float("nan")
    return float(getattr(found, "middle", found)) * factor
