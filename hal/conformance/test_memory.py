"""Allocation, views, limits and accounts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hal.conformance.conftest import OpenDevice
from hal.conformance.samples.oracle import assert_near, evaluate
from hal.device import NATIVE, Device, KernelCall
from hal.errors import HalError, OutOfMemory
from hal.kit.program_builder import QUEUE, GraphBuilder, fetch, for_device, upload


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000, 4096, 1 << 20])
def test_a_buffer_has_the_size_that_was_asked_for(device: Device, size: int) -> None:
    before = device.memory().in_use
    buffer = device.alloc(size)
    assert buffer.size == size
    assert device.memory().in_use == before + size
    view = buffer.view(0, (size,), torch.uint8)
    numbers = (torch.arange(size) % 251).to(torch.uint8)
    device.queue(QUEUE).write(view, numbers).wait()
    assert torch.equal(fetch(device, [view])[0], numbers)
    buffer.free()
    assert device.memory().in_use == before


def test_a_buffer_of_nothing_is_a_buffer(device: Device) -> None:
    before = device.memory().in_use
    buffer = device.alloc(0)
    assert device.memory().in_use == before
    buffer.free()


def test_a_negative_size_is_refused(device: Device) -> None:
    before = device.memory().in_use
    with pytest.raises(ValueError, match="-1"):
        device.alloc(-1, "nonsense")
    assert device.memory().in_use == before


def test_freeing_twice_is_harmless(device: Device) -> None:
    before = device.memory().in_use
    buffer = device.alloc(128)
    buffer.free()
    buffer.free()
    assert device.memory().in_use == before


def test_a_freed_buffer_gives_no_more_views(device: Device) -> None:
    buffer = device.alloc(128)
    buffer.free()
    with pytest.raises(HalError, match="freed"):
        buffer.view(0, (4,), torch.float32)


@pytest.mark.parametrize(
    ("offset", "shape", "dtype"),
    [
        (0, (33,), torch.float32),
        (-4, (1,), torch.float32),
        (128, (1,), torch.uint8),
        (64, (17,), torch.float32),
        (2, (1,), torch.float32),
    ],
)
def test_a_view_that_does_not_fit_is_refused(
    device: Device, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    buffer = device.alloc(128)
    with pytest.raises(ValueError, match="view"):
        buffer.view(offset, shape, dtype)
    buffer.free()


def test_a_view_knows_its_shape_dtype_and_size(device: Device) -> None:
    buffer = device.alloc(256)
    view = buffer.view(64, (3, 5), torch.float32)
    assert (view.shape, view.dtype, view.size) == ((3, 5), torch.float32, 60)
    assert buffer.view(0, (), torch.int64).size == 8
    buffer.free()


def test_buffers_do_not_overlap(device: Device) -> None:
    buffers = [device.alloc(100 + number) for number in range(20)]
    views = [buffer.view(0, (buffer.size,), torch.uint8) for buffer in buffers]
    for number, view in enumerate(views):
        device.queue(QUEUE).fill(view, number).wait()
    for number, found in enumerate(fetch(device, views)):
        assert (found == number).all(), number
    for buffer in buffers:
        buffer.free()


def test_views_of_one_buffer_are_the_same_memory(device: Device) -> None:
    buffer = device.alloc(256)
    whole, part = buffer.view(0, (64,), torch.float32), buffer.view(64, (2, 3), torch.float32)
    device.queue(QUEUE).fill(whole, 1.0).wait()
    device.queue(QUEUE).fill(part, 2.0).wait()
    wanted = torch.ones(64)
    wanted[16:22] = 2.0
    assert torch.equal(fetch(device, [whole])[0], wanted)
    assert torch.equal(
        fetch(device, [buffer.view(64, (6,), torch.int32)])[0].view(torch.float32), torch.full((6,), 2.0)
    )
    buffer.free()


def test_beyond_the_capacity_is_out_of_memory_with_its_figures(open_device: OpenDevice) -> None:
    device = open_device(capacity=1_000_000)
    assert device.memory().capacity == 1_000_000
    first = device.alloc(600_000, "first")
    with pytest.raises(OutOfMemory, match="second thing") as caught:
        device.alloc(400_001, "second thing")
    failure = caught.value
    assert (failure.requested, failure.in_use, failure.capacity) == (400_001, 600_000, 1_000_000)
    assert device.memory().in_use == 600_000
    device.alloc(400_000, "what just fits").free()
    first.free()
    device.alloc(1_000_000, "all of it").free()


def test_the_peak_is_the_most_there_was(open_device: OpenDevice) -> None:
    device = open_device(capacity=1_000_000)
    first, second = device.alloc(1000), device.alloc(3000)
    second.free()
    assert (device.memory().in_use, device.memory().peak) == (1000, 4000)
    device.reset_peak()
    assert device.memory().peak == 1000
    first.free()
    assert (device.memory().in_use, device.memory().peak) == (0, 1000)


def test_a_kernel_whose_workspace_does_not_fit_is_refused(open_device: OpenDevice) -> None:
    """Each product must be whole before the next can begin: no fusion does without memory for one."""
    device = open_device(capacity=100_000)
    builder = GraphBuilder("large inside")
    x, y = builder.input((300, 4)), builder.input((4, 300))
    wide = builder.call("aten.mm.default", x, y)
    squared = builder.call("aten.mm.default", wide, wide)
    narrow = builder.call("aten.mm.default", builder.call("aten.mm.default", squared, squared), x)
    with pytest.raises(OutOfMemory) as caught:
        device.compile(for_device(builder.program([narrow]), device))
    assert caught.value.requested > 100_000
    assert device.memory().in_use == 0


def test_memory_that_the_system_refuses_is_out_of_memory(device: Device) -> None:
    before = device.memory().in_use
    with pytest.raises(OutOfMemory):
        device.alloc(1 << 60, "more than there is")
    assert device.memory().in_use == before


def test_compiling_again_charges_nothing_more(open_device: OpenDevice) -> None:
    device = open_device()
    builder = GraphBuilder("twice")
    x = builder.input((40,))
    program = for_device(builder.program([builder.call("aten.exp.default", x)]), device)
    kernel = device.compile(program)
    in_use = device.memory().in_use
    assert device.compile(program) is kernel
    assert device.memory().in_use == in_use


def test_the_host_beside_it_keeps_a_ledger(open_device: OpenDevice) -> None:
    host = open_device().host(capacity=10_000)
    crossing = host.alloc(500, torch.float32, "weights", crosses=True)
    assert crossing.numel() == 500
    assert host.memory().in_use == 2000
    with pytest.raises(OutOfMemory):
        host.alloc(8001, torch.uint8, "too much")
    host.free(crossing, "weights")
    assert host.memory().in_use == 0
    host.close()


def test_what_crosses_from_the_hosts_own_memory_arrives(open_device: OpenDevice) -> None:
    device = open_device()
    host = device.host()
    up, down = (host.alloc(777, torch.float32, "staging", crosses=True) for _ in range(2))
    up.copy_(torch.arange(777))
    buffer, (view,) = upload(device, [torch.zeros(777)])
    queue = device.queue(QUEUE)
    queue.read(down, view, [queue.write(view, up)]).wait()
    assert torch.equal(down, up)
    buffer.free()
    for tensor in (up, down):
        host.free(tensor, "staging")
    host.close()


TAKES_INDICES: dict[str, Callable[..., tuple[Any, ...]]] = {
    "aten.embedding.default": lambda x, source, grid, row: (x, row),
    "aten.index.Tensor": lambda x, source, grid, row: (x, [row]),
    "aten.gather.default": lambda x, source, grid, row: (x, 0, grid),
    "aten.index_put.default": lambda x, source, grid, row: (x, [row], source, True),
    "aten.scatter.src": lambda x, source, grid, row: (x, 0, grid, source),
    "aten.scatter_add.default": lambda x, source, grid, row: (x, 0, grid, source),
}
"""How each op is called with an operand, what is written into it, and indices of its elements or its rows."""


@pytest.mark.parametrize("op", TAKES_INDICES)
def test_an_index_outside_of_its_operand_is_an_error_that_names_layer_op_and_index(device: Device, op: str) -> None:
    """Also where the program computes the index. What waits for the call does not run, and later calls do."""
    if NATIVE in device.info.tags:
        return  # PyTorch's own kernels raise, or end the device's context
    builder = GraphBuilder("the layer")
    x, source, indices = builder.input((8, 4)), builder.input((3, 4)), builder.input((3, 4), torch.int64)
    computed = builder.call("aten.add.Tensor", indices, indices)
    row = builder.call("aten.select.int", computed, 1, 0)
    program = builder.program([builder.call(op, *TAKES_INDICES[op](x, source, computed, row))], accumulates=False)
    kernel, queue = device.compile(program), device.queue(QUEUE)
    lowest = -8 if op in ("aten.index.Tensor", "aten.index_put.default") else 0
    inside = torch.tensor([[0, 1, 2, 3], [3, 3, 3, 0], [lowest // 2, 2, 1, 0]])
    given = [torch.randn(8, 4), torch.randn(3, 4), inside]
    buffer, views = upload(device, [*given, torch.zeros(program.outputs[0].shape), torch.zeros(2)])
    call = KernelCall(kernel, views[:3], [views[3]])
    for index in (4, lowest // 2 - 1, 2**40, -(2**40)):
        wrong = inside.clone()
        wrong[1, 0] = index
        queue.write(views[2], wrong).wait()
        failed = queue.run(call)
        waiting = device.queue("other").fill(views[4], 1.0, [failed])
        for event in (failed, waiting):
            with pytest.raises(IndexError, match=f"the layer.*{2 * index}.*{op}"):
                event.wait()
    assert fetch(device, [views[4]])[0].tolist() == [0, 0]
    queue.write(views[2], inside).wait()
    queue.run(call).wait()
    (found,), (wanted,) = fetch(device, [views[3]]), evaluate(program, given)
    assert_near(found, wanted, torch.float32, op)
    buffer.free()


@pytest.mark.parametrize("index", [8, -1, -9, 1000, -1000, 2**31 + 5])
def test_an_index_outside_of_its_operand_touches_no_other_memory(device: Device, index: int) -> None:
    if NATIVE in device.info.tags:
        return  # PyTorch's own kernels raise, or end the device's context
    builder = GraphBuilder("scatter and gather")
    x, places = builder.input((8, 4)), builder.input((3, 4), torch.int64)
    written = builder.call("aten.scatter.value", x, 0, places, 5.0)
    taken = builder.call("aten.gather.default", x, 0, places)
    kernel = device.compile(builder.program([written, taken], accumulates=False))
    given = [torch.zeros(8, 4), torch.full((3, 4), index)]
    around = [torch.full((4096,), 7.0) for _ in range(2)]
    buffer, views = upload(device, [*given, around[0], torch.zeros(8, 4), around[1], torch.zeros(3, 4)])
    with contextlib.suppress(HalError, IndexError):
        device.queue(QUEUE).run(KernelCall(kernel, views[:2], [views[3], views[5]])).wait()
    for before, after in zip((given[0], *around), fetch(device, [views[0], views[2], views[4]]), strict=True):
        assert torch.equal(before, after)
    buffer.free()
