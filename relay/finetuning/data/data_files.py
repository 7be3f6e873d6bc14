"""Data files as datasets of rows, by the library `datasets`: JSONL, JSON, parquet, CSV, text and saved dataset folders.

What the fields mean is decided in `relay.finetuning.data.fields`. Invariant: an error in the data is a `DataError` of
one line that names the file, the row (counted from 1) and the field.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from relay.errors import RelayError

FORMATS = {
    ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".txt": "text",
    ".text": "text", ".md": "text", ".rst": "text",
}  # fmt: skip
"""How files are read, by the end of their names."""


class DataError(RelayError, ValueError):
    """Data that cannot be trained on. `file`, `row` (from 1, 0 for the whole file) and `field` say where.

    What to do: correct the row, or name other fields.
    """

    def __init__(self, message: str, *, file: str = "", row: int = 0, field: str = "") -> None:
        where = [file] if file else []
        where += [f"row {row}"] if row else []
        where += [f"field {field!r}"] if field else []
        super().__init__(f"{', '.join(where)}: {message}" if where else message)
        self.file = file
        self.row = row
        self.field = field


class DataFile(NamedTuple):
    """One file or folder of rows. `key` changes when its content does."""

    name: str
    rows: Any
    key: str


def require_datasets() -> Any:
    """The library `datasets`. Raises RelayError with what to install."""
    try:
        import datasets
    except ImportError as absent:
        raise RelayError(
            f"Fine-tuning reads data with the package {absent.name!r}, which is not installed: pip install -e '.[hf]'"
        ) from absent
    datasets.disable_progress_bars()
    return datasets


def read_files(paths: Sequence[str], cache: str | None = None) -> list[DataFile]:
    """The files, each as a dataset of rows. Raises DataError for one that cannot be read."""
    if not paths:
        raise DataError("No data is given. Name one file or more, such as --data conversations.jsonl.")
    return [_read(path, cache) for path in paths]


def _read(given: str, cache: str | None) -> DataFile:
    datasets = require_datasets()
    path = Path(given)
    if not path.exists():
        raise DataError("There is no such file or folder.", file=given)
    if path.is_dir():
        try:
            rows = datasets.load_from_disk(str(path))
        except (FileNotFoundError, OSError, ValueError) as wrong:
            raise DataError(
                "This folder is not a dataset that save_to_disk wrote. Name files in it instead.", file=given
            ) from wrong
        if not isinstance(rows, datasets.Dataset):
            parts = ", ".join(f"{given}/{name}" for name in rows)
            raise DataError(f"This folder holds several datasets. Name one of them: {parts}.", file=given)
        return _checked(given, rows, _key(sorted(path.rglob("*.arrow"))))
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise DataError(f"Files that end in {path.suffix!r} cannot be read, but {', '.join(FORMATS)} can.", file=given)
    if not path.stat().st_size:
        raise DataError("The file holds no rows.", file=given)
    extra: dict[str, Any] = {"sample_by": "document"} if kind == "text" else {}
    extra |= {"sep": "\t"} if path.suffix.lower() == ".tsv" else {}
    try:
        rows = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=cache, **extra)
    except Exception as wrong:  # the library raises errors of pandas, pyarrow and its own
        raise _explained(given, kind, wrong) from wrong
    return _checked(given, rows, _key([path]))


def _checked(given: str, rows: Any, key: str) -> DataFile:
    if not len(rows):
        raise DataError("The file holds no rows.", file=given)
    return DataFile(given, rows, key)


def _key(files: Sequence[Path]) -> str:
    """A key of the files' names, sizes and times of change."""
    facts = [(str(file.resolve()), (stat := os.stat(file)).st_size, stat.st_mtime_ns) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _explained(file: str, kind: str, wrong: Exception) -> DataError:
    """The error of a file that cannot be read, with its row if it is found."""
    cause = wrong
    while cause.__cause__ is not None and isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    if kind == "json":
        kinds: dict[str, tuple[str, int]] = {}
        with open(file, encoding="utf-8", errors="replace") as lines:
            for row, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    found = json.loads(line)
                except ValueError as broken:
                    return DataError(
                        f"This is not JSON: {broken}. A JSONL file has one object a line.", file=file, row=row
                    )
                if not isinstance(found, dict):
                    return DataError(f"A row is an object of fields; received {line.strip():.60}.", file=file, row=row)
                for field, value in found.items():
                    here = type(value).__name__
                    before, first = kinds.setdefault(field, (here, row))
                    if here != before and "NoneType" not in (here, before):
                        return DataError(
                            f"The field is {here} here and {before} in row {first}.", file=file, row=row, field=field
                        )
    return DataError(f"The file cannot be read: {' '.join(str(cause).split())[:300]}", file=file)
