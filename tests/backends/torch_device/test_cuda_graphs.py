"""Launches recorded and replayed: when, and that nothing else changes. Over a stub, and on a GPU."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import relay
from backends.torch_device import cuda_graphs
from backends.torch_device.cuda_graphs import RECORDS, Recordings
from backends.torch_device.device import TorchBackend, TorchDevice
from hal import registry
from hal.device import KernelCall, View
from hal.errors import OutOfMemory, Unavailable
from hal.kit.program_builder import GraphBuilder
from hal.memory import MemoryAccount
from hal.program import Program
from hal.random import RandomKey
from relay.capture import CaptureRequest, capture
from relay.models import GPT
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


def squares(draws: bool = False) -> Program:
    """x * x of four numbers, masked where it draws; its output may be added to what is there."""
    layer = nn.Dropout(0.5) if draws else nn.Identity()

    class Squares(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (layer(x * x),)

    return capture(CaptureRequest(Squares(), [torch.zeros(4)], "squares")).forward


def views(device: TorchDevice, count: int) -> list[View]:
    return [device.alloc(64).view(0, (4,), torch.float32) for _ in range(count)]


def run(device: TorchDevice, program: Program, x: View, y: View, number: float) -> torch.Tensor:
    """The program on four times that number."""
    queue = device.queue("compute")
    queue.fill(x, number).wait()
    back = torch.empty(4)
    key = RandomKey(0, 0, 0, int(number)) if program.draws else None
    ran = queue.run(KernelCall(device.compile(program), [x], [y], key=key))
    queue.read(back, y, [ran]).wait()
    return back


def test_the_first_launch_is_plain_the_second_recorded_and_the_others_replayed(
    device: TorchDevice, stub: StubAccelerator
) -> None:
    program = squares()
    kernel = device.compile(program)  # kept, as whoever runs it does
    x, y = views(device, 2)
    recordings = device.queue("compute").recordings
    assert recordings is not None
    for number, (recorded, replayed) in enumerate([(0, 0), (1, 1), (1, 2), (1, 3)]):
        assert torch.equal(run(device, program, x, y, number), torch.full((4,), float(number * number)))
        assert (stub.recorded, recordings.replayed) == (recorded, replayed)
    assert kernel.program is program


def test_other_addresses_and_other_sums_have_recordings_of_their_own(
    device: TorchDevice, stub: StubAccelerator
) -> None:
    builder = GraphBuilder("sum")
    left, right = builder.input((4,), torch.float32), builder.input((4,), torch.float32)
    program = builder.program([builder.call("aten.add.Tensor", left, right)], accumulates=(True,))
    kernel, queue = device.compile(program), device.queue("compute")
    x, y, first, second = views(device, 4)
    queue.fill(x, 1.0)
    queue.fill(y, 2.0)
    for total in (first, second):
        queue.fill(total, 0.0)
        for _ in range(3):
            queue.run(KernelCall(kernel, [x, y], [total], (True,)))
    queue.run(KernelCall(kernel, [x, y], [second], (False,))).wait()
    back = torch.empty(4)
    queue.read(back, first).wait()
    assert back.tolist() == [9.0] * 4
    queue.read(back, second).wait()
    assert back.tolist() == [3.0] * 4
    assert stub.recorded == 2


def test_what_draws_is_not_recorded(device: TorchDevice, stub: StubAccelerator) -> None:
    program = squares(draws=True)
    kernel = device.compile(program)
    assert cuda_graphs.reason_against(program)
    x, y = views(device, 2)
    seen = {tuple(run(device, program, x, y, 2.0 + step).tolist()) for step in range(4)}
    assert len(seen) == 4
    assert stub.recorded == 0
    assert kernel.program is program


def test_what_waits_for_the_host_is_not_recorded() -> None:
    builder = GraphBuilder("looks")
    chosen = builder.call("aten._to_copy.default", builder.input((4,), torch.float32), dtype=torch.float64)
    program = builder.program([chosen])
    assert cuda_graphs.reason_against(program) == ""
    chosen.kwargs = {**chosen.kwargs, "device": torch.device("cpu")}
    assert "host" in cuda_graphs.reason_against(program)


def doubles() -> Program:
    """x + x of four numbers."""
    builder = GraphBuilder("doubles")
    x = builder.input((4,), torch.float32)
    return builder.program([builder.call("aten.add.Tensor", x, x)])


def test_a_recording_that_fails_is_reported_once_and_ends_the_recording_of_that_program_alone(
    device: TorchDevice, stub: StubAccelerator, caplog: pytest.LogCaptureFixture
) -> None:
    stub.refuses = "operation not permitted when stream is capturing"
    program, other = squares(), doubles()
    kernels = [device.compile(program), device.compile(other)]
    x, y, z = views(device, 3)
    in_use = device.memory().in_use
    for number in range(4):
        for target in (y, z):
            assert torch.equal(run(device, program, x, target, number), torch.full((4,), float(number * number)))
    assert [record.levelno for record in caplog.records if record.name.startswith("backends")] == [logging.WARNING]
    assert "not permitted" in caplog.text
    assert "squares" in caplog.text
    assert stub.recorded == 1
    assert device.memory().in_use == in_use
    stub.refuses = ""
    for number in range(4):
        assert torch.equal(run(device, other, x, y, number), torch.full((4,), 2.0 * number))
        assert torch.equal(run(device, program, x, y, number), torch.full((4,), float(number * number)))
    assert stub.recorded == 2, "the other program is recorded"
    assert [kernel.program for kernel in kernels] == [program, other]


SETTINGS: dict[str, Callable[[bool], None]] = {
    "TF32": lambda on: setattr(torch.backends.cuda.matmul, "allow_tf32", on),
    "TF32 of cuDNN": lambda on: torch._C._set_cudnn_allow_tf32(not on),
    "deterministic algorithms": torch.use_deterministic_algorithms,
    "cuDNN's benchmark": torch._C._set_cudnn_benchmark,
    "flash attention": lambda on: torch.backends.cuda.enable_flash_sdp(not on),
}
"""cuDNN's are set below `torch.backends.cudnn`, which takes nothing after torch.testing's samples were imported."""


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_recording_is_not_replayed_under_settings_that_choose_other_kernels(
    device: TorchDevice, stub: StubAccelerator, setting: str
) -> None:
    program = doubles()
    kernel = device.compile(program)
    x, y = views(device, 2)
    for number in range(3):
        run(device, program, x, y, number)
    assert stub.recorded == 1
    SETTINGS[setting](True)
    try:
        for number in range(3):
            assert torch.equal(run(device, program, x, y, number), torch.full((4,), 2.0 * number))
        assert stub.recorded == 2
    finally:
        SETTINGS[setting](False)
    run(device, program, x, y, 3)
    assert stub.recorded == 2, "under the first settings the first recording is replayed again"
    assert kernel.program is program


def test_the_recordings_of_a_dropped_kernel_give_their_memory_back(device: TorchDevice, stub: StubAccelerator) -> None:
    wide = capture(CaptureRequest(nn.Sequential(nn.Tanh(), nn.Tanh(), Tuple()), [torch.zeros(20_000)], "wide")).forward
    queue = device.queue("compute")
    large = [device.alloc(80_000).view(0, (20_000,), torch.float32) for _ in range(2)]
    small = views(device, 2)
    queue.fill(large[0], 1.0)
    kept, dropped = device.compile(doubles()), device.compile(wide)
    workspace = device.memory().in_use  # charged for both kernels, once
    for _ in range(3):
        queue.run(KernelCall(dropped, [large[0]], [large[1]])).wait()
        queue.run(KernelCall(kept, [small[0]], [small[1]])).wait()
    assert stub.recorded == 2
    assert device.memory().in_use == workspace + wide.workspace
    del dropped
    queue.fill(large[0], 1.0).wait()  # the queue refers to the kernel of a call until the call has ended
    gc.collect()
    for number in range(3):
        assert torch.equal(run(device, kept.program, *small, number), torch.full((4,), 2.0 * number))
    assert stub.pools == 1
    assert device.memory().in_use == workspace + kept.program.workspace
    assert stub.recorded == 3, "what is left is recorded again, in a pool of its own size"


def test_the_memory_of_recordings_is_accounted_and_given_up_for_what_needs_it(
    device: TorchDevice, stub: StubAccelerator
) -> None:
    program = capture(
        CaptureRequest(nn.Sequential(nn.Tanh(), nn.Tanh(), Tuple()), [torch.zeros(20_000)], "wide")
    ).forward
    kernel, queue = device.compile(program), device.queue("compute")
    x, y = (device.alloc(80_000).view(0, (20_000,), torch.float32) for _ in range(2))
    queue.fill(x, 1.0)
    plain = device.memory().in_use
    for _ in range(3):
        queue.run(KernelCall(kernel, [x], [y])).wait()
    assert stub.recorded == 1
    assert device.memory().in_use == plain + program.workspace
    free = (1 << 20) - plain
    device.alloc(free)
    assert device.memory().in_use == 1 << 20
    with pytest.raises(OutOfMemory):
        device.alloc(1)
    queue.run(KernelCall(kernel, [x], [y])).wait()
    assert stub.recorded == 1  # what needed the memory still does


class Tuple(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x + 1,)


def cosine(tensor: torch.Tensor) -> None:
    tensor.cos_()


def test_a_cycle_longer_than_the_limit_does_not_record_for_ever() -> None:
    stub = StubAccelerator()
    stream = stub.new_stream()
    stub.entered.device = True
    recordings = Recordings(stub.recorder(), stream, MemoryAccount("a test", None), lambda: None, limit=4)
    program, tensors = squares(), [torch.zeros(4) for _ in range(6)]
    with stub.use(stream):
        for _ in range(20):
            for tensor in tensors:
                recordings.launch(program, cosine, [tensor])
        assert stub.recorded == 4
        # What is not used for long gives its place to what is.
        for _ in range(cuda_graphs.REST + 1):
            recordings.launch(program, cosine, [tensors[0]])
        for _ in range(2):
            recordings.launch(program, cosine, [tensors[5]])
    assert stub.recorded == 5


def test_a_device_string_switches_recording_off(stub: StubAccelerator) -> None:
    plain = TorchDevice("stub:0,plain", stub, None, record=False)
    assert RECORDS not in plain.info.tags
    assert plain.queue("compute").recordings is None
    plain.close()
    with pytest.raises(Unavailable):
        TorchBackend("cuda").open("0,quickly")


def losses(device: str, model: nn.Module) -> list[float]:
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (6, 17))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    with relay.Trainer(copy.deepcopy(model), device=device, microbatches=2, optimizer=relay.SGD(lr=0.1)) as trainer:
        return [trainer.step(batch).loss for _ in range(6)]


def test_training_with_recorded_launches_is_training_without(
    monkeypatch: pytest.MonkeyPatch, stub: StubAccelerator
) -> None:
    model = GPT(layers=3, hidden=16, heads=2, sequence=16)
    monkeypatch.setattr(
        registry,
        "open",
        lambda name, capacity=None: TorchDevice(name, stub, capacity, record=not name.endswith("plain")),
    )
    plain = losses("stub:0,plain", model)
    assert stub.recorded == 0
    assert losses("stub:0", model) == plain
    assert stub.recorded > 3


@needs_cuda
@pytest.mark.gpu
def test_on_a_gpu_training_with_recorded_launches_is_training_without(caplog: pytest.LogCaptureFixture) -> None:
    model = GPT(layers=4, hidden=64, heads=4, sequence=16)
    assert losses("cuda:0", model) == losses("cuda:0,plain", model)
    assert "recorded" not in caplog.text


@needs_cuda
@pytest.mark.gpu
def test_on_a_gpu_launches_are_replayed() -> None:
    device = registry.open("cuda:0")
    assert isinstance(device, TorchDevice)
    program = squares()
    kernel = device.compile(program)
    x, y = views(device, 2)
    for number in range(5):
        assert torch.equal(run(device, program, x, y, number), torch.full((4,), float(number * number)))
    recordings = device.queue("compute").recordings
    assert recordings is not None
    assert recordings.replayed == 4
    assert kernel.program is program
    device.close()
