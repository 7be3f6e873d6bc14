"""How long memory is borrowed: the host's until its call is done, the device's while queued calls use it.

And each output has memory of its own. Every call here is delayed by a gate, so that a device which takes or gives back
memory too early does so every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from hal.conformance.conftest import OpenDevice
from hal.conformance.gate import Gate
from hal.device import Device, KernelCall, View
from hal.event import Event
from hal.kit.program_builder import QUEUE, GraphBuilder, fetch, for_device, upload
from hal.program import Kernel
from hal.worker import Worker

COUNT = 1000
SIZE = 4 * COUNT


def full(value: float) -> torch.Tensor:
    return torch.full((COUNT,), value)


def doubling(device: Device) -> Kernel:
    builder = GraphBuilder("doubled")
    x = builder.input((COUNT,))
    return device.compile(for_device(builder.program([builder.call("aten.mul.Scalar", x, 2.0)]), device))


# -- host memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["a host task", "a read on another queue", "a read earlier on its own queue"])
def test_a_write_takes_its_host_memory_no_sooner_than_what_it_waits_for_is_done(device: Device, by: str) -> None:
    """What a write carries may be put there by a task or by a read that it waits for, or that its queue has before."""
    buffer, (first, second) = upload(device, [full(3.0), full(0.0)])
    between = full(-1.0)
    queue = device.queue("staging")
    host = Worker("host")
    with Gate() as gate:
        if by == "a host task":
            wait: list[Event] = [host.submit(lambda: between.fill_(3.0), [gate.event], "task")]  # type: ignore[arg-type]
        elif by == "a read on another queue":
            wait = [device.queue("drain").read(between, first, [gate.event])]
        else:
            queue.read(between, first, [gate.event])
            wait = []
        written = queue.write(second, between, wait)
        gate.hold()
    written.wait()
    host.close()
    assert torch.equal(fetch(device, [second])[0], full(3.0)), f"the write took what was there before {by}"
    buffer.free()


def test_a_read_leaves_its_destination_alone_until_what_it_waits_for_is_done(device: Device) -> None:
    """A write that the destination's old contents still have to go out by comes first."""
    buffer, (first, second) = upload(device, [full(3.0), full(0.0)])
    between = full(5.0)
    with Gate() as gate:
        written = device.queue("staging").write(second, between, [gate.event])
        read = device.queue("drain").read(between, first, [written])
        gate.hold()
    read.wait()
    assert torch.equal(fetch(device, [second])[0], full(5.0)), "the read came before the write that it waits for"
    assert torch.equal(between, full(3.0))
    buffer.free()


# -- device memory -------------------------------------------------------------------------------------------------

Submit = Callable[[View, View, torch.Tensor, Sequence[Event]], Event]


def submissions(device: Device) -> dict[str, Submit]:
    """Each kind of call that uses a view of a buffer to be freed: (that view, a view that stays, host memory, wait)."""
    queue, kernel = device.queue("freeing"), doubling(device)
    return {
        "write": lambda freed, live, host, wait: queue.write(freed, host, wait),
        "read": lambda freed, live, host, wait: queue.read(host, freed, wait),
        "copy to it": lambda freed, live, host, wait: queue.copy(freed, live, wait),
        "copy from it": lambda freed, live, host, wait: queue.copy(live, freed, wait),
        "fill": lambda freed, live, host, wait: queue.fill(freed, 8.0, wait),
        "run on it": lambda freed, live, host, wait: queue.run(KernelCall(kernel, [freed], [live]), wait),
        "run into it": lambda freed, live, host, wait: queue.run(KernelCall(kernel, [live], [freed]), wait),
    }


@pytest.mark.parametrize("kind", ["write", "read", "copy to it", "copy from it", "fill", "run on it", "run into it"])
def test_a_freed_buffer_outlives_the_call_queued_on_it(open_device: OpenDevice, kind: str) -> None:
    """Nothing but the queued call knows the memory any more, and other buffers of that size are made meanwhile."""
    device = open_device()
    submit = submissions(device)[kind]
    live_buffer, (live,) = upload(device, [full(1.0)])
    before = device.memory().in_use
    buffer = device.alloc(SIZE, "freed early")
    view = buffer.view(0, (COUNT,), torch.float32)
    device.queue(QUEUE).fill(view, 4.0).wait()
    host = full(8.0)
    with Gate() as gate:
        event = submit(view, live, host, [gate.event])
        buffer.free()
        del view, buffer
        assert device.memory().in_use == before, "the account is settled at once"
        others = [device.alloc(SIZE, "in its place") for _ in range(4)]
        views = [other.view(0, (COUNT,), torch.float32) for other in others]
        filled = [device.queue(QUEUE).fill(other, -1.0) for other in views]
        for each in filled:
            each.wait()
    event.wait()
    for number, found in enumerate(fetch(device, views)):
        assert (found == -1.0).all(), f"buffer {number} was written to by work on the freed one"
    wanted = {"copy from it": 4.0, "run on it": 8.0}.get(kind, 1.0)
    assert torch.equal(fetch(device, [live])[0], full(wanted)), "the call saw another buffer in the place of its own"
    assert torch.equal(host, full(4.0 if kind == "read" else 8.0)), "the read saw another buffer"
    for other in others:
        other.free()
    live_buffer.free()


# -- outputs -------------------------------------------------------------------------------------------------------


def test_an_output_has_memory_of_its_own_also_where_its_value_is_an_inputs(device: Device) -> None:
    """What a program passes on, reshaped or not, is copied: neither side changes with the other, nor with its twin."""
    builder = GraphBuilder("passing on")
    x = builder.input((3, 4))
    flat = builder.call("aten.view.default", x, [12])
    part = builder.call("aten.slice.Tensor", x, 0, 0, 2, 1)
    twice = builder.call("aten.mul.Scalar", x, 2.0)
    program = builder.program([x, flat, part, twice, twice], accumulates=False)
    given = torch.arange(12.0).view(3, 4)
    wanted = [given, given.view(-1), given[:2], given * 2, given * 2]
    buffer, (source, *targets) = upload(device, [given, *(torch.zeros(tensor.shape) for tensor in wanted)])
    queue = device.queue(QUEUE)
    queue.run(KernelCall(device.compile(for_device(program, device)), [source], targets)).wait()
    queue.fill(source, -1.0).wait()
    for number, (found, right) in enumerate(zip(fetch(device, targets), wanted, strict=True)):
        assert torch.equal(found, right), f"output {number} changed with the input"
    for number, target in enumerate(targets):
        queue.fill(target, float(number)).wait()
    assert (fetch(device, [source])[0] == -1.0).all(), "the input changed with an output"
    for number, found in enumerate(fetch(device, targets)):
        assert (found == number).all(), f"output {number} shares its memory with another"
    buffer.free()
