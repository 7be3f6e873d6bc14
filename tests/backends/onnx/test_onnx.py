"""ONNX Runtime's devices: ops against PyTorch, order and errors, and training as plain PyTorch trains."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relay
from hal import random as counter_random
from hal import registry
from hal.conformance.samples.op_samples import case
from hal.device import Device, KernelCall, View
from hal.errors import DeviceLost, HalError, OutOfMemory, Unavailable, Unsupported
from hal.ops import OPS
from hal.program import Program
from hal.random import RandomKey
from relay.capture import CaptureRequest, Lowering, capture
from tests.support import reference
from tests.support.function_programs import Of, core
from tests.support.zoo import core_modules, small_models

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install 'layer-relay[onnx]'")
onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install 'layer-relay[onnx]'")

KEY = RandomKey(3, 1, 4, 1)


@pytest.fixture
def device() -> Iterator[Device]:
    opened = registry.open("onnx:cpu")
    yield opened
    opened.close()


def run(
    device: Device, program: Program, inputs: Any, outputs: list[Tensor], key: Any = None, adds: bool = False
) -> None:
    """Run a program on host memory, which this device works in."""
    queue = device.queue("compute")
    views = [device.adopt(tensor.detach().contiguous()) for tensor in inputs]
    accumulate = (adds,) * len(outputs)
    queue.run(
        KernelCall(device.compile(program), views, [device.adopt(drawn) for drawn in outputs], accumulate, key)
    ).wait()


def results_of(program: Program) -> list[Tensor]:
    return [torch.full(port.shape, 1).to(port.dtype) for port in program.outputs]


# **** ops ****


@pytest.mark.parametrize("name", sorted(OPS))
def test_an_op_gives_what_pytorch_gives(device: Device, name: str) -> None:
    for seed in range(6):
        drawn = case(name, seed)
        found = results_of(drawn.program)
        run(device, drawn.program, drawn.inputs, found, drawn.key)
        for ours, theirs in zip(found, drawn.expected, strict=True):
            if theirs.dtype.is_floating_point:
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5, equal_nan=True)
            else:
                assert torch.equal(ours, theirs), seed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    ["add.Tensor", "mul.Scalar", "exp.default", "mm.default", "_softmax.default", "sum.dim_IntList", "where.self"],
)
def test_half_precision_is_rounded_once_an_op(device: Device, name: str, dtype: torch.dtype) -> None:
    for seed in range(6):
        drawn = case(f"aten.{name}", seed, dtype)
        found = results_of(drawn.program)
        run(device, drawn.program, drawn.inputs, found)
        for ours, theirs in zip(found, drawn.expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=torch.finfo(dtype).eps, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_an_embedding_gradient_add_up_in_every_precision(device: Device, dtype: torch.dtype) -> None:
    index = torch.randint(0, 3, (200,), generator=torch.Generator().manual_seed(0))
    values = torch.ones(200, 5, dtype=dtype)

    def scatter(index: Tensor, values: Tensor) -> Tensor:
        return torch.zeros(3, 5, dtype=dtype).index_put((index,), values, accumulate=True)

    program = core(scatter, index, values)
    found = results_of(program)
    run(device, program, [index, values], found)
    assert torch.equal(found[0].float(), torch.bincount(index)[:, None].expand(3, 5).float())


def test_accumulated_outputs_add_to_what_is_there(device: Device) -> None:
    x, y = torch.randn(4, 5), torch.randn(6, 5)
    program = core(lambda x, y: (x @ y.t(), x.sum(0), (x @ y.t()).exp().view(2, 12), x.t()), x, y)
    found = results_of(program)
    run(device, program, [x, y], found, adds=True)
    for ours, theirs in zip(found, ((x @ y.t()), x.sum(0), (x @ y.t()).exp().view(2, 12), x.t()), strict=True):
        torch.testing.assert_close(ours, theirs + 1)


def test_outputs_may_be_inputs_views_of_inputs_and_one_another(device: Device) -> None:
    x = torch.randn(2, 6)
    program = core(lambda x: (x.view(3, 4) * 1.0, x.exp(), x.exp().view(12), x.exp().view(12, 1)), x)
    found = results_of(program)
    run(device, program, [x], found)
    for ours, theirs in zip(found, (x.view(3, 4), x.exp(), x.exp().view(12), x.exp().view(12, 1)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_new_values_of_buffers_may_lie_where_the_old_ones_do() -> None:
    def losses(name: str) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)]
        trainer = relay.Trainer(layers, loss=F.mse_loss, device=name, optimizer=relay.SGD(lr=0.1), microbatches=2)
        batches = [(torch.randn(8, 6), torch.randn(8, 3)) for _ in range(3)]
        try:
            return [trainer.step(batch).loss for batch in batches], reference.copy_of(trainer.state_dict())
        finally:
            trainer.close()

    ours, state = losses("onnx:cpu")
    theirs, wanted = losses("cpu")
    assert ours == pytest.approx(theirs, abs=1e-5)
    for name, tensor in wanted.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5)


MODULES = ["attention with dropout", "attention to nothing", "convolution", "transposed convolution", "pooling"]
MODULES += ["lookups", "scattered", "lstm", "batch norm of images", "integers"]


@pytest.mark.parametrize("which", MODULES)
def test_modules_have_the_outputs_and_gradients_of_autograd(which: str) -> None:
    module, inputs = core_modules.module_of(which)
    core_programs = capture(CaptureRequest(module, inputs, which, lowering=Lowering.CORE))
    native = capture(CaptureRequest(module, inputs, which, strides=False))
    given = core_modules.given_to(module, core_programs, inputs)
    pairs = [(core_programs.forward, native.forward), (core_programs.backward, native.backward)]
    for ours, theirs in pairs:
        assert ours is not None
        assert theirs is not None
        core_modules.assert_alike(core_modules.run("onnx:cpu", ours, given), core_modules.run("cpu", theirs, given))


# **** randomness ****


@pytest.mark.parametrize("name", ["keep_mask", "uniform", "normal"])
def test_draws_are_the_bits_that_every_backend_draws(device: Device, name: str) -> None:
    for seed in range(4):
        drawn = case(f"hal.random.{name}", seed)
        found = results_of(drawn.program)
        run(device, drawn.program, drawn.inputs, found, drawn.key)
        assert torch.equal(found[0], drawn.expected[0])


def test_each_run_draws_with_its_own_key(device: Device) -> None:
    module = Of(lambda x: F.dropout(x, 0.5))
    program = capture(CaptureRequest(module, [torch.ones(64)], "dropped", lowering=Lowering.CORE)).forward
    for step in range(3):
        key = RandomKey(9, step, 0, 0)
        found = results_of(program)
        run(device, program, [torch.ones(64)], found, key)
        assert torch.equal(found[0] != 0, counter_random.keep_mask(key, 0, (64,), 0.5))


# **** transfers, order, errors, memory ****


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_what_was_written_is_read_back(device: Device, dtype: torch.dtype) -> None:
    queue = device.queue("compute")
    numbers = torch.randint(0, 2, (37,)).to(dtype)
    view = device.alloc(1024).view(64, (37,), dtype)
    back = torch.empty(37, dtype=dtype)
    queue.read(back, view, [queue.write(view, numbers)]).wait()
    assert torch.equal(back, numbers)


def add_one(device: Device) -> tuple[Any, View, Tensor]:
    program = core(lambda x: x + 1, torch.zeros(8))
    memory = torch.zeros(8)
    return device.compile(program), device.adopt(memory), memory


def test_runs_on_one_queue_keep_their_order_and_other_queues_wait_when_told(device: Device) -> None:
    kernel, view, memory = add_one(device)
    other = device.adopt(torch.zeros(8))
    first, second = device.queue("compute"), device.queue("second")
    done: list[Any] = []
    for turn in range(20):
        queue, source, target = (first, view, other) if turn % 2 == 0 else (second, other, view)
        done = [queue.run(KernelCall(kernel, [source], [target]), done)]
    done[0].wait()
    assert torch.equal(memory, torch.full((8,), 20.0))


def test_a_failed_call_fails_what_waits_for_it_with_the_first_error(device: Device) -> None:
    kernel, view, memory = add_one(device)
    host = device.host()

    def fail() -> None:
        raise ValueError("the first error")

    failed = host.run(fail, [], "a task")
    after = device.queue("compute").run(KernelCall(kernel, [view], [view]), [failed])
    with pytest.raises(HalError, match="the first error"):
        after.wait()
    assert torch.equal(memory, torch.zeros(8))
    device.queue("compute").run(KernelCall(kernel, [view], [device.adopt(memory)])).wait()
    assert torch.equal(memory, torch.ones(8))


def test_what_goes_wrong_in_a_run_is_an_error_of_its_event(device: Device) -> None:
    program = core(lambda table, index: table[index], torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64))
    found = results_of(program)
    with pytest.raises(HalError, match=r"indexes with 9 \(aten.index.Tensor\)"):
        run(device, program, [torch.zeros(4, 3), torch.tensor([1, 9])], found)


def test_a_program_is_compiled_once(device: Device) -> None:
    first, second = core(torch.tanh, torch.zeros(3)), core(torch.tanh, torch.zeros(3))
    assert device.compile(first) is device.compile(second)
    assert device.compile(first) is not device.compile(core(torch.tanh, torch.zeros(4)))


def test_a_segment_that_does_not_fit_is_refused_with_the_bytes() -> None:
    device = registry.open("onnx:cpu", 4096)
    try:
        with pytest.raises(OutOfMemory) as refused:
            device.alloc(5000)
        assert refused.value.capacity == 4096
        x = torch.zeros(64, 64)
        with pytest.raises(OutOfMemory, match="workspace"):
            device.compile(core(lambda x: (x.exp() @ x).exp(), x))
    finally:
        device.close()


def test_an_op_without_a_kernel_is_refused_by_name_and_dtype(device: Device) -> None:
    program = core(torch.erf, torch.zeros(3, dtype=torch.float64))
    with pytest.raises(Unsupported, match=r"segment 7.*aten\.erf\.default.*float64") as refused:
        device.compile(program)
    assert (refused.value.op, refused.value.dtype) == ("aten.erf.default", "float64")


def test_an_op_outside_the_table_is_refused_by_name(device: Device) -> None:
    with pytest.raises(Unsupported, match=r"aten\.lgamma\.default"):
        device.compile(core(torch.lgamma, torch.ones(3)))


def test_sessions_have_the_threads_that_pytorch_has(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Options(onnxruntime.SessionOptions):  # type: ignore[misc, name-defined]
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "intra_op_num_threads":
                asked.append(value)
            super().__setattr__(name, value)

    monkeypatch.setattr(onnxruntime, "SessionOptions", Options)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            add_one_kernel, view, _ = add_one(device)
            device.queue("compute").run(KernelCall(add_one_kernel, [view], [view])).wait()
    finally:
        torch.set_num_threads(before)
    assert asked == [1, 2]


# **** providers ****


def test_a_provider_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(Unavailable, match=r"'nosuch'.*It has: cpu"):
        registry.open("onnx:nosuch")


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_provider_that_does_not_start_is_refused_and_not_replaced_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: listed)
    # Here ONNX Runtime makes a session on the CPU, and only warns.
    with pytest.raises(Unavailable, match=r"Asked for CUDAExecutionProvider.* on CPUExecutionProvider"):
        registry.open("onnx:cuda")
    found = {probe.name: probe for probe in registry.devices()}
    assert not found["onnx:cuda"].available
    assert found["onnx:cpu"].available


def test_without_onnxruntime_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(Unavailable, match=r"pip install 'layer-relay\[onnx\]'"):
        registry.open("onnx:cpu")
    found = {probe.name: probe for probe in registry.devices()}
    assert not found["onnx"].available
    assert "onnxruntime" in found["onnx"].reason


def test_probing_finds_the_cpu() -> None:
    found = {probe.name: probe for probe in registry.devices()}
    assert found["onnx:cpu"].available, found["onnx:cpu"].reason


# **** training ****


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.sample("bf16")
def test_half_precision_training_follows_the_cpu(precision: str) -> None:
    ours = small_models.relayed("gpt", "adamw", 5, "onnx:cpu", precision=precision)
    theirs = small_models.relayed("gpt", "adamw", 5, "cpu:discrete", precision=precision)
    # bf16 has 8 bits: what is rounded in another order differs by parts of a thousand.
    assert small_models.loss_error(ours.losses, theirs.losses) < (3e-3 if precision == "bf16" else 5e-4)


def test_the_stash_on_the_host_changes_nothing() -> None:
    ours = small_models.relayed("bert", "sgd", 3, "onnx:cpu", stash="host")
    assert ours.losses == small_models.relayed("bert", "sgd", 3, "onnx:cpu").losses


def test_a_gpu_that_vanishes_leaves_parameters_that_can_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ONNX Runtime words the errors of its providers, which have no class of their own."""

    def vanish(self: Any, *_: Any) -> None:
        raise RuntimeError("CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=here")

    batches = small_models.batches("gpt", 2)
    trainer = relay.Trainer(small_models.build("gpt"), device="onnx:cpu", microbatches=small_models.MICROBATCHES)
    try:
        trainer.step(batches[0])
        before = reference.copy_of(trainer.state_dict())
        monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", vanish)
        with pytest.raises(DeviceLost, match="CUDA failure 700") as caught:
            trainer.step(batches[1])
        assert isinstance(caught.value.__cause__, RuntimeError)
        reference.assert_same_state(trainer.state_dict(), before)
        trainer.save(tmp_path / "saved")
    finally:
        trainer.close()
