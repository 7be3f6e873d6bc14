"""The pytest plugin of the suite: its options, and what pytest does with a backend's known gaps.

`relay conformance` loads it, and so does `pytest -p hal.conformance.plugin --pyargs hal.conformance --device NAME`. It
is not registered as an entry point, so other test runs neither import it nor have its options. Known gaps are expected
failures that are not run. With `--verify-known-gaps` they are run, strictly: a known gap that passes fails the run, and
so does one that matches no test. With `--samples` as well a known gap may pass, because the shapes that fail may be
among those that are left out. Invariant: a test that is no known gap is run.
"""

from __future__ import annotations

import pytest

from hal import registry
from hal.known_gaps import KnownGap


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite to pytest's."""
    group = parser.getgroup("conformance", "conformance of a device")
    group.addoption("--device", metavar="NAME", help="device string of the device under test, such as numpy or cuda:0")
    group.addoption(
        "--verify-known-gaps", action="store_true", help="run the known gaps too, and fail where one of them passes"
    )
    group.addoption("--samples", type=int, metavar="N", help="try at most N shapes of each op in each dtype, not all")


def device_name(config: pytest.Config) -> str:
    """The device string of the device under test. Raises pytest.UsageError where `--device` is missing."""
    name = config.getoption("device", None)
    if not name:
        raise pytest.UsageError("The suite needs a device: give --device NAME. `relay devices` lists the names.")
    return str(name)


def test_id(item: pytest.Item) -> str:
    """File and name of a test, without the folder that the suite is installed in: `test_ops.py::test_...[...]`."""
    return item.nodeid.rpartition("/")[2]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the known gaps of the device as expected failures."""
    verify = bool(config.getoption("verify_known_gaps"))
    name = device_name(config)
    known_gaps = _known_gaps_of(name)
    strict = verify and config.getoption("samples") is None
    matched: set[KnownGap] = set()
    for item in items:
        for known_gap in known_gaps:
            if known_gap.covers(test_id(item), name):
                matched.add(known_gap)
                item.add_marker(pytest.mark.xfail(reason=known_gap.reason, run=verify, strict=strict))
    if not verify or config.getoption("keyword") or any("::" in argument for argument in config.args):
        return  # only some tests were chosen
    files = {test_id(item).partition("::")[0] for item in items}
    for known_gap in known_gaps:
        if known_gap in matched or not known_gap.covers(known_gap.test, name):
            continue
        # Where one package of the suite is run alone, the file may be in the other.
        if known_gap.test.partition("::")[0] in files or len(config.args) > 1:
            raise pytest.UsageError(
                f"The known gap {known_gap.test!r} of device {name!r} matches no test. Correct or delete it."
            )


def _known_gaps_of(name: str) -> tuple[KnownGap, ...]:
    found, _ = registry.backends()
    backend = found.get(name.partition(":")[0])
    return backend.known_gaps if backend is not None else ()
