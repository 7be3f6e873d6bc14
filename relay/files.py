"""Files that are there whole or not at all: written beside their place, and renamed."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8, in place of one that is there. Raises OSError, with what was there untouched."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
