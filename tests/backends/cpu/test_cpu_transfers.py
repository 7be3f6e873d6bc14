"""Transfers and fills of the CPU devices against numpy and torch, byte for byte."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.device import Device, Queue, View
from hal.event import Event
from tests.support.cpu_devices import both, fetch, opened, same_bits, upload

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool]


def some_data(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits of that dtype."""
    numbers = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    if dtype is torch.bool:
        numbers &= 1
    return torch.frombuffer(numbers.copy(), dtype=dtype) if count else torch.empty(0, dtype=dtype)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=8, deadline=None)
@given(count=st.integers(0, 257), before=st.integers(0, 9), after=st.integers(0, 9))
def test_what_is_written_comes_back_and_its_neighbours_stay(
    name: str, dtype: torch.dtype, count: int, before: int, after: int
) -> None:
    with opened(name) as device:
        queue = device.queue("any")
        whole = some_data(before + count + after, dtype, seed=1)
        part = some_data(count, dtype, seed=2)
        buffer = device.alloc(whole.nbytes)
        all_of_it = buffer.view(0, whole.shape, dtype)
        queue.write(all_of_it, whole)
        queue.write(buffer.view(before * dtype.itemsize, (count,), dtype), part)
        back = torch.empty_like(whole)
        queue.read(back, all_of_it).wait()
        expected = whole.clone()
        expected[before : before + count] = part
        assert same_bits(back, expected)


def test_every_dtype_that_is_stored_is_tested_here(device: Device) -> None:
    assert set(DTYPES) == device.info.storage


steps = st.lists(
    st.tuples(
        st.sampled_from(["write", "fill", "copy"]),
        st.sampled_from([torch.float32, torch.int16, torch.uint8]),
        st.integers(0, 15),  # where, in units of 8 bytes
        st.integers(0, 15),
        st.integers(0, 16),  # how many elements
        st.integers(0, 100),
        st.booleans(),
    ),
    max_size=15,
)


@both
@settings(max_examples=15, deadline=None)
@given(steps=steps)
def test_any_sequence_of_transfers_does_to_a_buffer_what_numpy_does_to_an_array(name: str, steps: list) -> None:
    with opened(name) as device:
        queue = device.queue("any")
        buffers = [device.alloc(256), device.alloc(256)]
        arrays = [np.zeros(256, np.uint8), np.zeros(256, np.uint8)]
        for buffer in buffers:
            queue.fill(buffer.view(0, (256,), torch.uint8), 0)
        for kind, dtype, where, source, count, value, first in steps:
            at, size = where * 8, count * dtype.itemsize
            chosen, unchosen = (0, 1) if first else (1, 0)
            target = buffers[chosen].view(at, (count,), dtype)
            into = arrays[chosen][at : at + size]
            if kind == "write":
                data = some_data(count, dtype, seed=value)
                queue.write(target, data)
                into[:] = data.view(torch.uint8).numpy()
            elif kind == "fill":
                queue.fill(target, value)
                into.view(str(dtype).removeprefix("torch."))[:] = value
            else:
                queue.copy(target, buffers[unchosen].view(source * 8, (count,), dtype))
                into[:] = arrays[unchosen][source * 8 : source * 8 + size]
        for buffer, array in zip(buffers, arrays, strict=True):
            back = torch.empty(256, dtype=torch.uint8)
            queue.read(back, buffer.view(0, (256,), torch.uint8)).wait()
            assert np.array_equal(back.numpy(), array)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fill_sets_every_element_as_torch_does(device: Device, dtype: torch.dtype) -> None:
    view = device.alloc(33 * dtype.itemsize).view(0, (3, 11), dtype)
    device.queue("any").fill(view, 1.0).wait()
    assert same_bits(fetch(device, view), torch.ones(3, 11, dtype=dtype))


def test_shapes_may_differ_where_the_number_of_elements_is_the_same(device: Device) -> None:
    numbers = torch.arange(12.0)
    view = device.alloc(48).view(0, (3, 4), torch.float32)
    device.queue("any").write(view, numbers).wait()
    assert torch.equal(fetch(device, view), numbers.view(3, 4))


Call = Callable[[Queue, View, torch.Tensor], Event]
CALLS: dict[str, Call] = {
    "write": lambda queue, view, tensor: queue.write(view, tensor),
    "read": lambda queue, view, tensor: queue.read(tensor, view),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(11), torch.zeros(13), torch.zeros(0), torch.zeros(12, dtype=torch.int32), torch.zeros(6).double()],
    ids=["short", "long", "empty", "integers", "doubles"],
)
def test_transfers_between_unlike_sides_are_value_errors(device: Device, call: str, tensor: torch.Tensor) -> None:
    view = upload(device, torch.ones(12))
    with pytest.raises(ValueError, match=f"{call} needs the same dtype"):
        CALLS[call](device.queue("any"), view, tensor)
    assert torch.equal(fetch(device, view), torch.ones(12))


@pytest.mark.parametrize("call", CALLS)
def test_transfers_of_memory_that_is_not_contiguous_are_value_errors(device: Device, call: str) -> None:
    view = upload(device, torch.ones(12))
    with pytest.raises(ValueError, match="contiguous"):
        CALLS[call](device.queue("any"), view, torch.zeros(4, 3).t())


def test_copies_between_unlike_views_are_value_errors(device: Device) -> None:
    queue = device.queue("any")
    view = upload(device, torch.ones(12))
    for other in (torch.zeros(11), torch.zeros(12, dtype=torch.int32)):
        with pytest.raises(ValueError, match="copy needs the same dtype"):
            queue.copy(view, upload(device, other))


@pytest.mark.parametrize(
    ("offset", "shape", "dtype"),
    [
        (1, (64,), torch.uint8),
        (0, (65,), torch.uint8),
        (-8, (1,), torch.uint8),
        (2, (1,), torch.float32),
        (64, (1,), torch.bool),
        (0, (3, 6), torch.float32),
        (61, (1,), torch.int32),
    ],
)
def test_a_view_beyond_its_buffer_or_unaligned_is_a_value_error(
    device: Device, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    with pytest.raises(ValueError, match="buffer of 64 bytes"):
        device.alloc(64).view(offset, shape, dtype)


def test_a_view_knows_its_size(device: Device) -> None:
    buffer = device.alloc(64)
    assert buffer.size == 64
    assert buffer.view(8, (2, 3), torch.float64).size == 48
    assert buffer.view(64, (0, 5), torch.float32).size == 0


def test_a_discrete_device_keeps_its_own_copy(discrete: Device) -> None:
    source = torch.arange(5.0)
    view = upload(discrete, source)
    source.fill_(-1)
    assert torch.equal(fetch(discrete, view), torch.arange(5.0))
