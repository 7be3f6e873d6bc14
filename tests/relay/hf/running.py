"""Runs the scripts beside the tests, as they are and with lines changed, and compares what two runs wrote down."""

import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

SCRIPTS = Path(__file__).parent / "scripts"
CLOCK = ("runtime", "per_second", "preparation_time")


def run_script(name: str, output: Path, steps: int, changes: dict[str, str] | None = None) -> dict[str, Any]:
    """The namespace of a script after it ran. `changes` replaces whole lines, at most two."""
    lines = (SCRIPTS / name).read_text(encoding="utf-8").splitlines()
    changed = 0
    for old, new in (changes or {}).items():
        found = [number for number, line in enumerate(lines) if line == old]
        assert len(found) == 1, f"{old!r} is in {len(found)} lines of {name}"
        lines[found[0]] = new
        changed += 1
    assert changed <= 2
    assert len([line for line in lines if line.strip()]) >= 60
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with warnings.catch_warnings(), patch.object(sys, "argv", [name, str(output), str(steps)]):
        warnings.simplefilter("ignore", FutureWarning)
        exec(compile("\n".join(lines), str(SCRIPTS / name), "exec"), namespace)
    return namespace


def logged(namespace: dict[str, Any]) -> list[dict[str, float]]:
    """What was logged, without wall times."""
    return [
        {name: value for name, value in entry.items() if not name.endswith(CLOCK)}
        for entry in namespace["diary"].logs
    ]
