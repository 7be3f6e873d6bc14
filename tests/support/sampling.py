"""Which cases of a test `make test` runs: all of them, or those that `@pytest.mark.sample` names.

`@pytest.mark.sample(3)` stands for one case in three, the first included; `@pytest.mark.sample("cpu-fp32", "numpy")`
for the cases with these ids. The others are marked exhaustive, and `make test-full` runs them. A sample has one or two
cases of each kind, those that differ most. Where a command line names cases by their ids, these run. Invariant: of
every test with a sample at least one case runs in `make test`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def mark_what_is_not_sampled(items: Sequence[pytest.Item]) -> None:
    """Mark the cases exhaustive that are in no sample."""
    tests: dict[tuple[Any, ...], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") is not None:
            tests.setdefault((item.path, item.parent, getattr(item, "originalname", item.name)), []).append(item)
    for cases in tests.values():
        sample = cases[0].get_closest_marker("sample")
        assert sample is not None
        chosen = _chosen(cases, sample.args)
        for item in cases:
            if item not in chosen:
                item.add_marker(pytest.mark.exhaustive)


def _chosen(cases: Sequence[pytest.Item], sample: tuple[Any, ...]) -> Sequence[pytest.Item]:
    if len(sample) == 1 and isinstance(sample[0], int):
        return cases[:: sample[0]]
    named = [item for item in cases if _id_of(item) in sample]
    return named or cases  # none is there where others are named on the command line


def _id_of(item: pytest.Item) -> str:
    return item.name.partition("[")[2].removesuffix("]")
