"""Writing, reading, copying and filling: every dtype, odd sizes, parts of buffers, and who owns the host memory."""

from __future__ import annotations

import pytest
import torch

from hal import dtypes
from hal.device import Device
from hal.kit.program_builder import QUEUE, fetch, upload

DTYPES = sorted(dtypes.ALL, key=str)
COUNTS = [1, 3, 255, 1025, 65_537]


def stored(device: Device, dtype: torch.dtype) -> None:
    """Skip if the device does not list the dtype in DeviceInfo.storage."""
    if dtype not in device.info.storage:
        pytest.skip(f"{dtype} is not in DeviceInfo.storage")


def bits(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bits, NaN included, that the dtype can hold."""
    generator = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return (raw & 1).bool() if dtype is torch.bool else raw.view(dtype)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_round_trip_keeps_every_bit(device: Device, dtype: torch.dtype) -> None:
    stored(device, dtype)
    for count in COUNTS:
        given = bits(count, dtype)
        buffer, views = upload(device, [given])
        assert same_bits(fetch(device, views)[0], given), count
        buffer.free()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writing_a_part_leaves_the_rest(device: Device, dtype: torch.dtype) -> None:
    stored(device, dtype)
    whole, part = bits(1000, dtype), bits(333, dtype)
    buffer, (view,) = upload(device, [whole])
    for start in (1, 17, 667):
        inside = buffer.view(start * dtype.itemsize, (333,), dtype)
        device.queue(QUEUE).write(inside, part).wait()
        whole[start : start + 333] = part
        assert same_bits(fetch(device, [inside])[0], part)
        assert same_bits(fetch(device, [view])[0], whole)
    buffer.free()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_within_the_device_keep_every_bit(device: Device, dtype: torch.dtype) -> None:
    stored(device, dtype)
    given = bits(515, dtype)
    buffer, (source, target) = upload(device, [given, torch.zeros(515, dtype=dtype)])
    device.queue(QUEUE).copy(target, source).wait()
    assert same_bits(fetch(device, [target])[0], given)
    buffer.free()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_filling_sets_every_element_and_no_other(device: Device, dtype: torch.dtype) -> None:
    stored(device, dtype)
    for value in (0, 1) if dtype is torch.bool else (0, 1, 100) if dtype.itemsize == 1 else (0, 1, -3.5, 100):
        if not dtype.is_floating_point:
            value = int(value)
        if dtype is torch.uint8:
            value = abs(value)
        around = torch.ones(77, dtype=dtype)
        buffer, (view,) = upload(device, [around])
        device.queue(QUEUE).fill(buffer.view(5 * dtype.itemsize, (61,), dtype), value).wait()
        around[5:66] = value
        assert torch.equal(fetch(device, [view])[0], around), value
        buffer.free()


def test_the_shapes_of_both_sides_may_differ(device: Device) -> None:
    buffer, (view,) = upload(device, [torch.zeros(6, 4)])
    device.queue(QUEUE).write(view, torch.arange(24.0)).wait()
    back = torch.empty(2, 12)
    device.queue(QUEUE).read(back, view).wait()
    assert torch.equal(back.view(-1), torch.arange(24.0))
    buffer.free()


def test_two_sides_that_do_not_fit_are_refused_at_the_call(device: Device) -> None:
    buffer, (view, other) = upload(device, [torch.zeros(8), torch.zeros(9)])
    queue = device.queue(QUEUE)
    for wrong in (torch.zeros(7), torch.zeros(9), torch.zeros(8, dtype=torch.int32)):
        with pytest.raises(ValueError, match="write"):
            queue.write(view, wrong)
        with pytest.raises(ValueError, match="read"):
            queue.read(wrong, view)
    with pytest.raises(ValueError, match="copy"):
        queue.copy(view, other)
    with pytest.raises(ValueError, match="contiguous"):
        queue.write(view, torch.zeros(8, 2)[:, 0])
    with pytest.raises(ValueError, match="contiguous"):
        queue.read(torch.zeros(8, 2)[:, 0], view)
    buffer.free()


def test_host_memory_may_be_used_again_once_its_write_is_done(device: Device) -> None:
    """One piece of host memory carries fifty different tensors to fifty views."""
    count, size = 50, 4099
    staging = torch.empty(size)
    buffer = device.alloc(count * size * 4)
    views = [buffer.view(number * size * 4, (size,), torch.float32) for number in range(count)]
    queue = device.queue("staging")
    for number, view in enumerate(views):
        staging.fill_(number)
        queue.write(view, staging).wait()
    for number, found in enumerate(fetch(device, views)):
        assert (found == number).all(), number
    buffer.free()


def test_what_was_read_stays_when_the_device_memory_changes(device: Device) -> None:
    buffer, (view,) = upload(device, [torch.ones(1025)])
    queue = device.queue(QUEUE)
    back = torch.zeros(1025)
    queue.read(back, view).wait()
    queue.fill(view, 2.0).wait()
    assert (back == 1).all()
    buffer.free()


def test_host_memory_at_any_address_is_read_and_written(device: Device) -> None:
    """Sub-ranges of host tensors are aligned to their elements and no more."""
    source, target = torch.arange(1000, dtype=torch.int16), torch.zeros(1000, dtype=torch.int16)
    if torch.int16 not in device.info.storage:
        pytest.skip("torch.int16 is not in DeviceInfo.storage")
    buffer, (view,) = upload(device, [torch.zeros(501, dtype=torch.int16)])
    queue = device.queue(QUEUE)
    queue.read(target[7:508], view, [queue.write(view, source[3:504])]).wait()
    assert torch.equal(target[7:508], source[3:504])
    assert (target[:7] == 0).all()
    assert (target[508:] == 0).all()
    buffer.free()
