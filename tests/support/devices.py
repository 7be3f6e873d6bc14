"""Which devices are here: tests of one that is not are skipped with its reason."""

import functools

import pytest

from hal import registry
from hal.device import Probe


@functools.cache
def probes() -> tuple[Probe, ...]:
    """What probing finds, once for all tests of a process."""
    return tuple(registry.devices())


def require(device: str) -> None:
    """Skip the test where no device of that kind works, with what probing says of them."""
    known = [probe for probe in probes() if probe.name.partition(":")[0] == device.partition(":")[0]]
    if not any(probe.available for probe in known):
        pytest.skip(f"no {device} works here: " + "; ".join(f"{probe.name}: {probe.reason}" for probe in known))
