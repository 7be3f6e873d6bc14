"""The CuPy device: its logic over a stand-in that is late and loud, its draws over numpy, the rest on a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from backends.cupy_device import runtime as cupy_runtime
from backends.cupy_device.device import CupyBackend, CupyDevice
from backends.cupy_device.runtime import CupyRuntime
from hal import random as counter_random
from hal import registry
from hal.errors import DeviceLost, OutOfMemory, Unavailable, Unsupported
from hal.kit.arrays import random as array_random
from hal.kit.program_builder import GraphBuilder
from hal.random import RandomKey
from hal.worker import Worker
from tests.support.processes import packages
from tests.support.stubs.stub_cupy import StubRuntime

HERE = importlib.util.find_spec("cupy") is not None and not cupy_runtime.missing()
needs_cupy = pytest.mark.skipif(not HERE, reason="needs CuPy and a CUDA device")


@pytest.fixture
def stub() -> StubRuntime:
    return StubRuntime()


@pytest.fixture
def device(stub: StubRuntime) -> Iterator[CupyDevice]:
    opened = CupyDevice("stub:0", stub, 1 << 20)
    yield opened
    opened.close()


@pytest.mark.slow
@pytest.mark.parametrize("only", ["not test_training or gpt", pytest.param("", marks=pytest.mark.exhaustive)])
def test_over_the_stand_in_it_conforms(tmp_path: Path, only: str) -> None:
    words = ["python", str(packages.ROOT / "tests" / "support" / "stubs" / "stub_cupy.py"), only]
    answer = json.loads(packages.run(words, tmp_path, tmp_path))
    assert answer["failed"] == {}
    assert answer["passed"] > 500


def load_then_read(device: CupyDevice) -> tuple[torch.Tensor, torch.Tensor]:
    """What one queue writes and another reads after it."""
    view = device.alloc(4000).view(0, (1000,), torch.float32)
    numbers, back = torch.arange(1000.0), torch.zeros(1000)
    written = device.queue("load").write(view, numbers)
    device.queue("drain").read(back, view, [written]).wait()
    return numbers, back


def test_streams_are_ordered_on_the_device_by_marks(device: CupyDevice, stub: StubRuntime) -> None:
    numbers, back = load_then_read(device)
    assert torch.equal(back, numbers)
    load, drain = stub.streams
    assert [mark.stream for mark in drain.ordered_after] == [load]
    assert load.ordered_after == []


def test_the_stand_in_notices_an_order_that_is_missing(
    device: CupyDevice, stub: StubRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stub, "order", lambda stream, mark: None)
    numbers, back = load_then_read(device)
    assert not torch.equal(back, numbers)


def read_after_free(device: CupyDevice) -> tuple[torch.Tensor, torch.Tensor]:
    """A read is with the device, and everything that the caller knows of its source is gone before it runs."""
    numbers, back = torch.arange(1000.0), torch.zeros(1000)
    buffer, other = device.alloc(4000), device.alloc(64)
    queue = device.queue("load")
    queue.write(buffer.view(0, (1000,), torch.float32), numbers).wait()
    event = queue.read(back, buffer.view(0, (1000,), torch.float32))
    buffer.free()
    del buffer
    filled = queue.fill(other.view(0, (4,), torch.float32), 1.0)  # a call later, when the queue may let go
    filled.on_device()  # type: ignore[attr-defined]
    event.wait()
    return numbers, back


def test_a_queue_holds_what_the_device_still_uses(device: CupyDevice) -> None:
    numbers, back = read_after_free(device)
    assert torch.equal(back, numbers)
    assert device.memory().in_use == 64


def test_the_stand_in_notices_a_reference_that_is_missing(
    device: CupyDevice, stub: StubRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stub, "reached", lambda mark: True)  # so the queue lets go too early
    numbers, back = read_after_free(device)
    assert not torch.equal(back, numbers)


def test_a_queue_lets_go_of_what_the_device_is_past(device: CupyDevice) -> None:
    queue = device.queue("load")
    view = device.alloc(64).view(0, (4,), torch.float32)
    for _ in range(50):
        queue.fill(view, 1.0).wait()
    assert len(queue._given) <= 2


def test_a_call_that_waits_for_the_host_holds_up_neither_caller_nor_other_queues(device: CupyDevice) -> None:
    gate, worker = threading.Event(), Worker("host")
    task = worker.submit(gate.wait, (), "task")  # type: ignore[arg-type]
    view = device.alloc(64).view(0, (4,), torch.float32)
    written = device.queue("load").write(view, torch.ones(4), [task])
    device.queue("compute").fill(view, 2.0).wait()
    assert not written.done()
    gate.set()
    written.wait()
    worker.close()


def test_a_device_that_fails_is_lost_and_says_so(device: CupyDevice, stub: StubRuntime) -> None:
    view = device.alloc(64).view(0, (4,), torch.float32)
    event = device.queue("load").fill(view, 1.0)
    event.on_device()  # type: ignore[attr-defined]
    stub.broken = True
    for lost in (event, device.queue("load").fill(view, 1.0)):  # while it runs, and while it is given more
        with pytest.raises(DeviceLost, match="illegal memory access") as caught:
            lost.wait()
        assert isinstance(caught.value.__cause__, RuntimeError)
    stub.broken = False


def test_a_mark_of_a_device_that_failed_is_an_error_and_not_one_that_is_still_to_come() -> None:
    class CudaError(RuntimeError):
        pass

    runtime = CupyRuntime.__new__(CupyRuntime)
    answers = {1: 0, 2: 600, 3: 700}
    calls = SimpleNamespace(eventQuery=answers.__getitem__, CUDARuntimeError=CudaError)
    runtime._cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=calls))
    runtime._device = contextlib.nullcontext()
    assert runtime.reached(SimpleNamespace(ptr=1))
    assert not runtime.reached(SimpleNamespace(ptr=2))
    with pytest.raises(CudaError):
        runtime.reached(SimpleNamespace(ptr=3))


class RuntimeCallFailed(RuntimeError):
    """cupy.cuda.runtime.CUDARuntimeError."""


class DriverCallFailed(RuntimeError):
    """cupy.cuda.driver.CUDADriverError, which is no error of the runtime."""


@pytest.mark.parametrize("failure", [RuntimeCallFailed, DriverCallFailed])
@pytest.mark.parametrize("answers", [True, False])
def test_a_device_is_lost_after_errors_of_the_runtime_and_of_the_driver_if_it_answers_no_more(
    failure: type[RuntimeError], answers: bool
) -> None:
    class Card(contextlib.nullcontext[None]):
        def synchronize(self) -> None:
            if not answers:
                raise failure("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")

    runtime = CupyRuntime.__new__(CupyRuntime)
    errors = SimpleNamespace(CUDARuntimeError=RuntimeCallFailed), SimpleNamespace(CUDADriverError=DriverCallFailed)
    runtime._cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=errors[0], driver=errors[1]))
    runtime._device = Card()
    assert runtime.lost(failure("CUDA_ERROR_LAUNCH_FAILED")) is not answers
    assert not runtime.lost(RuntimeError("an error of Python's"))


def test_memory_that_a_kernel_does_not_get_is_out_of_memory(
    device: CupyDevice, stub: StubRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("out of device memory")

    view = device.alloc(64).view(0, (4,), torch.float32)
    monkeypatch.setattr(stub, "launch", refuse)
    with pytest.raises(OutOfMemory, match="out of device memory"):
        device.queue("compute").fill(view, 1.0).wait()


def test_sums_by_index_of_integers_that_cuda_cannot_add_are_refused_by_name(device: CupyDevice) -> None:
    for dtype in (torch.float32, torch.int64):
        builder = GraphBuilder("counting")
        x, indices = builder.input((3, 4), dtype), builder.input((3, 4), torch.int64)
        program = builder.program([builder.call("aten.scatter_add.default", x, 1, indices, x)])
        if dtype is torch.float32:
            device.compile(program)
            continue
        with pytest.raises(Unsupported, match=r"counting.*int64.*scatter_add") as caught:
            device.compile(program)
        assert caught.value.op == "aten.scatter_add.default"


def test_host_memory_that_crosses_is_registered_as_it_is(device: CupyDevice, stub: StubRuntime) -> None:
    host = device.host()
    piece = host.alloc(1001, torch.uint8, "weights", crosses=True)
    assert list(stub.locker.locked.values()) == [1001]
    host.free(piece, "weights")
    assert stub.locker.locked == {}
    host.close()


@pytest.mark.parametrize("key", [RandomKey(0, 0, 0, 0), RandomKey(2**64 - 1, 2**32 - 1, 2**20 - 1, 2**32 - 1)])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (4099,)])
def test_draws_as_array_code_are_the_same_bits(key: RandomKey, shape: tuple[int, ...]) -> None:
    draws = array_random.draws(np)
    for probability in (0.0, 0.1, 1.0):
        mask = draws["keep_mask"](key, 4095, shape, probability)
        assert np.array_equal(mask, counter_random.keep_mask(key, 4095, shape, probability).numpy())
    assert np.array_equal(draws["uniform"](key, 7, shape), counter_random.uniform(key, 7, shape).numpy())
    normal = draws["normal"](key, 7, shape)
    assert normal.dtype == np.float32
    assert np.allclose(normal, counter_random.normal(key, 7, shape).numpy(), rtol=1e-6, atol=1e-7)
    assert normal.shape == shape
    assert math.prod(shape) == normal.size


@pytest.mark.skipif(HERE, reason="there is a CUDA device here")
def test_without_a_device_probing_keeps_the_reason_and_opening_raises_it() -> None:
    (probe,) = CupyBackend().probe()
    assert not probe.available
    assert probe.reason
    with pytest.raises(Unavailable, match=probe.reason.split("(")[0]):
        registry.open("cupy:0")


@pytest.mark.gpu
@needs_cupy
def test_on_a_gpu_it_conforms(tmp_path: Path) -> None:
    words = ["relay", "conformance", "cupy:0", "--verify-known-gaps", "--json"]
    assert json.loads(packages.run(words, tmp_path, tmp_path))["conforms"]


@pytest.mark.gpu
@needs_cupy
def test_on_a_gpu_every_queue_has_a_stream_of_its_own() -> None:
    device = registry.open("cupy:0")
    assert isinstance(device, CupyDevice)
    streams = {device.queue(name).stream.ptr for name in ("load", "compute", "drain")}
    assert len(streams) == 3
    assert 0 not in streams, "the null stream waits for everybody"
    device.close()


@pytest.mark.gpu
@needs_cupy
def test_on_a_gpu_page_locked_memory_is_exact_and_transfers_from_it_arrive() -> None:
    device = registry.open("cupy:0")
    host = device.host()
    count = 10_000_001
    up, down = (host.alloc(count, torch.float32, "staging", crosses=True) for _ in range(2))
    assert host.page_locked == 2 * count * 4
    up.copy_(torch.arange(count))
    view = device.alloc(count * 4).view(0, (count,), torch.float32)
    written = device.queue("load").write(view, up)
    device.queue("drain").read(down, view, [written]).wait()
    assert torch.equal(down, up)
    host.close()
    device.close()
