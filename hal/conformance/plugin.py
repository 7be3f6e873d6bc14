"""The suite's options for pytest, and what becomes of a backend's gaps. It does nothing in other test runs.

Gaps are expected failures that are not run. With `--verify-gaps` they are, strictly: one that passes fails the run, and
so does one that speaks of no test. With `--samples` as well one may pass, for what fails may be among the shapes that
are not tried. Nothing heavy is imported before a run of the suite asks for it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hal.known_gaps import Gap

PACKAGES = ("hal.conformance", "relay.conformance")


def _ours(argument: str) -> bool:
    place = argument.replace(os.sep, ".").replace("/", ".")
    return not argument.startswith("-") and any(package in place for package in PACKAGES)


def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """Options are added here, where the arguments are known: elsewhere `--device` may be somebody else's."""
    if not any(_ours(argument) for argument in args):
        return
    group = parser.getgroup("conformance", "conformance of a device")
    group.addoption("--device", metavar="NAME", help="device string of the device under test, such as numpy or cuda:0")
    group.addoption("--verify-gaps", action="store_true", help="run known gaps too, and fail where one has closed")
    group.addoption("--samples", type=int, metavar="N", help="try at most N shapes of each op in each dtype, not all")


def device_name(config: pytest.Config) -> str:
    """The device under test. pytest.UsageError where none was named."""
    name = config.getoption("device", None)
    if not name:
        raise pytest.UsageError("which device? Give --device NAME; `relay devices` lists them.")
    return str(name)


def test_id(item: pytest.Item) -> str:
    """File and name, whatever folder the suite is installed in: `test_ops.py::test_...[...]`."""
    return item.nodeid.rpartition("/")[2]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what the device's backend knows that it does not pass."""
    verify = config.getoption("verify_gaps", None)
    if verify is None:
        return  # another suite's run
    name = device_name(config)
    gaps = _gaps_of(name)
    strict = verify and config.getoption("samples") is None
    spoken_of: set[Gap] = set()
    for item in items:
        for gap in gaps:
            if gap.covers(test_id(item), name):
                spoken_of.add(gap)
                item.add_marker(pytest.mark.xfail(reason=gap.reason, run=verify, strict=strict))
    whole = not config.getoption("keyword") and any(argument == PACKAGES[0] for argument in config.args)
    for gap in gaps:
        if verify and whole and gap not in spoken_of and gap.covers(gap.test, name):
            raise pytest.UsageError(f"the gap {gap.test!r} of {name!r} speaks of no test. Correct it or take it out.")


def _gaps_of(name: str) -> tuple[Gap, ...]:
    from hal import registry

    found, _ = registry.backends()
    backend = found.get(name.partition(":")[0])
    return backend.gaps if backend is not None else ()
