"""Order within a queue and across queues, events, and errors that travel along events."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from hal.conformance.gate import Gate, failed
from hal.device import Device, KernelCall, View
from hal.errors import HalError
from hal.event import Event
from hal.kit.program_builder import QUEUE, GraphBuilder, fetch, for_device, upload
from hal.program import Kernel


def increment(device: Device, count: int) -> Kernel:
    """x + 1, in a kernel."""
    builder = GraphBuilder(f"increment {count}")
    x = builder.input((count,))
    return device.compile(for_device(builder.program([builder.call("aten.add.Scalar", x, 1.0)]), device))


def test_calls_on_one_queue_run_in_the_order_of_submission(device: Device) -> None:
    count = 2051
    kernel = increment(device, count)
    buffer, (source, target) = upload(device, [torch.zeros(count), torch.zeros(count)])
    queue = device.queue(QUEUE)
    for _ in range(25):
        queue.run(KernelCall(kernel, [source], [target]))
        queue.copy(source, target)
    last = queue.run(KernelCall(kernel, [source], [target]))
    last.wait()
    assert torch.equal(fetch(device, [target])[0], torch.full((count,), 26.0))
    buffer.free()


def test_reads_and_writes_take_turns_on_one_queue(device: Device) -> None:
    count = 4099
    buffer, (view,) = upload(device, [torch.zeros(count)])
    queue = device.queue("turns")
    sources = [torch.full((count,), float(number)) for number in range(20)]
    targets = [torch.empty(count) for _ in sources]
    for source, target in zip(sources, targets, strict=True):
        queue.write(view, source)
        event = queue.read(target, view)
    event.wait()
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target)
    buffer.free()


def test_a_call_waits_for_events_of_other_queues(device: Device) -> None:
    """Load, compute and drain on three queues, tied by nothing but `wait`, as the relay does it."""
    count = 3001
    kernel = increment(device, count)
    buffer, (first, second) = upload(device, [torch.zeros(count), torch.zeros(count)])
    load, compute, drain = (device.queue(name) for name in ("load", QUEUE, "drain"))
    sources = [torch.full((count,), float(number)) for number in range(20)]
    targets = [torch.empty(count) for _ in sources]
    ran: Event | None = None
    read: Event | None = None
    for source, target in zip(sources, targets, strict=True):
        written = load.write(first, source, [ran] if ran else [])
        ran = compute.run(KernelCall(kernel, [first], [second]), [written, read] if read else [written])
        read = drain.read(target, second, [ran])
    assert read is not None
    read.wait()
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source + 1)
    buffer.free()


def test_a_submission_returns_while_what_it_waits_for_is_not_done(device: Device) -> None:
    buffer, (view,) = upload(device, [torch.zeros(16)])
    with Gate() as gate:
        delayed = device.queue("delayed").fill(view, 5.0, [gate.event])
        assert not delayed.done()
        assert not gate.event.done()
    delayed.wait()
    assert delayed.done()
    assert torch.equal(fetch(device, [view])[0], torch.full((16,), 5.0))
    buffer.free()


def test_a_queue_that_waits_does_not_hold_up_another(device: Device) -> None:
    buffer, (first, second) = upload(device, [torch.zeros(16), torch.zeros(16)])
    with Gate() as gate:
        delayed = device.queue("delayed").fill(first, 5.0, [gate.event])
        device.queue("free").fill(second, 6.0).wait()
        assert not delayed.done()
    delayed.wait()
    buffer.free()


def test_waiting_again_and_for_many_is_harmless(device: Device) -> None:
    buffer, (view,) = upload(device, [torch.zeros(64)])
    queue = device.queue(QUEUE)
    events = [queue.fill(view, float(number)) for number in range(30)]
    last = device.queue("after").fill(view, 99.0, [*events, *events])
    last.wait()
    last.wait()
    assert all(event.done() for event in events)
    assert torch.equal(fetch(device, [view])[0], torch.full((64,), 99.0))
    buffer.free()


def test_the_span_of_a_call_is_in_order(device: Device) -> None:
    buffer, (view,) = upload(device, [torch.zeros(64)])
    queue = device.queue(QUEUE)
    first = queue.fill(view, 1.0)
    second = queue.fill(view, 2.0, [first])
    second.wait()
    (start, end), (later_start, later_end) = first.span(), second.span()
    assert start <= end
    assert later_start <= later_end
    assert end <= later_start or (later_start, later_end) == (0.0, 0.0)
    assert first.elapsed() >= 0
    buffer.free()


def calls(device: Device, view: View) -> dict[str, Callable[[Sequence[Event]], Event]]:
    """Every kind of call, as a function of what it waits for."""
    queue, kernel = device.queue("errors"), increment(device, 16)
    return {
        "write": lambda wait: queue.write(view, torch.full((16,), 9.0), wait),
        "read": lambda wait: queue.read(torch.zeros(16), view, wait),
        "copy": lambda wait: queue.copy(view, view, wait),
        "fill": lambda wait: queue.fill(view, 9.0, wait),
        "run": lambda wait: queue.run(KernelCall(kernel, [view], [view]), wait),
    }


@pytest.mark.parametrize("kind", ["write", "read", "copy", "fill", "run"])
def test_a_call_that_waits_on_a_failed_one_fails_with_its_error_and_does_not_run(device: Device, kind: str) -> None:
    cause = ArithmeticError("the cause of it all")
    buffer, (view,) = upload(device, [torch.full((16,), 4.0)])
    event = calls(device, view)[kind]([failed(cause)])
    with pytest.raises(HalError, match="the cause of it all") as caught:
        event.wait()
    assert caught.value.__cause__ is cause, "the native error is chained"
    assert event.done()
    assert torch.equal(fetch(device, [view])[0], torch.full((16,), 4.0)), "it ran all the same"
    buffer.free()


def test_the_first_error_of_several_wins(device: Device) -> None:
    buffer, (view,) = upload(device, [torch.zeros(16)])
    first, second = failed(ArithmeticError("number one")), failed(ArithmeticError("number two"))
    queue = device.queue(QUEUE)
    for wait, wanted in (([first, second], "number one"), ([second, first], "number two")):
        with pytest.raises(HalError, match=wanted):
            queue.fill(view, 1.0, wait).wait()
    buffer.free()


def test_an_error_goes_along_a_chain_through_queues_as_it_was(device: Device) -> None:
    buffer, (view,) = upload(device, [torch.zeros(16)])
    first = failed(ArithmeticError("at the root"))
    filled = device.queue("one").fill(view, 1.0, [first])
    was_read = device.queue("two").read(torch.zeros(16), view, [filled, failed(ArithmeticError("too late"))])
    three = device.queue("three").fill(view, 3.0, [was_read])
    errors = []
    for event in (first, filled, was_read, three):
        with pytest.raises(HalError, match="at the root") as caught:
            event.wait()
        errors.append(caught.value)
    assert all(error is errors[0] for error in errors), "one error, the same for all"
    buffer.free()


def test_an_error_is_raised_at_every_wait(device: Device) -> None:
    buffer, (view,) = upload(device, [torch.zeros(16)])
    event = device.queue(QUEUE).fill(view, 1.0, [failed(ArithmeticError("again"))])
    for _ in range(2):
        with pytest.raises(HalError, match="again"):
            event.wait()
    buffer.free()


def test_what_does_not_wait_on_a_failed_call_is_not_touched(device: Device) -> None:
    buffer, (view,) = upload(device, [torch.zeros(16)])
    queue = device.queue(QUEUE)
    bad = queue.fill(view, 1.0, [failed(ArithmeticError("alone"))])
    good = queue.fill(view, 2.0)
    good.wait()
    assert torch.equal(fetch(device, [view])[0], torch.full((16,), 2.0))
    with pytest.raises(HalError, match="alone"):
        bad.wait()
    buffer.free()
