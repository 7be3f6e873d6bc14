"""PyTorch's accelerators: the logic of streams, threads and errors over a stub; the real thing where there is one."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import relay
from backends.torch_device import cuda
from backends.torch_device import device as torch_device
from backends.torch_device.accelerator import Accelerator
from backends.torch_device.device import TorchDevice
from backends.torch_device.families import FAMILIES, Family
from hal import registry
from hal.errors import DeviceLost, HalError, OutOfMemory, Unavailable, Unsupported
from hal.host import Host
from hal.kit import streams
from hal.program import Kernel, Program
from relay.capture import CaptureRequest, capture
from relay.models import GPT
from tests.support.processes import packages
from tests.support.stubs.stub_accelerator import StubAccelerator

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def stub() -> StubAccelerator:
    return StubAccelerator()


@pytest.fixture
def device(stub: StubAccelerator) -> Iterator[TorchDevice]:
    opened = TorchDevice("stub:0", stub, 1 << 20)
    yield opened
    opened.close()


@pytest.mark.slow
def test_over_the_stand_in_it_conforms_in_order_memory_transfers_and_programs(tmp_path: Path) -> None:
    chosen = "test_programs or test_order or test_memory or test_opening or test_transfers or test_together"
    words = ["python", str(packages.ROOT / "tests" / "support" / "stubs" / "stub_accelerator.py"), chosen]
    answer = json.loads(packages.run(words, tmp_path, tmp_path))
    assert answer["failed"] == {}
    assert answer["passed"] > 100


def test_what_is_written_is_read_back(device: TorchDevice) -> None:
    queue = device.queue("load")
    view = device.alloc(4096).view(64, (5, 3), torch.float32)
    numbers, back = torch.randn(5, 3), torch.empty(5, 3)
    queue.read(back, view, [queue.write(view, numbers)]).wait()
    assert torch.equal(back, numbers)


def test_a_call_that_waits_for_another_stream_is_ordered_on_the_device(
    device: TorchDevice, stub: StubAccelerator
) -> None:
    view = device.alloc(64).view(0, (4,), torch.float32)
    written = device.queue("load").write(view, torch.ones(4))
    device.queue("compute").fill(view, 2.0, [written]).wait()
    load, compute = stub.streams
    assert [mark.stream for mark in compute.waits] == [load]
    assert load.waits == []


def test_a_call_that_waits_for_the_host_does_not_hold_up_its_caller(device: TorchDevice) -> None:
    gate = threading.Event()
    host = Host()
    task = host.run(gate.wait)
    view = device.alloc(64).view(0, (4,), torch.float32)
    written = device.queue("load").write(view, torch.ones(4), [task])
    filled = device.queue("compute").fill(view, 2.0)  # waits for nobody
    filled.wait()
    assert not written.done()
    gate.set()
    written.wait()
    host.close()


def test_the_first_error_travels_along_events(device: TorchDevice) -> None:
    host = Host()

    def fail() -> None:
        raise ArithmeticError("first")

    view = device.alloc(64).view(0, (4,), torch.float32)
    written = device.queue("load").write(view, torch.ones(4), [host.run(fail)])
    filled = device.queue("compute").fill(view, 2.0, [written])
    with pytest.raises(HalError, match="first") as caught:
        filled.wait()
    assert isinstance(caught.value.__cause__, ArithmeticError)
    device.queue("compute").fill(view, 3.0).wait()
    host.close()


def test_a_freed_buffer_outlives_the_work_that_the_device_was_given(device: TorchDevice, stub: StubAccelerator) -> None:
    buffer = device.alloc(1000)
    view = buffer.view(0, (250,), torch.float32)
    memory = weakref.ref(view.native)
    queue = device.queue("compute")
    stub.behind = True
    queue.fill(view, 1.0).on_device()  # type: ignore[attr-defined]
    buffer.free()
    buffer.free()
    del view, buffer
    assert device.memory().in_use == 0
    assert memory() is not None
    stub.behind = False
    queue.settle()
    assert memory() is None


def test_memory_that_is_refused_is_asked_for_again_when_the_queues_have_let_go(
    device: TorchDevice, stub: StubAccelerator
) -> None:
    queue = device.queue("compute")
    view = device.alloc(64).view(0, (4,), torch.float32)
    queue.fill(view, 1.0).wait()
    answers = iter([torch.OutOfMemoryError("too much"), "memory"])

    def get() -> object:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        assert not queue._given
        return answer

    assert queue._given
    assert streams.allocate(get, stub, device.queues) == "memory"


def test_a_device_that_fails_is_lost_and_closes(device: TorchDevice, stub: StubAccelerator) -> None:
    view = device.alloc(64).view(0, (4,), torch.float32)
    event = device.queue("load").fill(view, 1.0)
    event.on_device()  # type: ignore[attr-defined]
    stub.broken = True
    for lost in (event, device.queue("load").fill(view, 1.0)):  # while it runs, and while it is given more
        with pytest.raises(DeviceLost, match="illegal memory access") as caught:
            lost.wait()
        assert isinstance(caught.value.__cause__, torch.AcceleratorError)
        assert lost.done()
    device.close()


def test_an_error_after_which_the_device_answers_is_not_its_loss(
    device: TorchDevice, stub: StubAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = device.alloc(64).view(0, (4,), torch.float32)

    def refuse(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: invalid configuration argument")

    monkeypatch.setattr(torch.Tensor, "fill_", refuse)
    failed = device.queue("compute").fill(view, 1.0)
    with pytest.raises(HalError, match="invalid configuration") as caught:
        failed.wait()
    assert not isinstance(caught.value, DeviceLost)
    monkeypatch.undo()
    device.queue("compute").fill(view, 1.0).wait()


def test_beyond_the_capacity_is_out_of_memory(device: TorchDevice) -> None:
    device.alloc(1 << 19)
    with pytest.raises(OutOfMemory) as caught:
        device.alloc((1 << 19) + 1)
    assert (caught.value.in_use, caught.value.capacity) == (1 << 19, 1 << 20)


def test_host_memory_that_crosses_is_registered_as_it_is(device: TorchDevice, stub: StubAccelerator) -> None:
    host = device.host()
    piece = host.alloc(1001, torch.uint8, "weights", crosses=True)
    host.alloc(999, torch.uint8, "moments")
    assert list(stub.locker.locked.values()) == [1001]
    host.free(piece, "weights")
    assert stub.locker.locked == {}
    host.close()


def test_a_dtype_it_does_not_have_is_refused_by_name(device: TorchDevice) -> None:
    program = capture(
        CaptureRequest(nn.Linear(3, 3).double(), [torch.zeros(2, 3, dtype=torch.float64)], "precise")
    ).forward
    with pytest.raises(Unsupported, match=r"precise.*float64"):
        device.compile(program)


def test_training_on_it_is_training_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = GPT(layers=4, hidden=32, heads=2, sequence=16, dropout=0.1)
    ids = torch.randint(0, 256, (10, 17))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    options = {"microbatches": 4, "clip_grad_norm": 1.0, "optimizer": relay.SGD(lr=0.1)}
    plain = relay.Trainer(copy.deepcopy(model), **options)
    expected = [plain.step(batch).loss for _ in range(20)]
    monkeypatch.setattr(registry, "open", lambda name, capacity: TorchDevice("stub:0", StubAccelerator(), capacity))
    for stash in ("device", "host"):
        trainer = relay.Trainer(copy.deepcopy(model), device="stub:0", stash=stash, **options)
        # Attention is traced as matrix products there, as a fused kernel on the CPU: equal to rounding.
        assert [trainer.step(batch).loss for _ in range(20)] == pytest.approx(expected, rel=1e-5)
        for ours, theirs in zip(trainer.state_dict().values(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
        trainer.close()
    plain.close()


def test_no_program_for_it_holds_an_op_of_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    names: set[str] = set()

    class Listening(TorchDevice):
        def compile(self, program: Program) -> Kernel:
            names.update(str(node.target) for node in program.graph.nodes)
            return super().compile(program)

    monkeypatch.setattr(registry, "open", lambda name, capacity: Listening("stub:0", StubAccelerator(), capacity))
    trainer = relay.Trainer(GPT(layers=2, hidden=16, heads=2, sequence=8), device="stub:0", microbatches=1)
    ids = torch.randint(0, 256, (2, 8))
    trainer.prepare({"input_ids": ids, "labels": ids})
    trainer.close()
    assert names
    assert not [name for name in names if "cpu" in name or "mkldnn" in name]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_family_that_is_not_here_says_why(name: str) -> None:
    backend = torch_device.TorchBackend(name)
    if FAMILIES[name].missing():
        (probe,) = backend.probe()
        assert not probe.available
        assert probe.reason
        with pytest.raises(Unavailable, match=name):
            backend.open("0")


@needs_cuda
@pytest.mark.gpu
def test_cuda_trains_as_plain_pytorch_does_on_it() -> None:
    torch.manual_seed(0)
    model = GPT(layers=4, hidden=64, heads=4, sequence=32, tied=False)
    plain = copy.deepcopy(model).cuda()
    ids = torch.randint(0, 256, (10, 33))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    trainer = relay.Trainer(model, device="cuda:0", microbatches=4)
    for _ in range(3):
        total = 0.0
        plain.zero_grad()
        for inputs, labels in zip(batch["input_ids"].chunk(4), batch["labels"].chunk(4), strict=True):
            loss = plain(input_ids=inputs.cuda(), labels=labels.cuda()).loss * (len(inputs) / 10)
            loss.backward()
            total += loss.item()
        break
    assert trainer.step(batch).loss == pytest.approx(total, rel=1e-6)
    trainer.close()


def test_a_device_that_cannot_be_opened_any_more_is_unavailable_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(Family):
        def missing(self) -> str:
            return ""

        def count(self) -> int:
            return 1

        def open(self, number: int) -> Accelerator:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(FAMILIES, "cuda", Broken("cuda"))
    with pytest.raises(Unavailable, match="illegal memory access"):
        torch_device.cuda().open("0")
    (probe,) = torch_device.cuda().probe()
    assert "illegal memory access" in probe.reason


class FakeRuntime:
    """`torch.cuda.cudart()` where registering fails or does not."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[tuple[int, ...]] = []

    def cudaHostRegister(self, *arguments: int) -> int:
        self.calls.append(arguments)
        return self.code

    def cudaHostUnregister(self, *arguments: int) -> int:
        self.calls.append(arguments)
        return 0


@pytest.mark.parametrize("code", [0, 2])
def test_registered_memory_is_exact_and_for_all_devices_and_a_refusal_leaves_no_error_behind(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, entered, launched = FakeRuntime(code), [], []

    @contextlib.contextmanager
    def device(where: torch.device) -> Iterator[None]:
        entered.append(where)
        yield

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: launched.append(device))
    locker = cuda._CudaHostRegister(torch.device("cuda:1"))
    reason = locker.lock(4096, 1001)
    assert runtime.calls == [(4096, 1001, 1)]
    assert bool(reason) == bool(code)
    assert launched == ([torch.device("cuda:1")] if code else [])
    locker.unlock(4096, 1001)
    assert entered == [torch.device("cuda:1")] * 2
