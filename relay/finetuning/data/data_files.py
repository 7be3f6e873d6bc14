"""Data files as datasets of rows, by the library `datasets`: JSONL, JSON, parquet, CSV, text and saved dataset folders.

What the fields mean is decided in `relay.finetuning.data.fields`. Invariant: an error in the data is a `DataError` of
one line that names the file, the row (counted from 1) and the field.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from relay.errors import RelayError
from relay.finetuning.data.data_error import DataError
from relay.finetuning.data.file_faults import check_file, explain

FORMATS = {
    ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".txt": "text",
    ".text": "text", ".md": "text", ".rst": "text",
}  # fmt: skip
"""How files are read, by the end of their names."""

SAVED = ("state.json", "dataset_info.json", "dataset_dict.json")
"""Files of a folder that `save_to_disk` wrote."""


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
    """The files, each as a dataset of rows; of a folder all its files of data. Raises DataError."""
    if not paths:
        raise DataError("No data is given. Name one file or more, such as --data conversations.jsonl.")
    with _quiet():
        return [_read(file, cache) for path in paths for file in _files_of(path)]


def _files_of(given: str) -> list[str]:
    """The file, the saved dataset, or the files of data in a folder that is none."""
    path = Path(given)
    if not path.exists():
        raise DataError("There is no such file or folder.", file=given)
    if not path.is_dir() or any((path / name).is_file() for name in SAVED):
        return [given]
    found = sorted(
        file for file in path.iterdir() if file.suffix.lower() in FORMATS and file.is_file() and file.name[0] != "."
    )
    kinds = sorted({FORMATS[file.suffix.lower()] for file in found})
    if not kinds:
        raise DataError(
            f"This folder is not a dataset that save_to_disk wrote, and no file in it ends in {', '.join(FORMATS)}.",
            file=given,
        )
    if len(kinds) > 1:
        raise DataError(f"This folder holds files of several kinds: {', '.join(kinds)}. Name the files.", file=given)
    return [str(file) for file in found]


def _read(given: str, cache: str | None) -> DataFile:
    datasets = require_datasets()
    path = Path(given)
    if path.is_dir():
        try:
            rows = datasets.load_from_disk(str(path))
        except (FileNotFoundError, OSError, ValueError) as wrong:
            reason = " ".join(str(wrong).split())[:200]
            raise DataError(f"This saved dataset cannot be read: {reason}", file=given) from wrong
        if not isinstance(rows, datasets.Dataset):
            parts = ", ".join(f"{given}/{name}" for name in rows)
            raise DataError(f"This folder holds several datasets. Name one of them: {parts}.", file=given)
        return _checked(given, rows, _key(sorted(path.rglob("*.arrow"))))
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise DataError(f"Files that end in {path.suffix!r} cannot be read, but {', '.join(FORMATS)} can.", file=given)
    if not path.stat().st_size:
        raise DataError("The file holds no rows.", file=given)
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    check_file(given, kind, separator)
    extra: dict[str, Any] = {"sample_by": "document"} if kind == "text" else {}
    if kind == "csv":  # only what is empty is missing: "NA" and "None" are texts
        extra = {"sep": separator, "keep_default_na": False, "na_values": [""]}
    try:
        rows = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=cache, **extra)
    except Exception as wrong:  # the library raises errors of pandas, pyarrow and its own
        raise explain(given, kind, wrong) from wrong
    return _checked(given, rows, _key([path]))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """While open, `datasets` logs nothing: of files that it cannot read it counts the rows otherwise."""
    logger = logging.getLogger("datasets")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _checked(given: str, rows: Any, key: str) -> DataFile:
    if not len(rows):
        raise DataError("The file holds no rows.", file=given)
    return DataFile(given, rows, key)


def _key(files: Sequence[Path]) -> str:
    """A key of the files' names, sizes and times of change."""
    facts = [(str(file.resolve()), (stat := os.stat(file)).st_size, stat.st_mtime_ns) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()
