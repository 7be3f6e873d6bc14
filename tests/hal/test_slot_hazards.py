"""Every hazard of a slot's own memory, whatever a schedule does.

Orders are checked twice: by results, with calls held back at a gate, and by asking of every pair of calls that
touch the same memory whether the waits they were given, and the queues they are on, put them in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.conformance.faults import WrappedDevice, WrappedQueue
from hal.device import Device, Queue, View
from hal.errors import HalError
from hal.event import Event
from hal.host import Host
from hal.slot.layout import SlotContent
from tests.support.slot_bench import FEATURES, SIZE, Bench, content_of, expected_output, same_gradients

# **** hazards, by results ****


def test_a_kernel_waits_for_the_load(apart: Bench) -> None:
    apart.load(content_of("layer", 3.0), wait=[apart.gate])
    ran = apart.run_forward()
    assert not ran.done()
    apart.open_gate()
    ran.wait()
    assert torch.equal(apart.fetch(apart.output), expected_output(3.0))


def test_a_load_waits_for_the_kernels_that_read_what_it_overwrites(apart: Bench) -> None:
    apart.load(content_of("one", 1.0))
    ran = apart.run_forward([apart.gate])
    loaded = apart.load(content_of("other", 2.0))
    apart.device.queue("fetch").fill(apart.output, 0.0).wait()  # other queues are free to run meanwhile
    assert not loaded[-1].done()
    apart.open_gate()
    loaded[-1].wait()
    assert ran.done()
    assert torch.equal(apart.fetch(apart.output), expected_output(1.0))
    apart.run_forward().wait()
    assert torch.equal(apart.fetch(apart.output), expected_output(2.0))


def test_a_load_waits_for_those_kernels_even_when_a_content_without_parameters_came_between(apart: Bench) -> None:
    apart.load(content_of("old", 1.0))
    apart.run_forward([apart.gate])
    apart.load(SlotContent("nothing", (), 0, (), (), (), 0))
    loaded = apart.load(content_of("new", 5.0))
    apart.device.queue("fetch").fill(apart.output, 0.0).wait()  # other queues are free to run meanwhile
    assert not loaded[-1].done()
    apart.open_gate()
    loaded[-1].wait()
    assert torch.equal(apart.fetch(apart.output), expected_output(1.0))


def test_a_writer_of_gradients_waits_for_the_drain_of_those_before(apart: Bench) -> None:
    other_seed = apart._hold(torch.full((4, 2), 2.0))
    found = torch.zeros(SIZE, dtype=torch.uint8)
    apart.load(content_of("layer", 1.0))
    apart.run_backward()
    drained = apart.drain(found, [apart.gate])
    second = apart.run_backward(seed=other_seed)
    assert not second.done()
    apart.open_gate()
    second.wait()
    assert drained[-1].done()
    assert same_gradients(found, 1.0)
    apart.drain(found)[-1].wait()
    assert same_gradients(found, 2.0)


def test_a_kernel_that_writes_no_gradients_does_not_wait_for_a_drain(apart: Bench) -> None:
    apart.load(content_of("layer", 1.0))
    apart.run_backward()
    drained = apart.drain(torch.zeros(SIZE, dtype=torch.uint8), [apart.gate])
    apart.run_forward().wait()
    assert not drained[-1].done()
    assert torch.equal(apart.fetch(apart.output), expected_output(1.0))


def test_a_writer_waits_for_whoever_holds_the_gradients_in_place(bench: Bench) -> None:
    bench.load(content_of("layer", 1.0))
    bench.run_backward().wait()
    bench.slot.hold_gradients([bench.gate])
    second = bench.run_backward()
    bench.device.queue("fetch").fill(bench.output, 0.0).wait()
    assert not second.done()
    bench.open_gate()
    second.wait()


def test_a_drain_waits_for_the_kernels_before_it_even_when_a_load_came_between(apart: Bench) -> None:
    found = torch.zeros(SIZE, dtype=torch.uint8)
    apart.load(content_of("one", 1.0))
    apart.run_backward([apart.gate])
    apart.load(content_of("other", 2.0))
    drained = apart.drain(found)
    assert not drained[-1].done()
    apart.open_gate()
    drained[-1].wait()
    assert same_gradients(found, 1.0)


def test_an_error_stops_what_follows_in_the_slot_until_it_is_settled(apart: Bench) -> None:
    host = Host()

    def fail() -> None:
        raise OSError("the disk is gone")

    apart.load(content_of("layer", 1.0), wait=[host.run(fail)])
    ran = apart.run_forward()
    with pytest.raises(HalError, match="the disk is gone"):
        ran.wait()
    assert torch.equal(apart.fetch(apart.output), torch.zeros(4, 2))
    apart.slot.settle()
    apart.load(content_of("layer", 6.0))
    apart.run_forward().wait()
    assert torch.equal(apart.fetch(apart.output), expected_output(6.0))
    host.close()


# **** hazards, all of them ****


class WatchedQueue(WrappedQueue):
    """A queue that remembers what each of its calls comes after."""

    def __init__(self, queue: Queue, before: dict[Event, list[Event]]) -> None:
        super().__init__(queue)
        self._before = before
        self._last: list[Event] = []

    def submitted(
        self, label: str, outputs: Sequence[View], wait: Sequence[Event], call: Callable[[Sequence[Event]], Event]
    ) -> Event:
        event = call(wait)
        self._before[event] = [*wait, *self._last]
        self._last = [event]
        return event


class WatchedDevice(WrappedDevice):
    """A device whose queues are watched."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.before: dict[Event, list[Event]] = {}

    def wrapped(self, queue: Queue) -> Queue:
        return WatchedQueue(queue, self.before)

    def comes_after(self, event: Event, earlier: Event) -> bool:
        seen: set[Event] = set()
        stack = [event]
        while stack:
            for event in self.before.get(stack.pop(), ()):
                if event is earlier:
                    return True
                if event not in seen:
                    seen.add(event)
                    stack.append(event)
        return False


moves = st.lists(
    st.tuples(st.sampled_from(["load", "forward", "backward", "drain", "send"]), st.integers(0, 1)), max_size=14
)


@settings(max_examples=60, deadline=None)
@given(moves=moves)
def test_whatever_a_schedule_does_calls_that_share_memory_are_in_order(moves: list[tuple[str, int]]) -> None:
    bench = Bench("cpu:discrete")
    device = bench.device = WatchedDevice(bench.device)  # type: ignore[assignment]
    slot = bench.slot
    accesses: list[tuple[str, Event, str, bool]] = []  # what, its event, the memory, whether it writes
    version = 0
    for what, choice in [("load", 0), *moves]:
        if what == "load":
            version += 1
            events = bench.load(content_of("layer", float(version)), version, queue=f"load {choice}")
            accesses += [(what, event, "parameters", True) for event in events]
        elif what == "drain":
            events = bench.drain(torch.empty(SIZE, dtype=torch.uint8), queue=f"drain {choice}")
            accesses += [(what, event, "gradients", False) for event in events]
        elif what == "send":
            events = slot.send(device.queue(f"drain {choice}"), [(torch.empty(2, FEATURES), slot.parameters[0])])
            accesses += [(what, event, "parameters", False) for event in events]
        else:
            event = bench.run_backward() if what == "backward" else bench.run_forward()
            accesses.append((what, event, "parameters", False))
            if what == "backward":
                accesses.append((what, event, "gradients", True))
    for position, (later, event, memory, writes) in enumerate(accesses):
        for earlier, other, touched, wrote in accesses[:position]:
            if memory == touched and (writes or wrote) and event is not other:
                assert device.comes_after(event, other), f"a {later} does not wait for the {earlier} before it"
    bench.close()
