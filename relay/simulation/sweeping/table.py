"""The table of a sweep as a CSV file that is continued: its settings in the first line, and a row for each point.

The first line begins with `#` and holds the settings as JSON; the rest is CSV (`pandas.read_csv(..., comment="#")`). A
row is written as soon as its point is known. A row that was cut short by the end of a process is left out, and made
anew.

Invariant: all rows of a file are of the same settings. A file of other settings is refused, and is not changed.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from relay.checkpoint.atomic_file import write_whole
from relay.simulation.ranges.ranged import Ranged
from relay.simulation.sweeping.points import FIELDS, RANGES, Axis, Point

_MARK = "# relay sweep "
_ENDS = ("low", "middle", "high")
_NUMBERS = {"device_bytes": int, "host_bytes": int, "step_width_without_calibration": float}


class SweepTable:
    """The file of a sweep. `done` has the points that are known, by the texts of their values."""

    def __init__(self, path: Path, settings: Mapping[str, Any], axes: Sequence[Axis]) -> None:
        """Open the file, or begin it. Raises ValueError for a file of something else."""
        self.path = path
        self.done: dict[tuple[str, ...], Point] = {}
        self._names = [axis.name for axis in axes]
        self.begun = not path.exists()
        whole = {**settings, "swept": self._names}
        if not self.begun:
            self._read(json.loads(json.dumps(whole)))
        rows = [_cells(texts, point) for texts, point in self.done.items()]
        # Written anew as a whole, so that a row that was cut short is gone before the next one is appended.
        write_whole(path, _MARK + json.dumps(whole) + "\n" + _csv([self._header(), *rows]))
        self._file = path.open("a", newline="", encoding="utf-8")

    def __enter__(self) -> SweepTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, texts: tuple[str, ...], point: Point) -> None:
        """Append a point, so that it is in the file whatever happens next."""
        self._file.write(_csv([_cells(texts, point)]))
        self._file.flush()
        self.done[texts] = point

    def discard(self) -> None:
        """Delete the file, where this sweep began it."""
        self._file.close()
        if self.begun:
            self.path.unlink()

    def _header(self) -> list[str]:
        columns = ([f"{name}_{end}" for end in _ENDS] if name in RANGES else [name] for name in FIELDS)
        return [*self._names, *(column for each in columns for column in each)]

    def _read(self, settings: Mapping[str, Any]) -> None:
        text = self.path.read_text(encoding="utf-8", errors="replace")
        first, _, rest = text.partition("\n")
        try:
            there = json.loads(first.removeprefix(_MARK)) if first.startswith(_MARK) else None
        except ValueError:
            there = None
        if not isinstance(there, dict):
            raise ValueError(f"{self.path} is there and is not the table of a sweep. Give another name with --out.")
        other = [name for name in {**settings, **there} if settings.get(name) != there.get(name)]
        if other:
            each = "; ".join(f"{name} is {there.get(name)!r} there and {settings.get(name)!r} here" for name in other)
            raise ValueError(
                f"{self.path} holds a sweep with other settings: {each}. Give another name with --out, or delete it."
            )
        complete = rest[: rest.rfind("\n") + 1]
        rows = list(csv.reader(io.StringIO(complete)))
        if rows and rows[0] != self._header():
            raise ValueError(f"{self.path} has other columns than a sweep of these options. Give another --out.")
        for row in rows[1:]:
            if len(row) != len(rows[0]):
                raise ValueError(f"{self.path} has a row of {len(row)} cells for {len(rows[0])} columns: {row}.")
            count = len(self._names)
            self.done[tuple(row[:count])] = _point(row[count:])


def settings_of(options: Mapping[str, Any], files: Sequence[str]) -> dict[str, Any]:
    """What decides the figures of a sweep besides the values that it varies: options, and what is in files.

    Figures of another version of the presets are other figures, so these count too.
    """
    from hal.spec import PRESETS

    contents = {file: _digest([Path(file)]) for file in sorted(set(files))}
    return {**options, "files": contents, "presets": _digest(sorted(PRESETS.glob("*.toml")))}


def _digest(paths: Sequence[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def _cells(texts: Sequence[str], point: Point) -> list[str]:
    cells = list(texts)
    for name in FIELDS:
        value = getattr(point, name)
        if name in RANGES:
            cells += [""] * 3 if value is None else [f"{number:.6g}" for number in value.as_json().values()]
        else:
            cells.append("" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value))
    return cells


def _point(cells: Sequence[str]) -> Point:
    """The point in the cells of a row. Raises ValueError for cells that are no figures."""
    left = iter(cells)
    values: dict[str, Any] = {}
    for name in FIELDS:
        if name in RANGES:
            numbers = [next(left) for _ in _ENDS]
            values[name] = Ranged(*map(float, numbers)) if all(numbers) else None
        else:
            text = next(left)
            values[name] = _NUMBERS[name](text) if text and name in _NUMBERS else None if name in _NUMBERS else text
    return Point(**values)
