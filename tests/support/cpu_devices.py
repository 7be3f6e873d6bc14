"""The CPU devices, opened for a test: tensors placed and fetched, errors of events.

`conftest` makes fixtures of them: `device` is each of them in turn, `unified` and `discrete` are one alone.
Nothing here compares a device with a reference; that is for the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hal.device import Device, View
from hal.errors import HalError
from hal.event import Event
from hal.registry import open as open_device

NAMES = ["cpu", "cpu:discrete"]

both = pytest.mark.parametrize("name", NAMES)


@contextmanager
def opened(name: str, capacity: int | None = None) -> Iterator[Device]:
    device = open_device(name, capacity)
    try:
        yield device
    finally:
        device.close()


def upload(device: Device, tensor: torch.Tensor) -> View:
    """A view in a new buffer that holds this tensor."""
    view = device.alloc(max(tensor.nbytes, 1)).view(0, tensor.shape, tensor.dtype)
    device.queue("load").write(view, tensor.detach().contiguous()).wait()
    return view


def fetch(device: Device, view: View) -> torch.Tensor:
    tensor = torch.empty(view.shape, dtype=view.dtype)
    device.queue("fetch").read(tensor, view).wait()
    return tensor


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (
        first.shape == second.shape
        and first.dtype == second.dtype
        and torch.equal(first.contiguous().view(-1).view(torch.uint8), second.contiguous().view(-1).view(torch.uint8))
    )


def error_of(event: Event) -> BaseException:
    with pytest.raises(HalError) as caught:
        event.wait()
    return caught.value
