"""What is wrong with a file that the library `datasets` would misread or cannot read, found by reading it once more.

`check_file` finds what the library reads without an error as something else; `explain` finds the row of an error that
the library raised. Nothing is read for training here. Invariant: every fault is a `DataError` with the file, the row
(counted from 1) and, where there is one, the field.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relay.finetuning.data.data_error import DataError

PART = 1 << 20
"""Bytes that are read at a time."""


def check_file(file: str, kind: str, separator: str) -> None:
    """Raise DataError for bytes that are not UTF-8, and for tables whose fields cannot be told apart."""
    if kind in ("json", "csv", "text"):
        _check_encoding(file)
    if kind == "csv":
        with contextlib.suppress(csv.Error):  # bytes of 0 and the like, which the library names
            _check_table(file, separator)


def _check_encoding(file: str) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines = 1
    with open(file, "rb") as content:
        while True:
            part = content.read(PART)
            try:
                decoder.decode(part, final=not part)
            except UnicodeDecodeError as wrong:
                line = lines + wrong.object[: wrong.start].count(b"\n")
                raise DataError(
                    f"Line {line} holds the byte 0x{wrong.object[wrong.start]:02x}, which is not UTF-8. Convert the "
                    "file to UTF-8.", file=file,
                ) from wrong  # fmt: skip
            if not part:
                return
            lines += part.count(b"\n")


def _table_rows(file: str, separator: str) -> Iterator[list[str]]:
    """The rows of a table, the first of which has the names, without empty ones."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        with open(file, encoding="utf-8-sig", newline="") as content:
            yield from (row for row in csv.reader(content, delimiter=separator) if row)
    finally:
        csv.field_size_limit(before)


def _check_table(file: str, separator: str) -> None:
    """Raise DataError for a name that two columns have, and for a row with more values than there are names."""
    rows = _table_rows(file, separator)
    names = next(rows, [])
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(
            f"{names.count(twice[0])} columns have this name. Rename or remove all but one of them.",
            file=file, field=twice[0],
        )  # fmt: skip
    if len(names) == 1 and (other := next((one for one in ";\t|" if one in names[0]), None)):
        raise DataError(
            f"The file is one column, {names[0]!r:.60}: its values are separated by {other!r}, and not by "
            f"{separator!r}. Write it with {separator!r}, or name it .tsv for tabs.", file=file,
        )  # fmt: skip
    for row, values in enumerate(rows, 1):
        if len(values) > len(names):
            raise DataError(
                f"The row has {len(values)} values, and the file has {len(names)} columns: {', '.join(names):.80}. A "
                f"text that holds {separator!r} is written between quotes.", file=file, row=row,
            )  # fmt: skip


def explain(file: str, kind: str, wrong: Exception) -> DataError:
    """The error of a file that cannot be read, with its row if it is found."""
    cause = wrong
    while cause.__cause__ is not None and isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    reason = " ".join(str(cause).split())[:300]
    if "corresponds to no data" in reason or type(cause).__name__ == "EmptyDataError":
        return DataError("The file holds no rows.", file=file)
    if kind == "csv" and (found := re.search(r"EOF inside string starting at row (\d+)", reason)):
        return DataError("A quote that begins in this row is not closed.", file=file, row=int(found[1]))
    return (_fault_of_json(file) if kind == "json" else None) or DataError(
        f"The file cannot be read: {reason}", file=file
    )


def _fault_of_json(file: str) -> DataError | None:
    with open(file, encoding="utf-8-sig") as content:
        first = next((line for line in content if line.strip()), "").strip()
    if first == "[" or (first.startswith("[") and file.endswith(".json")):
        return _fault_of_list(file)
    kinds: dict[str, tuple[str, int]] = {}
    with open(file, encoding="utf-8-sig") as lines:
        for row, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line, object_pairs_hook=_pairs)
            except _Twice as twice:
                return DataError("The field is in this row twice.", file=file, row=row, field=str(twice))
            except ValueError as broken:
                return DataError(f"This is not JSON: {broken}. A JSONL file has one object a line.", file=file, row=row)
            if not isinstance(found, dict):
                return DataError(f"A row is an object of fields; received {line.strip():.60}.", file=file, row=row)
            for field, value in found.items():
                here = type(value).__name__
                before, first_row = kinds.setdefault(field, (here, row))
                if here != before and "NoneType" not in (here, before):
                    return DataError(
                        f"The field is {here} here and {before} in row {first_row}.", file=file, row=row, field=field
                    )
    return None


def _fault_of_list(file: str) -> DataError | None:
    """What is wrong with a file that is one list of rows."""
    text = Path(file).read_text(encoding="utf-8-sig")
    try:
        rows = json.loads(text, object_pairs_hook=_pairs)
    except _Twice as twice:
        return DataError("The field is twice in one row.", file=file, field=str(twice))
    except json.JSONDecodeError as broken:
        return DataError(f"This is not JSON: {broken}.", file=file)
    for row, found in enumerate(rows if isinstance(rows, list) else (), 1):
        if not isinstance(found, dict):
            return DataError(f"A row is an object of fields; received {found!r:.60}.", file=file, row=row)
    return None


class _Twice(ValueError):
    """A name that an object has twice."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _Twice(name)
        found[name] = value
    return found
