"""Queues of the CPU devices: the order of calls, errors that travel along events, and threads that submit at once."""

from __future__ import annotations

import functools
from contextlib import closing

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.conformance.gate import Gate
from hal.conformance.threads import at_once
from hal.device import Device, Queue
from hal.event import Event
from hal.host import Host
from hal.program import Role
from relay.capture import CaptureRequest, capture
from tests.support.cpu_devices import error_of, fetch, opened, same_bits, upload
from tests.support.device_programs import captured_from, failing_lookup, module_and_inputs, numbers, run_program


def test_calls_on_one_queue_run_in_the_order_of_submission(device: Device, gate: Gate) -> None:
    queue = device.queue("any")
    view = device.alloc(4).view(0, (1,), torch.int32)
    backs = [torch.full((1,), -1, dtype=torch.int32) for _ in range(50)]
    queue.fill(view, -2, [gate.event])
    for value, back in enumerate(backs):
        queue.fill(view, value)
        last = queue.read(back, view)
    assert not last.done()
    assert all(back.item() == -1 for back in backs)
    gate.open()
    last.wait()
    assert [back.item() for back in backs] == list(range(50))


def test_a_call_on_another_queue_runs_after_what_it_waits_for(device: Device, gate: Gate) -> None:
    view = upload(device, torch.zeros(3))
    back = torch.full((3,), -1.0)
    written = device.queue("load").write(view, torch.ones(3), [gate.event])
    read = device.queue("drain").read(back, view, [written])
    assert not read.done()
    gate.open()
    read.wait()
    assert written.done()
    assert torch.equal(back, torch.ones(3))


def test_queues_run_side_by_side(device: Device, gate: Gate) -> None:
    view, other = upload(device, torch.zeros(3)), upload(device, torch.zeros(3))
    blocked = device.queue("load").fill(view, 1.0, [gate.event])
    device.queue("drain").fill(other, 2.0).wait()
    assert not blocked.done()
    gate.open()
    blocked.wait()


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_calls_chained_by_wait_over_many_queues_give_what_one_queue_gives(data: st.DataObject) -> None:
    with opened("cpu:discrete") as device:
        values = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20))
        view = device.alloc(4).view(0, (1,), torch.int32)
        backs = [torch.zeros(1, dtype=torch.int32) for _ in values]
        before: list[Event] = []
        for value, back in zip(values, backs, strict=True):
            writing, reading = (device.queue(data.draw(st.sampled_from("abc"))) for _ in range(2))
            written = writing.write(view, torch.tensor([value], dtype=torch.int32), before)
            before = [reading.read(back, view, [written])]
        before[0].wait()
        assert [back.item() for back in backs] == values


def test_a_queue_is_known_by_its_name(device: Device) -> None:
    assert device.queue("load") is device.queue("load")
    assert device.queue("load") is not device.queue("drain")
    assert device.queue("load").name == "load"


def test_an_event_has_a_span_in_the_order_of_the_calls(device: Device) -> None:
    view = upload(device, torch.zeros(3))
    first = device.queue("load").fill(view, 1.0)
    second = device.queue("drain").fill(view, 2.0, [first])
    second.wait()
    assert first.span()[0] <= first.span()[1] <= second.span()[0] <= second.span()[1]


def test_a_native_error_travels_chained_to_everything_that_waits(device: Device) -> None:
    view, back = upload(device, torch.zeros(3)), torch.full((3,), -1.0)
    failed = failing_lookup(device)
    second = device.queue("load").write(view, torch.ones(3), [failed])
    third = device.queue("drain").read(back, view, [second])
    error = error_of(third)
    assert error is error_of(second) is error_of(failed)
    assert "lookup" in str(error)
    assert isinstance(error.__cause__, IndexError)
    assert failed.done()
    assert second.done()
    assert third.done()


def test_a_call_that_waits_on_a_failed_one_does_not_run(device: Device) -> None:
    view, back = upload(device, torch.zeros(3)), torch.full((3,), -1.0)
    failed = failing_lookup(device)
    calls = [
        device.queue("load").write(view, torch.ones(3), [failed]),
        device.queue("load").fill(view, 2.0, [failed]),
        device.queue("drain").read(back, view, [failed]),
    ]
    for call in calls:
        error_of(call)
    assert torch.equal(fetch(device, view), torch.zeros(3))
    assert torch.equal(back, torch.full((3,), -1.0))


def test_the_first_error_wins(device: Device, gate: Gate) -> None:
    def look_up(word: str) -> None:
        raise KeyError(word)

    with closing(Host()) as host:
        first = host.run(functools.partial(look_up, "first"), [gate.event])
        second = host.run(functools.partial(look_up, "second"), [gate.event])
        view = upload(device, torch.zeros(3))
        both_failed = device.queue("any").fill(view, 1.0, [first, second])
        later = failing_lookup(device, [both_failed])  # would fail by itself, but never runs
        gate.open()
        error = error_of(later)
        assert error is error_of(first)
        assert error is not error_of(second)
    assert isinstance(error.__cause__, KeyError)


def test_calls_that_do_not_wait_on_a_failed_one_are_not_touched(device: Device, gate: Gate) -> None:
    view, back = upload(device, torch.zeros(3)), torch.empty(3)
    failed = failing_lookup(device, [gate.event])
    same_queue = device.queue("compute").fill(view, 4.0)
    read = device.queue("drain").read(back, view, [same_queue])
    gate.open()
    read.wait()
    assert torch.equal(back, torch.full((3,), 4.0))
    error_of(failed)


def test_a_kernel_runs_again_after_it_failed(device: Device) -> None:
    error_of(failing_lookup(device))
    module, inputs = module_and_inputs("embedding")
    found = run_program(device, capture(CaptureRequest(module, inputs, "embedding")).forward, module, inputs)
    assert same_bits(found[Role.VALUE, 0], module(*inputs)[0].detach())
    error_of(failing_lookup(device))


def test_several_threads_may_submit_to_one_device(device: Device) -> None:
    found: dict[int, list[float]] = {}

    def work(number: int) -> None:
        view = device.alloc(400).view(0, (100,), torch.float32)
        back = torch.empty(100)
        for turn in range(20):
            filled = device.queue("shared").fill(view, float(number * 100 + turn))
            device.queue(f"own {number}").read(back, view, [filled]).wait()
            found.setdefault(number, []).append(float(back.unique().item()))

    at_once(4, work)
    assert found == {number: [float(number * 100 + turn) for turn in range(20)] for number in range(4)}
    assert device.memory().in_use == 1600


def test_threads_that_ask_at_once_get_one_queue_and_one_kernel() -> None:
    program = captured_from("attention").forward
    for _ in range(20):
        with opened("cpu") as device:
            queues: list[Queue] = []
            kernels: list[object] = []

            def ask(_: int, device=device, queues=queues, kernels=kernels) -> None:
                queues.append(device.queue("compute"))
                kernels.append(device.compile(program))

            at_once(4, ask)
            assert len({id(queue) for queue in queues}) == 1
            assert len({id(kernel) for kernel in kernels}) == 1
            assert device.memory().in_use == program.workspace


def test_kernels_submitted_by_several_threads_give_the_bits_of_eager_torch(device: Device) -> None:
    module, inputs = module_and_inputs("mlp")
    program = capture(CaptureRequest(module, inputs, "mlp")).forward
    batches = [numbers(2, 3, 9) * (number + 1) for number in range(4)]
    expected = [module(batch)[0].detach() for batch in batches]
    found: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        found[number] = run_program(device, program, module, [batches[number]])[Role.VALUE, 0]

    at_once(4, work)
    assert all(same_bits(found[number], expected[number]) for number in range(4))
