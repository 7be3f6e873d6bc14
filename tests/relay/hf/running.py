"""Runs the scripts beside the tests, as they are and with lines changed, and compares what two runs wrote down."""

import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
CLOCK = ("runtime", "per_second", "preparation_time")


def run_script(
    name: str,
    output: Path,
    steps: int,
    changes: dict[str, str] | None = None,
    variant: dict[str, str] | None = None,
) -> dict[str, Any]:
    """The namespace of a script after it ran.

    `variant` makes another script of it: parts of its text with what is there instead. `changes` are the whole lines
    that a user changes, at most two.
    """
    text = (SCRIPTS / name).read_text(encoding="utf-8")
    for old, new in (variant or {}).items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    lines = text.splitlines()
    assert len(changes or {}) <= 2
    assert len([line for line in lines if line.strip()]) >= 60
    for old, new in (changes or {}).items():
        found = [number for number, line in enumerate(lines) if line == old]
        assert len(found) == 1, f"{old!r} is {len(found)} lines of {name}"
        lines[found[0]] = new
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with warnings.catch_warnings(), patch.object(sys, "argv", [name, str(output), str(steps)]):
        warnings.simplefilter("ignore", FutureWarning)
        exec(compile("\n".join(lines), str(SCRIPTS / name), "exec"), namespace)
    return namespace


def logged(namespace: dict[str, Any]) -> list[dict[str, float]]:
    """What was logged, without wall times."""
    return [
        {name: value for name, value in entry.items() if not name.endswith(CLOCK)} for entry in namespace["diary"].logs
    ]


def assert_logged_alike(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Assert that two runs called the same callbacks and logged the same names, with numbers as near as `tolerance`."""
    assert found["diary"].events == expected["diary"].events
    ours, theirs = logged(found), logged(expected)
    assert [list(entry) for entry in ours] == [list(entry) for entry in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one == (pytest.approx(other, abs=tolerance, rel=tolerance) if tolerance else other)
