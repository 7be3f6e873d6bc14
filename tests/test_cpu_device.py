"""The CPU devices against torch and numpy: bytes, order, errors, accounts, and programs bit for bit."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from backends.cpu import CpuBackend
from hal.device import Device, Queue, View
from hal.errors import HalError, OutOfMemory, Unavailable, Unsupported
from hal.event import Event
from hal.host import Host
from hal.kernel import Program, Role
from hal.random import RandomKey
from hal.registry import open as open_device
from relay.capture import Captured, capture

NAMES = ["cpu", "cpu:discrete"]
GUARD = 256  # bytes
PATIENCE = 60  # seconds until a test that hangs is a failure
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool]

both = pytest.mark.parametrize("name", NAMES)


@contextmanager
def opened(name: str, capacity: int | None = None) -> Iterator[Device]:
    device = open_device(name, capacity)
    try:
        yield device
    finally:
        device.close()


@pytest.fixture(params=NAMES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with opened(request.param) as made:
        yield made


@pytest.fixture
def unified() -> Iterator[Device]:
    with opened("cpu") as made:
        yield made


@pytest.fixture
def discrete() -> Iterator[Device]:
    with opened("cpu:discrete") as made:
        yield made


class Gate:
    """An event of a host task that ends when `open` is called, and of one that has failed."""

    def __init__(self) -> None:
        self._hosts = [Host(), Host()]
        self._signal = threading.Event()
        self.event = self._hosts[0].run(lambda: self._signal.wait(PATIENCE) and None, label="gate")

    def open(self) -> None:
        self._signal.set()

    def failing(self, error: Exception, wait: Sequence[Event] = ()) -> Event:
        def fail() -> None:
            raise error

        return self._hosts[1].run(fail, wait)

    def close(self) -> None:
        self.open()
        for host in self._hosts:
            host.close()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.close()


def place(device: Device, tensor: torch.Tensor) -> View:
    """A view in a new buffer that holds this tensor."""
    view = device.alloc(max(tensor.nbytes, 1)).view(0, tensor.shape, tensor.dtype)
    device.queue("load").write(view, tensor.detach().contiguous()).wait()
    return view


def fetch(device: Device, view: View) -> torch.Tensor:
    tensor = torch.empty(view.shape, dtype=view.dtype)
    device.queue("fetch").read(tensor, view).wait()
    return tensor


def some_data(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits of that dtype."""
    numbers = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    if dtype is torch.bool:
        numbers &= 1
    return torch.frombuffer(numbers.copy(), dtype=dtype) if count else torch.empty(0, dtype=dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
    )


# -- bytes ----------------------------------------------------------------------------------------------------


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
            one, other = (0, 1) if first else (1, 0)
            target = buffers[one].view(at, (count,), dtype)
            into = arrays[one][at : at + size]
            if kind == "write":
                data = some_data(count, dtype, seed=value)
                queue.write(target, data)
                into[:] = data.view(torch.uint8).numpy()
            elif kind == "fill":
                queue.fill(target, value)
                into.view(str(dtype).removeprefix("torch."))[:] = value
            else:
                queue.copy(target, buffers[other].view(source * 8, (count,), dtype))
                into[:] = arrays[other][source * 8 : source * 8 + size]
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
    view = place(device, torch.ones(12))
    with pytest.raises(ValueError, match=f"{call} needs two sides alike"):
        CALLS[call](device.queue("any"), view, tensor)
    assert torch.equal(fetch(device, view), torch.ones(12))


@pytest.mark.parametrize("call", CALLS)
def test_transfers_of_memory_that_is_not_contiguous_are_value_errors(device: Device, call: str) -> None:
    view = place(device, torch.ones(12))
    with pytest.raises(ValueError, match="contiguous"):
        CALLS[call](device.queue("any"), view, torch.zeros(4, 3).t())


def test_copies_between_unlike_views_are_value_errors(device: Device) -> None:
    queue = device.queue("any")
    view = place(device, torch.ones(12))
    for other in (torch.zeros(11), torch.zeros(12, dtype=torch.int32)):
        with pytest.raises(ValueError, match="copy needs two sides alike"):
            queue.copy(view, place(device, other))


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
    view = place(discrete, source)
    source.fill_(-1)
    assert torch.equal(fetch(discrete, view), torch.arange(5.0))


# -- order ----------------------------------------------------------------------------------------------------


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
    view = place(device, torch.zeros(3))
    back = torch.full((3,), -1.0)
    written = device.queue("load").write(view, torch.ones(3), [gate.event])
    read = device.queue("drain").read(back, view, [written])
    assert not read.done()
    gate.open()
    read.wait()
    assert written.done()
    assert torch.equal(back, torch.ones(3))


def test_queues_run_side_by_side(device: Device, gate: Gate) -> None:
    view, other = place(device, torch.zeros(3)), place(device, torch.zeros(3))
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
    view = place(device, torch.zeros(3))
    first = device.queue("load").fill(view, 1.0)
    second = device.queue("drain").fill(view, 2.0, [first])
    second.wait()
    assert first.span()[0] <= first.span()[1] <= second.span()[0] <= second.span()[1]


# -- programs -------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.mixed = nn.Linear(12, 36)
        self.out = nn.Linear(12, 12)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor]:
        q, k, v = self.mixed(self.norm(inputs)).view(*inputs.shape[:2], 3, 3, 4).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (inputs + self.out(functional.gelu(heads.transpose(1, 2).reshape(inputs.shape))),)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.relu(self.norm(self.convolution(inputs))),)


class SeveralOutputs(nn.Module):
    """Among them the same value twice and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = one @ self.weight
        return product, product, torch.relu(product), (product * other).sum()


class AliasingOutputs(nn.Module):
    """Among them an input, a view of one, and two views of one value."""

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = one + other
        return total, one, other.view(-1), total.t(), total[1:]


class Reductions(nn.Module):
    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs.mean(), inputs.amax(0), inputs.norm(), inputs.var(1), inputs.logsumexp(1), inputs.cumsum(0)


class Shifting(nn.Module):
    """Buffers of which one takes the other's old value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("now", torch.tensor([1.0, 2.0]))
        self.register_buffer("past", torch.tensor([3.0, 4.0]))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor]:
        self.past.copy_(self.now)
        self.now.add_(inputs.detach())
        return (inputs * self.now + self.past,)


class Tuple(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.inner(*inputs),)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


MODULES: dict[str, tuple[Callable[[], nn.Module], list[torch.Tensor]]] = {
    "linear": (lambda: Tuple(nn.Linear(5, 3)), [numbers(7, 5)]),
    "bfloat16": (lambda: Tuple(nn.Linear(5, 3)).bfloat16(), [numbers(7, 5).bfloat16()]),
    "mlp": (lambda: Tuple(nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 1))), [numbers(2, 3, 9)]),
    "attention": (Attention, [numbers(2, 5, 12)]),
    "embedding": (lambda: Tuple(nn.Embedding(11, 6)), [torch.tensor([[1, 10, 0], [3, 3, 3]])]),
    "convolution": (Convolution, [numbers(3, 2, 5, 4)]),
    "several outputs": (SeveralOutputs, [numbers(4, 4), numbers(4, 4) + 1]),
    "aliasing outputs": (AliasingOutputs, [numbers(4, 4), numbers(4, 4) + 1]),
    "shifting": (Shifting, [numbers(2)]),
    "cross entropy": (lambda: Tuple(nn.CrossEntropyLoss()), [numbers(6, 4), torch.tensor([0, 1, 2, 3, 3, 3])]),
    "squared error": (lambda: Tuple(nn.MSELoss()), [numbers(6, 40), numbers(6, 40) + 1]),
    "huber": (lambda: Tuple(nn.HuberLoss()), [numbers(6, 40), numbers(6, 40) + 1]),
    "binary": (lambda: Tuple(nn.BCELoss()), [numbers(6, 40).sigmoid(), numbers(6, 40).sigmoid()]),
    "reductions": (Reductions, [numbers(6, 40)]),
}


def module_and_inputs(which: str) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    make, inputs = MODULES[which]
    return make(), [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]


@functools.cache
def captured_from(which: str, keep: bool = False) -> Captured:
    """Programs are the same for every device, so they are captured once."""
    return capture(*module_and_inputs(which), which, keep=keep, strides=False)


def run_program(
    device: Device,
    program: Program,
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    seeds: Sequence[torch.Tensor] = (),
    key: RandomKey | None = None,
) -> dict[tuple[Role, int], torch.Tensor]:
    """Run it with a module's parameters and buffers, and fetch all outputs by role and index."""
    given = {
        Role.PARAMETER: list(module.parameters()),
        Role.BUFFER: list(module.buffers()),
        Role.VALUE: list(inputs),
        Role.SEED: list(seeds),
    }
    views = {(port.role, port.index): place(device, given[port.role][port.index]) for port in program.inputs}
    results, guards = {}, []
    for port in program.outputs:
        if port.role is Role.BUFFER_UPDATE:  # in place, as the contract of programs allows
            results[port.role, port.index] = views[Role.BUFFER, port.index]
        else:
            # Garbage within, and as much on both sides, which must stay.
            room = device.alloc(port.size + 2 * GUARD)
            device.queue("load").fill(room.view(0, (room.size,), torch.uint8), 77).wait()
            results[port.role, port.index] = room.view(GUARD, port.shape, port.dtype)
            guards += [room.view(0, (GUARD,), torch.uint8), room.view(GUARD + port.size, (GUARD,), torch.uint8)]
    kernel = device.compile(program)
    device.queue("compute").run(kernel, list(views.values()), list(results.values()), key=key).wait()
    for guard in guards:
        assert (fetch(device, guard) == 77).all(), f"{program.name} writes beside its outputs"
    return {at: fetch(device, view) for at, view in results.items()}


@pytest.mark.parametrize("which", MODULES)
def test_a_captured_forward_gives_the_bits_of_eager_torch(device: Device, which: str) -> None:
    module, inputs = module_and_inputs(which)
    found = run_program(device, captured_from(which).forward, module, inputs)
    expected = module(*inputs)
    for index, value in enumerate(expected):
        assert same_bits(found[Role.VALUE, index], value.detach()), f"output {index}"
    for index, (name, buffer) in enumerate(module.named_buffers()):
        if (Role.BUFFER_UPDATE, index) in found:
            assert same_bits(found[Role.BUFFER_UPDATE, index], buffer), name


@pytest.mark.parametrize("keep", [False, True], ids=["recomputing", "keeping"])
@pytest.mark.parametrize("which", [which for which in MODULES if which != "aliasing outputs"])
def test_a_captured_backward_gives_the_bits_of_eager_autograd(device: Device, which: str, keep: bool) -> None:
    module, inputs = module_and_inputs(which)
    captured = captured_from(which, keep)
    program = captured.backward
    assert program is not None
    forward = run_program(device, captured.forward, module_and_inputs(which)[0], inputs)
    kept = [forward[Role.VALUE, port.index] for port in captured.kept]
    seeds = [numbers(*value.shape).to(value.dtype) for value in module_and_inputs(which)[0](*inputs)]
    found = run_program(device, program, module, [*inputs, *kept], seeds)
    module, inputs = module_and_inputs(which)
    differentiable = [(value, seed) for value, seed in zip(module(*inputs), seeds, strict=True) if value.requires_grad]
    torch.autograd.backward([value for value, _ in differentiable], [seed for _, seed in differentiable])
    for index, parameter in enumerate(module.parameters()):
        assert same_bits(found[Role.PARAMETER_GRADIENT, index], parameter.grad), f"parameter {index}"
    for index, tensor in enumerate(inputs):
        if tensor.requires_grad:
            assert same_bits(found[Role.VALUE_GRADIENT, index], tensor.grad), f"input {index}"


def linear_backward(device: Device) -> tuple[Program, list[View], list[torch.Tensor]]:
    """A program with two gradients, its inputs on the device, and the gradients as torch has them."""
    module, inputs = module_and_inputs("linear")
    inputs[0].requires_grad_(False)
    program = capture(module, inputs, "linear").backward
    assert program is not None
    seed = numbers(7, 3)
    given = [*module.parameters(), *inputs, seed]
    module(*inputs)[0].backward(seed)
    return program, [place(device, tensor) for tensor in given], [one.grad for one in module.parameters()]


def test_accumulating_adds_to_what_is_there_and_replacing_does_not(device: Device) -> None:
    program, inputs, gradients = linear_backward(device)
    assert all(port.accumulates for port in program.outputs)
    for pattern in [(True, True), (True, False), (False, True), (False, False), ()]:
        held = [numbers(3, 5) + 2, numbers(3)]
        outputs = [place(device, tensor) for tensor in held]
        device.queue("compute").run(device.compile(program), inputs, outputs, pattern).wait()
        for position, (before, gradient) in enumerate(zip(held, gradients, strict=True)):
            expected = before + gradient if pattern and pattern[position] else gradient
            assert same_bits(fetch(device, outputs[position]), expected), f"output {position} under {pattern}"


def test_wrong_counts_of_inputs_outputs_or_accumulations_are_value_errors(device: Device) -> None:
    program, inputs, gradients = linear_backward(device)
    outputs = [place(device, gradient) for gradient in gradients]
    kernel, queue = device.compile(program), device.queue("compute")
    for wrong in (inputs[:-1], [*inputs, inputs[0]], []):
        with pytest.raises(ValueError, match=f"takes 4 inputs and 2 outputs, got {len(wrong)} and 2"):
            queue.run(kernel, wrong, outputs)
    for wrong in (outputs[:1], [*outputs, outputs[0]], []):
        with pytest.raises(ValueError, match=f"takes 4 inputs and 2 outputs, got 4 and {len(wrong)}"):
            queue.run(kernel, inputs, wrong)
    for pattern in ((True,), (True, True, True)):
        with pytest.raises(ValueError, match="accumulate"):
            queue.run(kernel, inputs, outputs, pattern)


def test_a_program_that_draws_needs_a_key(device: Device) -> None:
    module, inputs = Tuple(nn.Dropout(0.5)), [numbers(50)]
    program = capture(module, inputs, "dropout").forward
    assert program.draws
    with pytest.raises(ValueError, match="without a key"):
        run_program(device, program, module, inputs)


def test_one_key_draws_the_same_numbers_on_every_device_and_another_key_others() -> None:
    module, inputs = Tuple(nn.Dropout(0.25)), [numbers(1000)]
    program = capture(module, inputs, "dropout").forward
    results = {}
    for name in NAMES:
        with opened(name) as device:
            for step in (1, 2):
                key = RandomKey(5, step, 0, 0)
                results[name, step] = run_program(device, program, module, inputs, key=key)[Role.VALUE, 0]
    assert same_bits(results["cpu", 1], results["cpu:discrete", 1])
    assert same_bits(results["cpu", 2], results["cpu:discrete", 2])
    assert not torch.equal(results["cpu", 1], results["cpu", 2])
    kept = results["cpu", 1] != 0
    assert torch.equal(results["cpu", 1], torch.where(kept, inputs[0] * (1 / 0.75), 0.0))


def test_the_same_fingerprint_gives_the_same_kernel(device: Device) -> None:
    module, inputs = module_and_inputs("attention")
    other = Attention()
    first, second = capture(module, inputs, "layer 0").forward, capture(other, inputs, "layer 1").forward
    assert first is not second
    assert first.fingerprint == second.fingerprint
    assert device.compile(first) is device.compile(second) is device.compile(first)
    backward = capture(module, inputs, "layer 0").backward
    assert backward is not None
    assert device.compile(backward) is not device.compile(first)


def test_the_same_kernel_serves_every_layer_built_alike(device: Device) -> None:
    first, inputs = module_and_inputs("attention")
    program = capture(first, inputs, "layer").forward
    for module in (first, Attention(), Attention()):
        found = run_program(device, program, module, inputs)[Role.VALUE, 0]
        assert same_bits(found, module(*inputs)[0].detach())


# -- errors ---------------------------------------------------------------------------------------------------


def failing_lookup(device: Device, wait: Sequence[Event] = ()) -> Event:
    """A kernel that fails within torch: it looks up a row that is not there."""
    module = Tuple(nn.Embedding(4, 2))
    program = capture(module, [torch.tensor([0, 1])], "lookup").forward
    inputs = [place(device, module.inner.weight), place(device, torch.tensor([1, 4]))]
    output = place(device, torch.zeros(2, 2))
    return device.queue("compute").run(device.compile(program), inputs, [output], wait=wait)


def error_of(event: Event) -> BaseException:
    with pytest.raises(HalError) as caught:
        event.wait()
    return caught.value


def test_a_native_error_travels_chained_to_everything_that_waits(device: Device) -> None:
    view, back = place(device, torch.zeros(3)), torch.full((3,), -1.0)
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
    view, back = place(device, torch.zeros(3)), torch.full((3,), -1.0)
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
    first = gate.failing(KeyError("first"), [gate.event])
    second = gate.failing(KeyError("second"), [gate.event])
    view = place(device, torch.zeros(3))
    both_failed = device.queue("any").fill(view, 1.0, [first, second])
    later = failing_lookup(device, [both_failed])  # would fail by itself, but never runs
    gate.open()
    error = error_of(later)
    assert error is error_of(first)
    assert error is not error_of(second)
    assert isinstance(error.__cause__, KeyError)


def test_calls_that_do_not_wait_on_a_failed_one_are_not_touched(device: Device, gate: Gate) -> None:
    view, back = place(device, torch.zeros(3)), torch.empty(3)
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
    found = run_program(device, capture(module, inputs, "embedding").forward, module, inputs)
    assert same_bits(found[Role.VALUE, 0], module(*inputs)[0].detach())
    error_of(failing_lookup(device))


# -- memory ---------------------------------------------------------------------------------------------------


def test_every_byte_is_counted_and_comes_back(device: Device) -> None:
    assert device.memory().in_use == 0
    one, other = device.alloc(1000), device.alloc(234)
    assert device.memory().in_use == 1234
    one.free()
    assert device.memory().in_use == 234
    one.free()
    assert device.memory().in_use == 234
    other.free()
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
        held = device.alloc(600)
        with pytest.raises(OutOfMemory) as caught:
            device.alloc(401, "gradients of slot 1")
        assert (caught.value.requested, caught.value.in_use, caught.value.capacity) == (401, 600, 1000)
        assert f"gradients of slot 1 on device '{name}'" in str(caught.value)
        assert device.memory().in_use == 600
        device.alloc(400).free()
        held.free()
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


# -- aliasing -------------------------------------------------------------------------------------------------


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


# -- life -----------------------------------------------------------------------------------------------------


def test_closing_finishes_queued_work_and_frees_everything(device: Device, gate: Gate) -> None:
    view, back = place(device, torch.zeros(3)), torch.empty(3)
    device.compile(captured_from("attention").forward)
    kept = device.alloc(100)
    written = device.queue("load").write(view, torch.ones(3), [gate.event])
    device.queue("drain").read(back, view, [written])
    closing = threading.Thread(target=device.close)
    closing.start()
    gate.open()
    closing.join()
    assert torch.equal(back, torch.ones(3))
    assert device.memory().in_use == 0
    kept.free()
    assert device.memory().in_use == 0


def test_closing_twice_is_harmless_and_use_after_it_is_an_error(device: Device) -> None:
    queue, view = device.queue("any"), place(device, torch.zeros(3))
    module, inputs = module_and_inputs("linear")
    program = capture(module, inputs, "linear").forward
    device.close()
    device.close()
    uses: list[Callable[[], object]] = [
        lambda: device.alloc(1),
        lambda: device.queue("any"),
        lambda: device.queue("new"),
        lambda: device.compile(program),
        lambda: device.host(),
        lambda: queue.fill(view, 0.0),
        lambda: queue.write(view, torch.ones(3)),
        lambda: queue.read(torch.ones(3), view),
        lambda: queue.copy(view, view),
    ]
    for use in uses:
        with pytest.raises(HalError, match="closed"):
            use()


def test_a_device_can_be_opened_again(device: Device) -> None:
    device.alloc(10)
    device.close()
    with opened(device.info.name) as again:
        assert again.memory().in_use == 0
        assert torch.equal(fetch(again, place(again, torch.ones(2))), torch.ones(2))


def test_two_devices_have_their_own_memory_and_can_wait_for_each_other(gate: Gate) -> None:
    with opened("cpu:discrete", capacity=100) as one, opened("cpu:discrete") as other:
        first, second, between = one.alloc(12), other.alloc(12), torch.empty(3)
        written = one.queue("any").write(first.view(0, (3,), torch.float32), torch.arange(3.0), [gate.event])
        read = one.queue("any").read(between, first.view(0, (3,), torch.float32), [written])
        crossed = other.queue("any").write(second.view(0, (3,), torch.float32), between, [read])
        assert not crossed.done()
        gate.open()
        crossed.wait()
        other.alloc(1000)
        assert torch.equal(fetch(other, second.view(0, (3,), torch.float32)), torch.arange(3.0))
        assert (one.memory().in_use, one.memory().capacity) == (12, 100)
        assert (other.memory().in_use, other.memory().capacity) == (1012, None)
        one.close()
        assert torch.equal(fetch(other, second.view(0, (3,), torch.float32)), torch.arange(3.0))


def test_an_unknown_cpu_says_what_there_is() -> None:
    with pytest.raises(Unavailable, match="'cpu' or 'cpu:discrete'"):
        open_device("cpu:unified")


# -- threads --------------------------------------------------------------------------------------------------


def at_once(count: int, work: Callable[[int], None]) -> None:
    """Run `work` in that many threads that start together; raise what any of them raised."""
    together = threading.Barrier(count)
    failures: list[BaseException] = []

    def start(number: int) -> None:
        together.wait()
        try:
            work(number)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


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
    program = capture(module, inputs, "mlp").forward
    batches = [numbers(2, 3, 9) * (number + 1) for number in range(4)]
    expected = [module(batch)[0].detach() for batch in batches]
    found: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        found[number] = run_program(device, program, module, [batches[number]])[Role.VALUE, 0]

    at_once(4, work)
    assert all(same_bits(found[number], expected[number]) for number in range(4))


# **** what the probe tells ****


def probe_notes() -> tuple[str, ...]:
    probes = CpuBackend().probe()
    assert [probe.name for probe in probes] == NAMES
    assert len({probe.notes for probe in probes}) == 1
    return probes[0].notes


def test_the_probe_tells_threads_and_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2}, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert probe_notes()[0] == "3 threads on 3 usable cores"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert "set OMP_NUM_THREADS=3" in probe_notes()[0]


@pytest.mark.parametrize("count", [0, 1, 2, 8])
def test_the_probe_tells_numa_nodes_where_there_are_several(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ["online", "possible", *(f"node{number}" for number in range(count))]:
        (tmp_path / name).mkdir()
    monkeypatch.setattr("backends.cpu.NUMA_NODES", tmp_path)
    found = [note for note in probe_notes() if "NUMA" in note]
    assert len(found) == (count > 1)
    for note in found:
        assert note.startswith(f"{count} NUMA nodes")
        assert "numactl" in note


def test_the_probe_tells_how_much_memory_may_be_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    assert "page-locked memory: at most 65.54 kB (`ulimit -l`)" in probe_notes()
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert "page-locked memory: no limit (`ulimit -l`)" in probe_notes()
