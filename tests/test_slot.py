"""The device slot: its layout, its states, and every hazard of its own memory, whatever a schedule does.

Orders are checked twice: by results, with calls held back at a gate, and by asking of every pair of calls that
touch the same memory whether the waits they were given, and the queues they are on, put them in order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hal.device import Buffer, Device, Queue, View
from hal.errors import HalError, OutOfMemory
from hal.event import Event
from hal.host import Host
from hal.kernel import Kernel
from hal.memory import MemoryUse
from hal.random import RandomKey
from hal.registry import open as open_device
from hal.slot import ALIGNMENT, DeviceSlot, SlotContent, SlotState, lay_out
from relay.capture import capture

PATIENCE = 60  # seconds until a test that hangs is a failure
FEATURES = 3


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 2)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.inner(inputs),)


CAPTURED = capture(Linear(), [torch.zeros(4, FEATURES)], "linear")
SHAPES = [((2, FEATURES), torch.float32), ((2,), torch.float32)]


def content_of(name: str, value: float) -> SlotContent:
    """A segment whose parameters all have that value."""
    fields, size = lay_out(SHAPES)
    flat = torch.zeros(size, dtype=torch.uint8)
    tensors = []
    for place in fields:
        nbytes = torch.Size(place.shape).numel() * place.dtype.itemsize
        tensors.append(flat[place.offset : place.offset + nbytes].view(place.dtype).view(place.shape).fill_(value))
    return SlotContent(name, fields, size, ((0, flat),), tuple(tensors), fields, size)


SIZE = lay_out(SHAPES)[1]


class Bench:
    """A device, a slot on it, a gate, and what a kernel of the slot needs."""

    def __init__(self, name: str) -> None:
        self.device = open_device(name)
        self.slot = DeviceSlot(self.device, 0, SIZE, SIZE)
        self.forward = self.device.compile(CAPTURED.forward)
        assert CAPTURED.backward is not None
        self.backward = self.device.compile(CAPTURED.backward)
        self.inputs = self._hold(torch.ones(4, FEATURES))
        self.seed = self._hold(torch.ones(4, 2))
        self.output = self._hold(torch.zeros(4, 2))
        self._host = Host()
        self._signal = threading.Event()
        self.gate = self._host.run(lambda: self._signal.wait(PATIENCE) and None)

    def _hold(self, tensor: torch.Tensor) -> View:
        view = self.device.alloc(tensor.nbytes).view(0, tensor.shape, tensor.dtype)
        self.device.queue("load").write(view, tensor).wait()
        return view

    def open_gate(self) -> None:
        self._signal.set()

    def load(self, content: SlotContent, version: int = 0, wait: Sequence[Event] = (), queue: str = "load") -> list:
        return self.slot.load(content, version, self.device.queue(queue), wait)

    def run_forward(self, wait: Sequence[Event] = ()) -> Event:
        return self.slot.run(
            self.device.queue("compute"),
            self.forward,
            [*self.slot.parameters, self.inputs],
            [self.output],
            (),
            None,
            wait,
            False,
        )

    def run_backward(self, wait: Sequence[Event] = (), seed: View | None = None) -> Event:
        return self.slot.run(
            self.device.queue("compute"),
            self.backward,
            [*self.slot.parameters, self.inputs, seed or self.seed],
            self.slot.gradients,
            (),
            None,
            wait,
            True,
        )

    def drain(self, target: torch.Tensor, wait: Sequence[Event] = (), queue: str = "drain") -> list[Event]:
        assert self.slot.content is not None
        pieces = [(0, target[: self.slot.content.gradient_size])]
        return self.slot.drain(self.device.queue(queue), self.slot.flat_gradients(pieces), wait)

    def fetch(self, view: View) -> torch.Tensor:
        back = torch.empty(view.shape, dtype=view.dtype)
        self.device.queue("fetch").read(back, view).wait()
        return back

    def close(self) -> None:
        self.open_gate()
        self._host.close()
        self.device.close()


@pytest.fixture(params=["cpu", "cpu:discrete"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(request.param)
    yield made
    made.close()


@pytest.fixture
def discrete() -> Iterator[Bench]:
    made = Bench("cpu:discrete")
    yield made
    made.close()


def expected_output(value: float) -> torch.Tensor:
    return nn.functional.linear(torch.ones(4, FEATURES), torch.full((2, FEATURES), value), torch.full((2,), value))


def gradient_bytes(seed: float) -> torch.Tensor:
    """The flat gradients of the bench's layer for a constant seed, from autograd."""
    fields, size = lay_out(SHAPES)
    weight, bias = (torch.zeros(shape, requires_grad=True) for shape, _ in SHAPES)
    nn.functional.linear(torch.ones(4, FEATURES), weight, bias).backward(torch.full((4, 2), seed))
    flat = torch.zeros(size, dtype=torch.uint8)
    for place, gradient in zip(fields, (weight.grad, bias.grad), strict=True):
        raw = gradient.contiguous().view(-1).view(torch.uint8)
        flat[place.offset : place.offset + raw.numel()] = raw
    return flat


def same_gradients(found: torch.Tensor, seed: float) -> bool:
    fields, _ = lay_out(SHAPES)
    expected = gradient_bytes(seed)
    return all(
        torch.equal(found[place.offset :][:size], expected[place.offset :][:size])
        for place, size in zip(fields, (24, 8), strict=True)
    )


# -- layout ---------------------------------------------------------------------------------------------------

tensors = st.lists(
    st.tuples(
        st.lists(st.integers(0, 7), max_size=3).map(tuple),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]),
    ),
    max_size=10,
)


@given(wanted=tensors)
def test_tensors_are_laid_out_aligned_in_order_without_overlap_or_waste(wanted: list) -> None:
    fields, total = lay_out(wanted)
    assert [(place.shape, place.dtype) for place in fields] == wanted
    end = 0
    for place in fields:
        assert place.offset % ALIGNMENT == 0
        assert 0 <= place.offset - end < ALIGNMENT
        end = place.offset + torch.empty(place.shape, dtype=place.dtype).nbytes
    assert 0 <= total - end < ALIGNMENT
    assert total % ALIGNMENT == 0


def test_the_views_of_a_slot_are_aligned_and_do_not_move(bench: Bench) -> None:
    one, other = content_of("one", 1.0), content_of("other", 2.0)
    bench.load(one)
    parameters, gradients = list(bench.slot.parameters), list(bench.slot.gradients)
    bench.load(other)
    bench.load(one, 1)
    assert bench.slot.parameters == parameters
    assert bench.slot.gradients == gradients
    assert [view.shape for view in parameters] == [shape for shape, _ in SHAPES]
    if bench.device.info.unified:
        for view in gradients:
            assert bench.device.host_tensor(view).data_ptr() % ALIGNMENT == 0


# -- what it holds --------------------------------------------------------------------------------------------


def test_a_kernel_computes_with_what_was_loaded(bench: Bench) -> None:
    for value in (1.5, -2.0):
        bench.load(content_of("layer", value))
        bench.run_forward().wait()
        assert torch.equal(bench.fetch(bench.output), expected_output(value))


def test_the_same_content_and_version_is_not_sent_again(discrete: Bench) -> None:
    content = content_of("layer", 1.0)
    first = discrete.load(content, 3)
    first[-1].wait()
    content.tensors[0].fill_(9.0)
    assert discrete.load(content, 3) == first
    discrete.run_forward().wait()
    assert torch.equal(discrete.fetch(discrete.output), expected_output(1.0))


def test_another_version_is_sent_again(discrete: Bench) -> None:
    content = content_of("layer", 1.0)
    discrete.load(content, 3)[-1].wait()
    for tensor in content.tensors:
        tensor.fill_(9.0)
    discrete.load(content, 4)
    discrete.run_forward().wait()
    assert torch.equal(discrete.fetch(discrete.output), expected_output(9.0))


def test_equal_but_other_content_is_sent(discrete: Bench) -> None:
    discrete.load(content_of("layer", 1.0), 3)
    discrete.load(content_of("layer", 2.0), 3)
    discrete.run_forward().wait()
    assert torch.equal(discrete.fetch(discrete.output), expected_output(2.0))


def test_on_a_unified_device_nothing_moves(bench: Bench) -> None:
    content = content_of("layer", 1.0)
    bench.load(content)[-1].wait()
    for tensor in content.tensors:
        tensor.fill_(5.0)
    bench.run_forward().wait()
    moved = 5.0 if bench.device.info.unified else 1.0
    assert torch.equal(bench.fetch(bench.output), expected_output(moved))


def test_gradients_are_drained_as_autograd_has_them(bench: Bench) -> None:
    bench.load(content_of("layer", 1.0))
    bench.run_backward()
    found = torch.empty(SIZE, dtype=torch.uint8)
    bench.drain(found)[-1].wait()
    assert same_gradients(found, 1.0)


def test_parameters_can_be_sent_home(discrete: Bench) -> None:
    discrete.load(content_of("layer", 4.0), wait=[discrete.gate])
    weight = torch.zeros(2, FEATURES)
    sent = discrete.slot.send(discrete.device.queue("drain"), [(weight, discrete.slot.parameters[0])])
    assert not sent[-1].done()
    discrete.open_gate()
    sent[-1].wait()
    assert torch.equal(weight, torch.full((2, FEATURES), 4.0))


# -- states and memory ----------------------------------------------------------------------------------------


def test_a_slot_goes_round_its_life(bench: Bench) -> None:
    slot = bench.slot
    assert (slot.state, slot.content) == (SlotState.EMPTY, None)
    content = content_of("layer", 1.0)
    bench.load(content, 7)
    assert (slot.state, slot.content, slot.version) == (SlotState.READY, content, 7)
    bench.run_forward()
    assert slot.state is SlotState.COMPUTING
    bench.run_backward()
    assert slot.state is SlotState.COMPUTING
    drained = bench.drain(torch.empty(SIZE, dtype=torch.uint8))
    assert slot.state is SlotState.DRAINING
    slot.hold_gradients(drained)
    assert slot.state is SlotState.DRAINING
    bench.load(content, 8)
    assert slot.state is SlotState.READY
    bench.device.close()
    slot.free()
    assert (slot.state, slot.content) == (SlotState.EMPTY, None)


def test_a_slot_is_accounted_for_parameters_and_gradients_and_gives_them_back(bench: Bench) -> None:
    before = bench.device.memory().in_use
    slot = DeviceSlot(bench.device, 1, 1000, 300)
    assert bench.device.memory().in_use - before == 1300
    slot.free()
    slot.free()
    assert bench.device.memory().in_use == before


def test_a_slot_that_does_not_fit_says_which_part_and_leaves_nothing_behind() -> None:
    device = open_device("cpu:discrete", capacity=1500)
    with pytest.raises(OutOfMemory, match="gradients of slot 3") as caught:
        DeviceSlot(device, 3, 1000, 600)
    assert (caught.value.requested, caught.value.in_use) == (600, 1000)
    assert device.memory().in_use == 0
    with pytest.raises(OutOfMemory, match="parameters of slot 3"):
        DeviceSlot(device, 3, 2000, 600)
    assert device.memory().in_use == 0
    device.close()


def test_a_content_too_large_for_the_slot_is_a_value_error(discrete: Bench) -> None:
    small = DeviceSlot(discrete.device, 1, SIZE - ALIGNMENT, SIZE)
    with pytest.raises(ValueError, match="does not lie"):
        small.load(content_of("layer", 1.0), 0, discrete.device.queue("load"))
    assert small.content is None


# -- hazards, by results --------------------------------------------------------------------------------------


def test_a_kernel_waits_for_the_load(discrete: Bench) -> None:
    discrete.load(content_of("layer", 3.0), wait=[discrete.gate])
    ran = discrete.run_forward()
    assert not ran.done()
    discrete.open_gate()
    ran.wait()
    assert torch.equal(discrete.fetch(discrete.output), expected_output(3.0))


def test_a_load_waits_for_the_kernels_that_read_what_it_overwrites(discrete: Bench) -> None:
    discrete.load(content_of("one", 1.0))
    ran = discrete.run_forward([discrete.gate])
    loaded = discrete.load(content_of("other", 2.0))
    discrete.device.queue("fetch").fill(discrete.output, 0.0).wait()  # other queues are free to run meanwhile
    assert not loaded[-1].done()
    discrete.open_gate()
    loaded[-1].wait()
    assert ran.done()
    assert torch.equal(discrete.fetch(discrete.output), expected_output(1.0))
    discrete.run_forward().wait()
    assert torch.equal(discrete.fetch(discrete.output), expected_output(2.0))


def test_a_load_waits_for_those_kernels_even_when_a_content_without_parameters_came_between(discrete: Bench) -> None:
    discrete.load(content_of("old", 1.0))
    discrete.run_forward([discrete.gate])
    discrete.load(SlotContent("nothing", (), 0, (), (), (), 0))
    loaded = discrete.load(content_of("new", 5.0))
    discrete.device.queue("fetch").fill(discrete.output, 0.0).wait()  # other queues are free to run meanwhile
    assert not loaded[-1].done()
    discrete.open_gate()
    loaded[-1].wait()
    assert torch.equal(discrete.fetch(discrete.output), expected_output(1.0))


def test_a_writer_of_gradients_waits_for_the_drain_of_those_before(discrete: Bench) -> None:
    other_seed = discrete._hold(torch.full((4, 2), 2.0))
    found = torch.zeros(SIZE, dtype=torch.uint8)
    discrete.load(content_of("layer", 1.0))
    discrete.run_backward()
    drained = discrete.drain(found, [discrete.gate])
    second = discrete.run_backward(seed=other_seed)
    assert not second.done()
    discrete.open_gate()
    second.wait()
    assert drained[-1].done()
    assert same_gradients(found, 1.0)
    discrete.drain(found)[-1].wait()
    assert same_gradients(found, 2.0)


def test_a_kernel_that_writes_no_gradients_does_not_wait_for_a_drain(discrete: Bench) -> None:
    discrete.load(content_of("layer", 1.0))
    discrete.run_backward()
    drained = discrete.drain(torch.zeros(SIZE, dtype=torch.uint8), [discrete.gate])
    discrete.run_forward().wait()
    assert not drained[-1].done()
    assert torch.equal(discrete.fetch(discrete.output), expected_output(1.0))


def test_a_writer_waits_for_whoever_holds_the_gradients_in_place(bench: Bench) -> None:
    bench.load(content_of("layer", 1.0))
    bench.run_backward().wait()
    bench.slot.hold_gradients([bench.gate])
    second = bench.run_backward()
    bench.device.queue("fetch").fill(bench.output, 0.0).wait()
    assert not second.done()
    bench.open_gate()
    second.wait()


def test_a_drain_waits_for_the_kernels_before_it_even_when_a_load_came_between(discrete: Bench) -> None:
    found = torch.zeros(SIZE, dtype=torch.uint8)
    discrete.load(content_of("one", 1.0))
    discrete.run_backward([discrete.gate])
    discrete.load(content_of("other", 2.0))
    drained = discrete.drain(found)
    assert not drained[-1].done()
    discrete.open_gate()
    drained[-1].wait()
    assert same_gradients(found, 1.0)


def test_an_error_stops_what_follows_in_the_slot_until_it_is_settled(discrete: Bench) -> None:
    host = Host()

    def fail() -> None:
        raise OSError("the disk is gone")

    discrete.load(content_of("layer", 1.0), wait=[host.run(fail)])
    ran = discrete.run_forward()
    with pytest.raises(HalError, match="the disk is gone"):
        ran.wait()
    assert torch.equal(discrete.fetch(discrete.output), torch.zeros(4, 2))
    discrete.slot.settle()
    discrete.load(content_of("layer", 6.0))
    discrete.run_forward().wait()
    assert torch.equal(discrete.fetch(discrete.output), expected_output(6.0))
    host.close()


# -- hazards, all of them -------------------------------------------------------------------------------------


class WatchedQueue(Queue):
    """A queue that remembers what each of its calls comes after."""

    def __init__(self, queue: Queue, before: dict[Event, list[Event]]) -> None:
        self.name = queue.name
        self._queue = queue
        self._before = before
        self._last: list[Event] = []

    def _watched(self, event: Event, wait: Sequence[Event]) -> Event:
        self._before[event] = [*wait, *self._last]
        self._last = [event]
        return event

    def write(self, target: View, source: torch.Tensor, wait: Sequence[Event] = ()) -> Event:
        return self._watched(self._queue.write(target, source, wait), wait)

    def read(self, target: torch.Tensor, source: View, wait: Sequence[Event] = ()) -> Event:
        return self._watched(self._queue.read(target, source, wait), wait)

    def copy(self, target: View, source: View, wait: Sequence[Event] = ()) -> Event:
        return self._watched(self._queue.copy(target, source, wait), wait)

    def fill(self, target: View, value: float, wait: Sequence[Event] = ()) -> Event:
        return self._watched(self._queue.fill(target, value, wait), wait)

    def run(
        self,
        kernel: Kernel,
        inputs: Sequence[View],
        outputs: Sequence[View],
        accumulate: tuple[bool, ...] = (),
        key: RandomKey | None = None,
        wait: Sequence[Event] = (),
    ) -> Event:
        return self._watched(self._queue.run(kernel, inputs, outputs, accumulate, key, wait), wait)


class WatchedDevice(Device):
    """A device whose queues are watched."""

    def __init__(self, device: Device) -> None:
        self.info = device.info
        self._device = device
        self._queues: dict[str, WatchedQueue] = {}
        self.before: dict[Event, list[Event]] = {}

    def queue(self, name: str) -> Queue:
        if name not in self._queues:
            self._queues[name] = WatchedQueue(self._device.queue(name), self.before)
        return self._queues[name]

    def comes_after(self, event: Event, earlier: Event) -> bool:
        seen: set[Event] = set()
        stack = [event]
        while stack:
            for one in self.before.get(stack.pop(), ()):
                if one is earlier:
                    return True
                if one not in seen:
                    seen.add(one)
                    stack.append(one)
        return False

    def alloc(self, size: int, what: str = "buffer") -> Buffer:
        return self._device.alloc(size, what)

    def compile(self, program: object) -> Kernel:
        return self._device.compile(program)  # type: ignore[arg-type]

    def host(self, capacity: int | None = None) -> Host:
        return self._device.host(capacity)

    def memory(self) -> MemoryUse:
        return self._device.memory()

    def reset_peak(self) -> None:
        self._device.reset_peak()

    def adopt(self, tensor: torch.Tensor) -> View:
        return self._device.adopt(tensor)

    def host_tensor(self, view: View) -> torch.Tensor:
        return self._device.host_tensor(view)

    def close(self) -> None:
        self._device.close()


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
