"""Two devices at once, and threads that submit at the same time."""

from __future__ import annotations

import torch

from hal.conformance.conftest import OpenDevice
from hal.conformance.threads import at_once
from hal.device import Device, KernelCall
from hal.event import Event
from hal.kit.program_builder import QUEUE, GraphBuilder, fetch, for_device, upload
from hal.program import Program

THREADS = 4
ROUNDS = 12


def doubling(count: int, factor: float = 2.0) -> Program:
    builder = GraphBuilder(f"times {factor}")
    x = builder.input((count,))
    return builder.program([builder.call("aten.mul.Scalar", x, factor)])


def test_two_devices_work_at_once_and_keep_apart(open_device: OpenDevice) -> None:
    devices = [open_device(), open_device()]
    program = for_device(doubling(2051), devices[0])
    kernels = [device.compile(program) for device in devices]
    uploaded = [upload(device, [torch.full((2051,), float(number + 1))] * 2) for number, device in enumerate(devices)]
    last: list[Event] = []
    for _ in range(ROUNDS):
        last = []
        for device, kernel, (_, (source, target)) in zip(devices, kernels, uploaded, strict=True):
            queue = device.queue(QUEUE)
            queue.run(KernelCall(kernel, [source], [target]))
            last.append(queue.copy(source, target))
    for event in last:
        event.wait()
    for number, (device, (_, views)) in enumerate(zip(devices, uploaded, strict=True)):
        assert torch.equal(fetch(device, views[:1])[0], torch.full((2051,), (number + 1) * 2.0**ROUNDS))
    assert devices[0].memory().in_use == devices[1].memory().in_use


def test_a_device_outlives_the_closing_of_its_twin(open_device: OpenDevice) -> None:
    first, second = open_device(), open_device()
    buffer, views = upload(second, [torch.arange(9.0)])
    first.close()
    assert torch.equal(fetch(second, views)[0], torch.arange(9.0))
    buffer.free()


def test_a_call_may_wait_for_an_event_of_another_device(open_device: OpenDevice) -> None:
    first, second = open_device(), open_device()
    buffer, (view,) = upload(first, [torch.full((4099,), 3.0)])
    second_buffer, (second_view,) = upload(second, [torch.zeros(4099)])
    between = torch.zeros(4099)
    read = first.queue(QUEUE).read(between, view)
    second.queue(QUEUE).write(second_view, between, [read]).wait()
    assert (fetch(second, [second_view])[0] == 3.0).all()
    buffer.free()
    second_buffer.free()


def test_threads_with_queues_of_their_own(device: Device) -> None:
    program = for_device(doubling(1027), device)

    def task(number: int) -> None:
        kernel = device.compile(program)
        queue = device.queue(f"thread {number}")
        buffer = device.alloc(2 * 4160)
        source, target = (buffer.view(at, (1027,), torch.float32) for at in (0, 4160))
        given, back = torch.full((1027,), number + 1.0), torch.zeros(1027)
        queue.write(source, given)
        for _ in range(ROUNDS):
            queue.run(KernelCall(kernel, [source], [target]))
            queue.copy(source, target)
        queue.read(back, source).wait()
        buffer.free()
        assert torch.equal(back, given * 2.0**ROUNDS)

    at_once(THREADS, task)


def test_threads_that_share_a_queue(device: Device) -> None:
    buffer = device.alloc(THREADS * 4160)
    views = [buffer.view(number * 4160, (1027,), torch.float32) for number in range(THREADS)]
    queue = device.queue("shared")

    def task(number: int) -> None:
        for turn in range(ROUNDS):
            back = torch.zeros(1027)
            queue.write(views[number], torch.full((1027,), float(turn)))
            queue.read(back, views[number]).wait()
            assert (back == turn).all(), (number, turn)

    at_once(THREADS, task)
    buffer.free()


def test_threads_that_compile_the_same_program_share_a_kernel(open_device: OpenDevice) -> None:
    device = open_device()
    program = for_device(doubling(33, 3.0), device)
    kernels: list[object] = [None] * THREADS

    def task(number: int) -> None:
        kernels[number] = device.compile(program)

    at_once(THREADS, task)
    assert all(kernel is kernels[0] for kernel in kernels)


def test_threads_that_allocate_and_free_leave_the_account_as_it_was(device: Device) -> None:
    before = device.memory().in_use

    def task(number: int) -> None:
        for size in range(1, 100):
            device.alloc(size * (number + 1)).free()

    at_once(THREADS, task)
    assert device.memory().in_use == before
