"""Backends that no package registers: seen by this process alone, for scripts that run the conformance suite on one.

Not for tests that run under pytest: what is registered here stays until the process ends.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Sequence

from hal import probing, registry


def register(name: str, backend: str) -> None:
    """Add `module:attribute` as the backend of that name to those that are known already."""
    known = registry.entry_points

    def entry_points(*, group: str) -> Sequence[importlib.metadata.EntryPoint]:
        here = importlib.metadata.EntryPoint(name, backend, probing.GROUP)
        return [*known(group=group), here]

    registry.entry_points = entry_points  # type: ignore[attr-defined]


def print_conformance(name: str, only: str | None = None, samples: int | None = None) -> None:
    """Run the suite on a device, verifying its gaps, and print what failed and how many tests passed, as JSON."""
    from relay.cli.conformance import run

    tally = run(name, only, True, sys.stderr, samples=samples)
    failed = {test["test"]: test["reason"] for test in tally.with_outcome("failed")}
    print(json.dumps({"failed": failed, "passed": len(tally.with_outcome("passed"))}))
