"""The classes of labelled data: which there are, their numbers, and what a label of a row stands for.

A folder that has a head of the task keeps its classes, and a label outside of them is refused. For a new head the
classes are those of the data. Invariant: every class number is below the number of classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from relay.finetuning.data.data_error import DataError
from relay.finetuning.data.data_files import DataFile


class Classes(NamedTuple):
    """The names of the classes in order, and the number of each value that stands for one. Empty for numbers."""

    names: tuple[str, ...]
    numbers: dict[Any, int]


def task_of_labels(files: Sequence[DataFile], label: str) -> str:
    """What labels of this kind are learned by: "classification", "regression" or "token-classification"."""
    value = next((value for _, _, value in _values(files, label) if value is not None), None)
    if isinstance(value, (list, tuple)):
        return "token-classification"
    return "regression" if isinstance(value, float) else "classification"


def find_classes(files: Sequence[DataFile], label: str, task: str, saved: dict[int, str] | None) -> Classes:
    """The classes of the labels; `saved` are those of the folder's head, if it has one.

    Raises DataError with the row of a label that is missing, of another kind, or out of range.
    """
    for file, row, value in _values(files, label):
        if value is None:  # said first, since a table with a gap has its other whole numbers as 1.0
            raise DataError("The field is empty.", file=file, row=row, field=label)
    if task == "regression":
        for file, row, value in _values(files, label):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise DataError(
                    f"A regression takes finite numbers; received {value!r:.60}.", file=file, row=row, field=label
                )
        return Classes((), {})
    seen: dict[Any, tuple[str, int]] = {}
    for file, row, value in _values(files, label):
        listed = isinstance(value, (list, tuple))
        if listed != (task == "token-classification"):
            wanted = "a list with a class for each word" if task == "token-classification" else "one class"
            raise DataError(f"The label must be {wanted}; received {value!r:.60}.", file=file, row=row, field=label)
        for one in value if listed else [value]:
            if isinstance(one, bool) or not isinstance(one, (int, str)):
                hint = " Give --task regression for numbers." if isinstance(one, float) else ""
                raise DataError(
                    f"A class is a whole number or a name; received {one!r:.60}.{hint}", file=file, row=row, field=label
                )
            seen.setdefault(one, (file, row))
    if {str, int} == {type(value) for value in seen}:
        value, (file, row) = next(each for each in seen.items() if isinstance(each[0], str))
        raise DataError(f"Classes are numbers in some rows, and {value!r:.60} here.", file=file, row=row, field=label)
    named = _feature_names(files[0], label)
    if saved is not None:
        return _of_head(seen, saved, named, label)
    if named is not None:
        return Classes(tuple(named), {number: number for number in range(len(named))})
    if all(isinstance(value, str) for value in seen):
        names = sorted(seen)
        return Classes(tuple(names), {name: number for number, name in enumerate(names)})
    for value, (file, row) in seen.items():
        if value < 0:
            raise DataError(f"Classes are numbered from 0; received {value}.", file=file, row=row, field=label)
    count = max(seen) + 1
    return Classes(tuple(f"LABEL_{number}" for number in range(count)), {number: number for number in range(count)})


def _of_head(
    seen: dict[Any, tuple[str, int]], saved: dict[int, str], named: Sequence[str] | None, label: str
) -> Classes:
    """The classes of a folder's head, as values of the data."""
    names = tuple(saved[number] for number in sorted(saved))
    numbers: dict[Any, int] = {number: number for number in range(len(names))}
    if all(isinstance(value, str) for value in seen):
        numbers = {name: number for number, name in enumerate(names)}
        if all(name == f"LABEL_{number}" for number, name in enumerate(names)) and len(seen) <= len(names):
            given = sorted(seen)
            numbers = {name: number for number, name in enumerate(given)}
            names = (*given, *names[len(given) :])
    elif named is not None and len(named) == len(names):
        names = tuple(named)
    for value, (file, row) in seen.items():
        if value not in numbers:
            some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise DataError(
                f"The label {value!r:.60} is out of range: the model has {len(names)} classes, {some}.",
                file=file, row=row, field=label,
            )  # fmt: skip
    return Classes(names, numbers)


def _feature_names(file: DataFile, label: str) -> list[str] | None:
    """The names that the dataset itself has for its classes."""
    feature = file.rows.features[label]
    feature = getattr(feature, "feature", feature)
    names: list[str] | None = getattr(feature, "names", None)
    return names


def _values(files: Sequence[DataFile], label: str) -> Iterator[tuple[str, int, Any]]:
    for file in files:
        for row, value in enumerate(file.rows[label], 1):
            yield file.name, row, value
