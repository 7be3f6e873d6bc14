"""Files that are replaced atomically: written under a temporary name, synced to the disk, and renamed.

No file format is known here. Invariant: whatever interrupts the writing, the file is the old one or the new one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path


def put_in_place(path: str | Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary name in the folder of `path`, and rename the file that it makes to `path`.

    Raises OSError. The error names `path`, or the folder if it is missing, and never the temporary name.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"There is no folder to write {target.name} in", str(target.parent))
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        write(beside)
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        beside.replace(target)
    except OSError as failure:
        if failure.filename == str(beside):
            failure.filename = str(target)
        raise
    finally:
        beside.unlink(missing_ok=True)


def write_whole(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8, replacing one that is there. Raises OSError, with the old file untouched."""
    put_in_place(path, lambda beside: beside.write_text(text, encoding="utf-8"))
