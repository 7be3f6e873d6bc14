"""The OpenCL device: its ops against the oracle, its training against PyTorch, and what it says when it cannot."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

from backends.opencl import OpenClBackend, platforms
from backends.opencl.kernels import OpenClKernel
from hal import registry
from hal.conformance.samples.op_samples import case
from hal.device import Device, KernelCall
from hal.errors import DeviceLost, HalError, OutOfMemory, Unsupported
from hal.ops import OPS
from hal.program import Port, Program, Role
from hal.random import RandomKey, keep_mask, normal, uniform
from tests.support.zoo import small_models


@pytest.fixture(scope="module")
def needs_opencl() -> None:
    """Probing runs kernels, so that it waits for the first test that needs it."""
    probes = OpenClBackend().probe()
    if not any(probe.available for probe in probes):
        reasons = "; ".join(f"{probe.name}: {probe.reason}" for probe in probes)
        pytest.skip(f"no OpenCL device works here: {reasons}")


@pytest.fixture(scope="module")
def device(needs_opencl: None) -> Iterator[Device]:
    opened = registry.open("opencl")
    yield opened
    opened.close()


def put(device: Device, tensor: torch.Tensor) -> Any:
    buffer = device.alloc(tensor.nbytes)
    view = buffer.view(0, tuple(tensor.shape), tensor.dtype)
    device.queue("compute").write(view, tensor).wait()
    return view


def run(
    device: Device, program: Program, inputs: Any, key: Any = None, onto: float | None = None
) -> list[torch.Tensor]:
    """The program's outputs; with `onto`, added to that number."""
    queue = device.queue("compute")
    views = [put(device, tensor) for tensor in inputs]
    results = [device.alloc(port.size).view(0, port.shape, port.dtype) for port in program.outputs]
    for view in results:
        queue.fill(view, onto or 0.0).wait()
    accumulate = () if onto is None else (True,) * len(results)
    queue.run(KernelCall(device.compile(program), views, results, accumulate, key)).wait()
    tensors = [torch.empty(view.shape, dtype=view.dtype) for view in results]
    for tensor, view in zip(tensors, results, strict=True):
        queue.read(tensor, view).wait()
    return tensors


def close_to(mine: torch.Tensor, theirs: torch.Tensor, rtol: float, atol: float) -> None:
    if theirs.dtype.is_floating_point:
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=rtol, atol=atol, equal_nan=True)
    else:
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", sorted(OPS))
def test_an_op_gives_what_pytorch_gives(name: str, device: Device) -> None:
    drawn = case(name, 6)
    for mine, theirs in zip(run(device, drawn.program, drawn.inputs, drawn.key), drawn.expected, strict=True):
        close_to(mine, theirs, 3e-5, 3e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["add.Tensor", "gelu.default", "sum.dim_IntList", "_softmax.default", "bmm.default", "embedding.default"]
)
def test_half_precision_is_stored_and_computed_in_float32(name: str, dtype: torch.dtype, device: Device) -> None:
    drawn = case(f"aten.{name}", 4, dtype)
    step = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11
    for mine, theirs in zip(run(device, drawn.program, drawn.inputs, drawn.key), drawn.expected, strict=True):
        assert mine.dtype is dtype
        close_to(mine, theirs, 4 * step, 4 * step)


@pytest.mark.parametrize("name", ["mm.default", "sum.dim_IntList", "mul.Tensor", "index_put.default"])
def test_an_output_that_accumulates_is_added_to_what_is_there(name: str, device: Device) -> None:
    drawn = case(f"aten.{name}", 3)
    if not drawn.expected[0].dtype.is_floating_point:
        pytest.skip("this sample is of integers")
    for mine, theirs in zip(run(device, drawn.program, drawn.inputs, drawn.key, onto=2.0), drawn.expected, strict=True):
        close_to(mine, theirs + 2, 3e-5, 3e-6)


def test_every_half_number_and_its_neighbours_are_rounded_as_pytorch_rounds_them(device: Device) -> None:
    bits = torch.arange(2**16, dtype=torch.int32)
    for dtype in (torch.float16, torch.bfloat16):
        exact = bits.to(torch.int16).view(dtype).float()
        after = torch.nextafter(exact, torch.full_like(exact, torch.inf))
        middle = exact + (torch.roll(exact, -1) - exact) / 2
        values = torch.cat([exact, after, middle, torch.tensor([65519.9, 65520.0, 3.4e38, -3.4e38, 1e-8])])
        program = cast_program(len(values), dtype)
        mine = run(device, program, [values])[0]
        torch.testing.assert_close(mine, values.to(dtype), rtol=0, atol=0, equal_nan=True)


def cast_program(count: int, dtype: torch.dtype) -> Program:
    graph = fx.Graph()
    given = graph.placeholder("given")
    given.meta["val"] = torch.empty(count, device="meta")
    result = graph.call_function(torch.ops.aten._to_copy.default, (given,), {"dtype": dtype})
    result.meta["val"] = torch.empty(count, dtype=dtype, device="meta")
    graph.output((result,))
    ports = Port(Role.VALUE, 0, (count,), torch.float32), Port(Role.VALUE, 0, (count,), dtype)
    return Program("cast", graph, (ports[0],), (ports[1],), {}, False, 0, 0, 0, f"cast {count} {dtype}")


def product_program(left: tuple[int, int], right: tuple[int, int], transposed: bool) -> Program:
    graph = fx.Graph()
    nodes = [graph.placeholder("left"), graph.placeholder("right")]
    for node, shape in zip(nodes, (left, right), strict=True):
        node.meta["val"] = torch.empty(shape, device="meta")
    operand = nodes[1]
    if transposed:
        operand = graph.call_function(torch.ops.aten.permute.default, (nodes[1], [1, 0]))
        operand.meta["val"] = torch.empty(right[::-1], device="meta")
    shape = (left[0], operand.meta["val"].shape[1])
    result = graph.call_function(torch.ops.aten.mm.default, (nodes[0], operand))
    result.meta["val"] = torch.empty(shape, device="meta")
    graph.output((result,))
    ports = [Port(Role.VALUE, position, shape, torch.float32) for position, shape in enumerate((left, right))]
    out = Port(Role.VALUE, 0, shape, torch.float32)
    return Program("product", graph, tuple(ports), (out,), {}, False, 0, 0, 0, f"product {left} {right} {transposed}")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (13, 300, 33), (64, 65, 129), (100, 17, 31)])
def test_products_are_right_at_the_edges_of_their_tiles(
    sizes: tuple[int, int, int], transposed: bool, device: Device
) -> None:
    rows, depth, columns = sizes
    left = torch.randn(rows, depth)
    right = torch.randn(columns, depth) if transposed else torch.randn(depth, columns)
    program = product_program((rows, depth), tuple(right.shape), transposed)
    expected = left.double() @ (right.T if transposed else right).double()
    close_to(run(device, program, [left, right])[0], expected, 1e-5, 1e-5)


WITH_WORK_GROUPS = (
    "_softmax.default native_layer_norm.default sum.dim_IntList amax.default any.dim mm.default bmm.default "
    "index_put.default embedding.default cumsum.default"
)


@pytest.mark.parametrize("name", WITH_WORK_GROUPS.split())
def test_kernels_for_gpus_give_the_same(name: str, needs_opencl: None) -> None:
    device: Any = registry.open("opencl")
    device.traits = dataclasses.replace(device.traits, lanes=8)
    try:
        for seed in (1, 4):
            drawn = case(f"aten.{name}", seed)
            for mine, theirs in zip(run(device, drawn.program, drawn.inputs, drawn.key), drawn.expected, strict=True):
                close_to(mine, theirs, 3e-5, 3e-6)
    finally:
        device.close()


def test_masks_are_the_same_bits_as_everywhere(device: Device) -> None:
    key = RandomKey(seed=2**40 + 7, step=5, segment=3, microbatch=2)
    for count in (1, 4, 1023, 4096):
        for draw, args in ((keep_mask, (0.3,)), (uniform, ()), (normal, ())):
            graph = fx.Graph()
            node = graph.call_function(draw, (graph.placeholder("key"), 9, [count], *args))
            expected = draw(key, 9, [count], *args)
            node.meta["val"] = expected.to("meta")
            graph.output((node,))
            port = Port(Role.VALUE, 0, (count,), expected.dtype)
            name = f"{draw.__name__} {count}"
            mine = run(device, Program(name, graph, (), (port,), {}, True, 0, 0, 0, name), [], key)[0]
            if draw is normal:
                close_to(mine, expected, 1e-5, 1e-6)
            else:
                assert torch.equal(mine, expected)


def test_an_embedding_gradient_is_the_same_bits_each_time(device: Device) -> None:
    index = torch.randint(0, 5, (200,), generator=torch.Generator().manual_seed(1))
    values, zeros = torch.randn(200, 96), torch.zeros(5, 96)
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("zeros", "index", "values")]
    for node, tensor in zip(nodes, (zeros, index, values), strict=True):
        node.meta["val"] = tensor.to("meta")
    result = graph.call_function(torch.ops.aten.index_put.default, (nodes[0], [nodes[1]], nodes[2], True))
    result.meta["val"] = zeros.to("meta")
    graph.output((result,))
    ports = [Port(Role.VALUE, i, tuple(t.shape), t.dtype) for i, t in enumerate((zeros, index, values))]
    program = Program("gradient", graph, tuple(ports), (ports[0],), {}, False, 0, 0, 0, "embedding gradient")
    first = run(device, program, [zeros, index, values])[0]
    close_to(first, zeros.double().index_add(0, index, values.double()), 1e-5, 1e-5)
    assert all(torch.equal(run(device, program, [zeros, index, values])[0], first) for _ in range(3))


# **** memory, order, errors ****


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_what_is_written_is_read_back_at_odd_sizes_and_offsets(dtype: torch.dtype, device: Device) -> None:
    tensor = torch.randint(0, 2, (37,)).to(dtype)
    buffer = device.alloc(4096)
    view = buffer.view(24 * dtype.itemsize, (37,), dtype)
    queue, other = device.queue("compute"), device.queue("copies")
    back = torch.empty_like(tensor)
    written = queue.write(view, tensor)
    other.read(back, view, [written]).wait()
    assert torch.equal(back, tensor)
    buffer.free()
    buffer.free()


def test_queues_wait_for_each_other_and_for_the_host(device: Device) -> None:
    view = put(device, torch.zeros(1 << 16))
    queues = [device.queue(f"queue {number}") for number in range(3)]
    host = device.host()
    event: Any = None
    for number in range(60):
        queue = queues[number % 3]
        wait = [event] if event is not None else []
        if number % 7 == 3:
            wait = [host.run(lambda: None, wait)]
        event = queue.fill(view, float(number), wait)
    back = torch.empty(1 << 16)
    queues[0].read(back, view, [event]).wait()
    assert torch.equal(back, torch.full_like(back, 59.0))
    host.close()


def test_the_first_error_reaches_all_that_wait_and_nobody_else(device: Device) -> None:
    view = put(device, torch.zeros(4))
    host = device.host()

    def fail() -> None:
        raise HalError("the first of all")

    failed = host.run(fail)
    second = device.queue("compute").fill(view, 1.0, [failed])
    third = device.queue("copies").fill(view, 2.0, [second])
    for event in (second, third):
        with pytest.raises(HalError, match="the first of all"):
            event.wait()
    device.queue("compute").fill(view, 3.0).wait()
    back = torch.empty(4)
    device.queue("compute").read(back, view).wait()
    assert torch.equal(back, torch.full((4,), 3.0))
    host.close()


def test_capacity_is_held_and_freed_memory_counts_no_more(needs_opencl: None) -> None:
    device = registry.open("opencl", capacity=1000)
    try:
        buffer = device.alloc(800)
        with pytest.raises(OutOfMemory, match="201 bytes requested"):
            device.alloc(201)
        buffer.free()
        assert (device.memory().in_use, device.memory().peak) == (0, 800)
        with pytest.raises(OutOfMemory, match="workspace"):
            device.compile(product_program((64, 64), (64, 64), False))
    finally:
        device.close()
        device.close()


def test_equal_programs_share_a_kernel_and_equal_kernels_are_compiled_once(needs_opencl: None) -> None:
    device: Any = registry.open("opencl")
    try:
        first = device.compile(product_program((5, 6), (6, 7), False))
        built = device.library.built
        assert device.compile(product_program((5, 6), (6, 7), False)) is first
        twin = product_program((5, 6), (6, 7), False)
        device.compile(Program(**{**twin.__dict__, "fingerprint": "another layer"}))
        assert device.library.built == built > 0
    finally:
        device.close()


def test_an_op_that_is_not_in_the_table_is_named(device: Device) -> None:
    graph = fx.Graph()
    given = graph.placeholder("given")
    result = graph.call_function(torch.ops.aten.erfinv.default, (given,))
    for node in (given, result):
        node.meta["val"] = torch.empty(3, device="meta")
    graph.output((result,))
    port = Port(Role.VALUE, 0, (3,), torch.float32)
    program = Program("layer 7", graph, (port,), (port,), {}, False, 0, 0, 0, "erfinv")
    with pytest.raises(Unsupported, match=r"'layer 7' needs the op aten\.erfinv") as caught:
        device.compile(program)
    assert caught.value.device == "opencl"


def test_a_dtype_that_is_not_there_is_named(device: Device) -> None:
    with pytest.raises(Unsupported, match=r"'cast' needs .*complex64"):
        device.compile(cast_program(3, torch.complex64))


def test_a_device_without_double_says_so_with_the_layer(needs_opencl: None) -> None:
    device = registry.open("opencl")
    try:
        without = {"storage": device.info.storage - {torch.float64}, "compute": device.info.compute - {torch.float64}}
        device.info = dataclasses.replace(device.info, **without)
        with pytest.raises(Unsupported, match=r"'cast' needs .*float64.*no cl_khr_fp64\. Use float32") as caught:
            device.compile(cast_program(3, torch.float64))
        assert (caught.value.op, caught.value.dtype) == ("aten._to_copy.default", "torch.float64")
    finally:
        device.close()


def test_a_driver_that_does_not_know_the_processor_says_which_one_does(
    monkeypatch: pytest.MonkeyPatch, needs_opencl: None
) -> None:
    import pyopencl

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("clBuildProgram failed\n\nerror: unknown target CPU 'generic'\n")

    monkeypatch.setattr(pyopencl.Program, "build", refuse)
    reason = platforms.broken(platforms.find()[0])
    assert "does not work: error: unknown target CPU 'generic'. Debian's PoCL" in reason


def test_products_of_other_sizes_are_the_same_kernels(needs_opencl: None) -> None:
    device: Any = registry.open("opencl")
    try:
        device.compile(product_program((24, 30), (30, 40), False))
        built = device.library.built
        program = product_program((48, 31), (31, 72), False)
        left, right = torch.randn(48, 31), torch.randn(31, 72)
        close_to(run(device, program, [left, right])[0], left.double() @ right.double(), 1e-5, 1e-5)
        assert device.library.built == built > 0
    finally:
        device.close()


# **** training ****


def test_a_device_that_vanishes_leaves_parameters_that_can_be_saved(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, needs_opencl: None
) -> None:
    def vanish(*_: Any) -> Any:
        failure = RuntimeError("clEnqueueNDRangeKernel failed: DEVICE_NOT_AVAILABLE")
        failure.code = -2  # type: ignore[attr-defined]
        raise failure

    model = small_models.build("gpt")
    trainer = small_models.relay.Trainer(model, device="opencl", microbatches=small_models.MICROBATCHES)
    batches = small_models.batches("gpt", 2)
    try:
        trainer.step(batches[0])
        before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
        monkeypatch.setattr(OpenClKernel, "enqueue", vanish)
        with pytest.raises(DeviceLost, match="stopped answering"):
            trainer.step(batches[1])
        after = trainer.state_dict()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        torch.save(after, tmp_path / "saved")
        assert (tmp_path / "saved").exists()
    finally:
        trainer.close()
