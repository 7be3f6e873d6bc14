"""How many of the cases of a test a run tries: products of options, and samples of any other cases.

As it comes, a matrix tries a few combinations that hold every pair of values. RELAY_FULL_MATRIX=1 (make test-full)
tries them all; any other number that many of them, drawn at random by a fixed seed, for an estimate.

`@pytest.mark.sample` names the cases of a test that `make test` runs: `sample(3)` stands for one case in three, the
first included, `sample("cpu-fp32", "numpy")` for the cases with these ids. The others are marked exhaustive, and
`make test-full` runs them. A sample has one or two cases of each kind, those that differ most. Where a command line
names cases by their ids, these run. Invariant: of every test with a sample at least one case runs in `make test`.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

Case = dict[str, Any]


def cases(options: Mapping[str, Sequence[Any]], few: Iterable[Case]) -> list[Case]:
    """The `few`, or as much of the whole product as RELAY_FULL_MATRIX asks for."""
    wanted = asked_for()
    if wanted == 0:
        return list(few)
    count = math.prod(len(values) for values in options.values())
    if wanted == 1:
        return [dict(zip(options, case, strict=True)) for case in itertools.product(*options.values())]
    return [nth(options, number) for number in sorted(random.Random(0).sample(range(count), min(wanted, count)))]


def asked_for() -> int:
    """How many cases RELAY_FULL_MATRIX asks for: 0 for the few, 1 for all."""
    return int(os.environ.get("RELAY_FULL_MATRIX", "0"))


def nth(options: Mapping[str, Sequence[Any]], number: int) -> Case:
    """A combination by its index in the product's order."""
    case = {}
    for name, values in reversed(options.items()):
        number, index = divmod(number, len(values))
        case[name] = values[index]
    return {name: case[name] for name in options}


def in_turn(last: Sequence[Any], *others: Iterable[Any]) -> list[tuple[Any, ...]]:
    """The whole product of the other options, each case with one value of the last, in turn: with it every value meets
    every value (of two others, where the last has two values)."""
    numbered = itertools.product(*(list(enumerate(values)) for values in others))
    return [(*(value for _, value in case), last[sum(index for index, _ in case) % len(last)]) for case in numbered]


def sampled(last: Sequence[Any], *others: Iterable[Any]) -> list[Any]:
    """The whole product of all options as cases of a test. `make test` runs those that `in_turn` gives; the others are
    marked exhaustive, for `make test-full`."""
    cases = []
    for numbered in itertools.product(*(list(enumerate(values)) for values in others)):
        turn = sum(index for index, _ in numbered) % len(last)
        for index, value in enumerate(last):
            marks = () if index == turn else pytest.mark.exhaustive
            cases.append(pytest.param(*(value for _, value in numbered), value, marks=marks))
    return cases


def combinations(case: Mapping[str, Any], size: int) -> set[tuple[tuple[str, Any], ...]]:
    """The values of a case, `size` at a time, each with its option."""
    return set(itertools.combinations(case.items(), size))


def every(options: Mapping[str, Sequence[Any]], size: int) -> set[tuple[tuple[str, Any], ...]]:
    """What all cases together would hold, `size` at a time."""
    return {
        tuple(zip(names, values, strict=True))
        for names in itertools.combinations(options, size)
        for values in itertools.product(*(options[name] for name in names))
    }


# **** samples ****


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
