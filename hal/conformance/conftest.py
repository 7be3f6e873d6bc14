"""The device under test, opened once for all tests that do not need one of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hal import registry
from hal.conformance.plugin import device_name
from hal.device import Device

OpenDevice = Callable[..., Device]


@pytest.fixture(scope="session")
def name(request: pytest.FixtureRequest) -> str:
    """Its device string."""
    return device_name(request.config)


@pytest.fixture(scope="session")
def device(name: str) -> Iterator[Device]:
    """The device, shared."""
    opened = registry.open(name)
    yield opened
    opened.close()


@pytest.fixture
def open_device(name: str) -> Iterator[OpenDevice]:
    """Opens further ones, perhaps with a capacity in bytes; they are closed after the test."""
    opened: list[Device] = []

    def open_another(capacity: int | None = None) -> Device:
        opened.append(registry.open(name, capacity))
        return opened[-1]

    yield open_another
    for opened_device in opened:
        opened_device.close()
