"""Memory of the CPU devices: every byte counted, a capacity that holds, and the host's own where it is unified."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hal.conformance.gate import Gate
from hal.device import Device
from hal.errors import HalError, OutOfMemory, Unsupported
from tests.support.cpu_devices import both, error_of, opened
from tests.support.device_programs import captured_from, failing_lookup

# **** memory ****


def test_every_byte_is_counted_and_comes_back(device: Device) -> None:
    assert device.memory().in_use == 0
    first, second = device.alloc(1000), device.alloc(234)
    assert device.memory().in_use == 1234
    first.free()
    assert device.memory().in_use == 234
    first.free()
    assert device.memory().in_use == 234
    second.free()
    assert (device.memory().in_use, device.memory().peak) == (0, 1234)
    device.reset_peak()
    assert device.memory().peak == 0


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000, 4097])
def test_buffers_are_aligned_and_exact_in_size(unified: Device, size: int) -> None:
    buffer = unified.alloc(size)
    view = buffer.view(0, (size,), torch.uint8)
    assert unified.host_tensor(view).data_ptr() % 64 == 0
    assert unified.memory().in_use == buffer.size == size


@both
def test_the_capacity_holds_for_allocations_and_the_refusal_says_of_what(name: str) -> None:
    with opened(name, capacity=1000) as device:
        buffer = device.alloc(600)
        with pytest.raises(OutOfMemory) as caught:
            device.alloc(401, "gradients of slot 1")
        assert (caught.value.requested, caught.value.in_use, caught.value.capacity) == (401, 600, 1000)
        assert f"gradients of slot 1 on device '{name}'" in str(caught.value)
        assert device.memory().in_use == 600
        device.alloc(400).free()
        buffer.free()
        assert device.alloc(1000).size == 1000


@both
def test_the_capacity_holds_for_the_workspace_of_kernels(name: str) -> None:
    captured = captured_from("attention")
    assert captured.backward is not None
    small, large = sorted([captured.forward, captured.backward], key=lambda program: program.workspace)
    assert 0 < small.workspace < large.workspace
    with opened(name, capacity=large.workspace - 1) as device:
        kernel = device.compile(small)
        with pytest.raises(OutOfMemory, match=f"workspace of {large.name}"):
            device.compile(large)
        assert device.memory().in_use == small.workspace
        assert device.compile(small) is kernel
    with opened(name, capacity=large.workspace) as device:
        device.compile(small)
        device.compile(large)
        device.compile(small)
        assert device.memory().in_use == large.workspace
        with pytest.raises(OutOfMemory):
            device.alloc(1)


def test_memory_that_the_system_refuses_is_an_out_of_memory_that_counts_nothing(device: Device) -> None:
    with pytest.raises(OutOfMemory) as caught:
        device.alloc(2**60, "a whim")
    assert caught.value.requested == 2**60
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert device.memory().in_use == 0


def test_less_than_nothing_cannot_be_allocated(device: Device) -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        device.alloc(-1)
    assert device.memory().in_use == 0


def test_a_freed_buffer_outlives_the_work_queued_on_it(device: Device, gate: Gate) -> None:
    buffer = device.alloc(4000)
    view = buffer.view(0, (1000,), torch.float32)
    back = torch.empty(1000)
    written = device.queue("load").write(view, torch.arange(1000.0), [gate.event])
    read = device.queue("drain").read(back, view, [written])
    before = device.memory().in_use
    buffer.free()
    assert before - device.memory().in_use == 4000
    del view, buffer
    for _ in range(20):  # would land in the same memory, had it been given away
        other = device.alloc(4000).view(0, (1000,), torch.float32)
        device.queue("other").fill(other, -1.0).wait()
    gate.open()
    read.wait()
    assert torch.equal(back, torch.arange(1000.0))


def test_a_freed_buffer_gives_no_more_views(device: Device) -> None:
    buffer = device.alloc(64)
    buffer.free()
    with pytest.raises(HalError, match="freed"):
        buffer.view(0, (1,), torch.uint8)


# **** aliasing ****


def test_a_unified_device_works_in_the_hosts_own_memory(unified: Device) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    view = unified.adopt(tensor)
    assert (view.shape, view.dtype, view.size) == ((2, 3), torch.float32, 24)
    assert unified.host_tensor(view).data_ptr() == tensor.data_ptr()
    unified.queue("any").fill(view, 8.0).wait()
    assert torch.equal(tensor, torch.full((2, 3), 8.0))
    assert unified.memory().in_use == 0


def test_the_host_sees_what_a_unified_device_writes_to_its_buffers(unified: Device) -> None:
    buffer = unified.alloc(16)
    view = buffer.view(4, (2,), torch.float32)
    host = unified.host_tensor(view)
    unified.queue("any").write(view, torch.tensor([1.0, 2.0])).wait()
    assert host.tolist() == [1.0, 2.0]


def test_a_transfer_onto_itself_is_an_event_in_order_that_changes_nothing(unified: Device, gate: Gate) -> None:
    tensor = torch.arange(4.0)
    view = unified.adopt(tensor)
    events = [
        unified.queue("load").write(view, tensor, [gate.event]),
        unified.queue("drain").read(tensor, view, [gate.event]),
        unified.queue("other").copy(view, view, [gate.event]),
    ]
    assert not any(event.done() for event in events)
    tensor.add_(1)  # nothing was taken aside that could come back
    gate.open()
    for event in events:
        event.wait()
    assert tensor.tolist() == [1.0, 2.0, 3.0, 4.0]
    failed = failing_lookup(unified)
    assert error_of(unified.queue("load").write(view, tensor, [failed])) is error_of(failed)


def test_only_contiguous_memory_can_be_adopted(unified: Device) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        unified.adopt(torch.zeros(3, 4).t())


def test_a_discrete_device_refuses_to_alias(discrete: Device) -> None:
    assert unified_tag(discrete) is False
    with pytest.raises(Unsupported, match="cpu:discrete"):
        discrete.adopt(torch.zeros(3))
    with pytest.raises(Unsupported, match="cpu:discrete"):
        discrete.host_tensor(discrete.alloc(4).view(0, (1,), torch.float32))


def unified_tag(device: Device) -> bool:
    return device.info.unified


def test_unified_and_discrete_are_told_apart_by_their_tag(unified: Device, discrete: Device) -> None:
    assert unified_tag(unified)
    assert not unified_tag(discrete)


def test_parameters_with_gradients_are_written_and_read_without_autograd(device: Device) -> None:
    parameter = nn.Parameter(torch.ones(3))
    view = device.alloc(12).view(0, (3,), torch.float32)
    device.queue("any").write(view, parameter)
    device.queue("any").fill(view, 5.0)
    device.queue("any").read(parameter.detach(), view).wait()
    assert parameter.tolist() == [5.0, 5.0, 5.0]
    assert parameter.is_leaf
