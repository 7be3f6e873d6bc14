"""Programs of many ops against the same ops one by one; and binding: accumulation, new buffers, constants.

A device may fuse, reorder its own work and keep what it likes in its own layout; what it may not do is to give other
numbers than the ops alone.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx

from hal.conformance.samples.oracle import assert_near, evaluate
from hal.device import NATIVE, Device, KernelCall
from hal.errors import CompileError, Unsupported
from hal.kit.program_builder import QUEUE, GraphBuilder, fetch, for_device, run, upload
from hal.ops import name_of, spec_of
from hal.program import Program, Role


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def one_by_one(device: Device, program: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a program whose every op is a program of its own, all values going through the host."""
    environment: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            environment[node] = next(given)
        elif node.op == "get_attr":
            environment[node] = program.constants[str(node.target)]
        elif node.op == "output":
            return [environment[value] for value in node.args[0]]
        elif node.target is operator.getitem:
            environment[node] = environment[node.args[0]][node.args[1]]
        else:
            environment[node] = _alone(device, node, environment)
    raise AssertionError("a graph without an output")


def _alone(device: Device, node: fx.Node, environment: dict[fx.Node, Any]) -> Any:
    name = name_of(node.target).replace("reshape", "view")
    builder = GraphBuilder(f"alone {name}")
    operands: dict[fx.Node, fx.Node] = {}
    for operand in node.all_input_nodes:
        spec = spec_of(operand.meta["val"])
        operands[operand] = builder.input(spec.shape, spec.dtype)
    given = [environment[operand] for operand in node.all_input_nodes]
    if not given:
        builder.input((1,))
        given = [torch.zeros(1)]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), operands.__getitem__)
    result = builder.call(name, *args, **kwargs)
    several = isinstance(result, tuple)
    found = run(device, builder.program(result if several else (result,)), given)
    return tuple(found) if several else found[0]


def feed_forward() -> tuple[Program, list[torch.Tensor]]:
    """Layer norm, two products around a GELU, and the sum with what came in: B 3, T 5, H 12."""
    builder = GraphBuilder("feed forward")
    x = builder.input((3, 5, 12))
    scale, shift = builder.input((12,)), builder.input((12,))
    up, down = builder.input((40, 12)), builder.input((12, 40))
    bias = builder.input((40,))
    normal, mean, deviation = builder.call("aten.native_layer_norm.default", x, [12], scale, shift, 1e-5)
    rows = builder.call("aten.view.default", normal, [15, 12])
    wide = builder.call("aten.addmm.default", bias, rows, builder.call("aten.permute.default", up, [1, 0]))
    bent = builder.call("aten.gelu.default", wide, approximate="tanh")
    narrow = builder.call("aten.mm.default", bent, builder.call("aten.permute.default", down, [1, 0]))
    out = builder.call("aten.add.Tensor", x, builder.call("aten.view.default", narrow, [3, 5, 12]))
    inputs = [numbers(*port.shape, seed=position) for position, port in enumerate(builder.inputs)]
    return builder.program([out, mean, deviation, wide]), inputs


def attention() -> tuple[Program, list[torch.Tensor]]:
    """Masked attention over permuted heads: B 2, T 7, A 3, D 4."""
    builder = GraphBuilder("attention")
    query, key, value = (builder.input((2, 7, 12)) for _ in range(3))
    heads = []
    for tensor, order in ((query, [0, 2, 1, 3]), (key, [0, 2, 3, 1]), (value, [0, 2, 1, 3])):
        split = builder.call("aten.permute.default", builder.call("aten.view.default", tensor, [2, 7, 3, 4]), order)
        heads.append(builder.call("aten.view.default", split, [6, 7, 4] if order[2] == 1 else [6, 4, 7]))
    scores = builder.call("aten.mul.Scalar", builder.call("aten.bmm.default", heads[0], heads[1]), 0.5)
    positions = builder.call("aten.arange.start_step", 0, 7, 1, dtype=torch.int64)
    later = builder.call("aten.gt.Tensor", positions, builder.call("aten.unsqueeze.default", positions, 1))
    hidden = builder.call("aten.full.default", [], float("-inf"), dtype=torch.float32)
    masked = builder.call("aten.where.self", later, hidden, scores)
    weights = builder.call("aten._softmax.default", masked, 2, False)
    mixed = builder.call("aten.view.default", builder.call("aten.bmm.default", weights, heads[2]), [2, 3, 7, 4])
    joined = builder.call("aten.view.default", builder.call("aten.permute.default", mixed, [0, 2, 1, 3]), [2, 7, 12])
    inputs = [numbers(2, 7, 12, seed=position) for position in range(3)]
    return builder.program([joined, weights]), inputs


def lookup() -> tuple[Program, list[torch.Tensor]]:
    """An embedding and its gradient: rows that come twice add up."""
    builder = GraphBuilder("lookup")
    table, indices, gradient = builder.input((9, 6)), builder.input((2, 8), torch.int64), builder.input((2, 8, 6))
    rows = builder.call("aten.embedding.default", table, indices)
    zeros = builder.call("aten.full.default", [9, 6], 0.0, dtype=torch.float32)
    scattered = builder.call("aten.index_put.default", zeros, [indices], gradient, True)
    chosen = torch.randint(0, 9, (2, 8), generator=torch.Generator().manual_seed(3))
    return builder.program([rows, scattered]), [numbers(9, 6), chosen, numbers(2, 8, 6)]


UNARY = ["exp", "tanh", "sigmoid", "relu", "neg", "abs", "sin"]
BINARY = ["add", "sub", "mul"]


def chain(seed: int) -> tuple[Program, list[torch.Tensor]]:
    """A random graph of element-wise ops, reductions, broadcasts, views and permutations, bounded at each step."""
    choose = random.Random(seed)
    builder = GraphBuilder(f"chain {seed}")
    shapes = [(4, 6), (6,), (4, 1), (4, 6)]
    values = [builder.input(shape) for shape in shapes]

    def bounded(node: fx.Node) -> fx.Node:
        result: fx.Node = builder.call("aten.clamp.default", node, -3.0, 3.0)
        return result

    for _ in range(25):
        kind = choose.choice(["unary", "unary", "binary", "binary", "binary", "reduce", "turn", "select", "scalar"])
        x = choose.choice(values)
        shape = spec_of(x.meta["val"]).shape
        if kind == "unary":
            made = bounded(builder.call(f"aten.{choose.choice(UNARY)}.default", x))
        elif kind == "scalar":
            made = builder.call("aten.mul.Scalar", x, 0.5)
        elif kind == "reduce" and len(shape) == 2:
            made = builder.call("aten.mean.dim", x, [choose.randrange(2)], True)
        elif kind == "turn" and len(shape) == 2:
            turned = builder.call("aten.permute.default", x, [1, 0])
            flat = builder.call("aten.view.default", turned, [shape[0] * shape[1]])
            made = builder.call("aten.view.default", flat, list(shape))
        elif kind == "select":
            other = builder.call("aten.mul.Scalar", x, -1.0)
            made = builder.call("aten.where.self", builder.call("aten.gt.Scalar", x, 0.1), x, other)
        else:
            made = bounded(builder.call(f"aten.{choose.choice(BINARY)}.Tensor", x, choose.choice(values)))
        values.append(made)
    return builder.program([*values[-3:], values[len(shapes)]]), [numbers(*shape, seed=seed) for shape in shapes]


MADE = {"feed forward": feed_forward, "attention": attention, "lookup": lookup}


@pytest.mark.parametrize("which", MADE)
def test_a_program_gives_what_its_ops_give_one_by_one(device: Device, which: str) -> None:
    program, inputs = MADE[which]()
    found = run(device, program, inputs)
    alone, exact = one_by_one(device, program, inputs), evaluate(program, inputs)
    for ours, theirs, oracle in zip(found, alone, exact, strict=True):
        assert_near(ours, theirs, ours.dtype, f"{which} against its ops")
        assert_near(ours, oracle, ours.dtype, f"{which} against the oracle")


@pytest.mark.parametrize("seed", range(12))
def test_a_random_graph_gives_what_the_oracle_gives(device: Device, seed: int) -> None:
    program, inputs = chain(seed)
    for ours, oracle in zip(run(device, program, inputs), evaluate(program, inputs), strict=True):
        assert_near(ours, oracle, ours.dtype, f"chain {seed}")


def test_one_run_after_another_gives_the_same_bits(device: Device) -> None:
    program, inputs = attention()
    first, second = run(device, program, inputs), run(device, program, inputs)
    assert all(torch.equal(before, after) for before, after in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_rounded_after_each_op(device: Device, dtype: torch.dtype) -> None:
    if dtype not in device.info.storage:
        pytest.skip(f"{dtype} is not in DeviceInfo.storage")
    builder = GraphBuilder("half")
    x, y = builder.input((7, 33), dtype), builder.input((33, 5), dtype)
    product = builder.call("aten.mm.default", x, y)
    wide = builder.call("aten._to_copy.default", product, dtype=torch.float32)
    out = builder.call("aten._to_copy.default", builder.call("aten.exp.default", wide), dtype=dtype)
    program = builder.program([product, wide, out])
    inputs = [numbers(7, 33).mul(0.3).to(dtype), numbers(33, 5).mul(0.3).to(dtype)]
    found_product, found_wide, found = run(device, program, inputs)
    assert torch.equal(found_wide, found_product.float()), "a half-precision value is the same for all its users"
    for ours, oracle in zip((found_product, found), evaluate(program, inputs)[::2], strict=True):
        assert_near(ours, oracle, dtype, f"{dtype}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_an_output_is_added_to_what_is_there_rounded_once(device: Device, dtype: torch.dtype) -> None:
    if dtype not in device.info.storage:
        pytest.skip(f"{dtype} is not in DeviceInfo.storage")
    builder = GraphBuilder("doubled")
    x = builder.input((3, 171), dtype)
    program = builder.program([builder.call("aten.mul.Scalar", x, 2.0), builder.call("aten.neg.default", x)])
    given, before = numbers(3, 171).to(dtype), [numbers(3, 171, seed=1).to(dtype), numbers(3, 171, seed=2).to(dtype)]
    found = run(device, program, [given], before=before)
    wanted = [before[0] + given * 2, before[1] - given]  # exact terms, so there is one rounding and one right answer
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


def test_outputs_are_replaced_or_added_to_one_by_one(device: Device) -> None:
    builder = GraphBuilder("mixed")
    x = builder.input((50,))
    program = for_device(
        builder.program([builder.call("aten.neg.default", x), builder.call("aten.abs.default", x)]), device
    )
    given = numbers(50)
    buffer, (source, added, replaced) = upload(device, [given, torch.ones(50), torch.ones(50)])
    device.queue(QUEUE).run(KernelCall(device.compile(program), [source], [added, replaced], (True, False))).wait()
    found_added, found_replaced = fetch(device, [added, replaced])
    assert torch.equal(found_added, 1 - given)
    assert torch.equal(found_replaced, given.abs())
    buffer.free()


def test_a_new_buffer_may_take_the_memory_of_the_old_one(device: Device) -> None:
    """Running statistics: the old mean is read by an op that comes after the new one is known."""
    builder = GraphBuilder("statistics")
    old, other = builder.input((33,), role=Role.BUFFER), builder.input((33,), role=Role.BUFFER)
    x = builder.input((8, 33))
    mean = builder.call("aten.mean.dim", x, [0], False)
    new = builder.call("aten.add.Tensor", builder.call("aten.mul.Scalar", old, 0.9), mean)
    late = builder.call("aten.add.Tensor", x, old)
    program = builder.program(
        [new, builder.call("aten.mul.Scalar", old, 1.0), late], [Role.BUFFER_UPDATE, Role.BUFFER_UPDATE, Role.VALUE]
    )
    del other
    given = [numbers(33), numbers(33, seed=1), numbers(8, 33)]
    buffer, views = upload(device, [*given, torch.zeros(8, 33)])
    kernel = device.compile(for_device(program, device))
    device.queue(QUEUE).run(KernelCall(kernel, views[:3], [views[0], views[1], views[3]])).wait()
    first, second, result = fetch(device, [views[0], views[1], views[3]])
    assert_near(first, given[0].double() * 0.9 + given[2].double().mean(0), torch.float32, "the new mean")
    assert torch.equal(second, given[0]), "the second buffer takes the first one's old value"
    assert torch.equal(result, given[2] + given[0]), "the result was made with the old mean"
    buffer.free()


def test_constants_travel_with_the_program(device: Device) -> None:
    builder = GraphBuilder("constants")
    x = builder.input((3, 5))
    table = builder.constant(numbers(3, 5, seed=4))
    indices = builder.constant(torch.tensor([2, 0, 2]))
    moved = builder.call("aten.index.Tensor", builder.call("aten.add.Tensor", x, table), [indices])
    program = builder.program([moved])
    given = numbers(3, 5)
    (found,) = run(device, program, [given])
    assert torch.equal(found, (given + numbers(3, 5, seed=4))[[2, 0, 2]])


def test_two_programs_that_differ_in_a_constant_alone_are_two(device: Device) -> None:
    for seed in (1, 2):
        builder = GraphBuilder("same name")
        x = builder.input((5,))
        program = builder.program([builder.call("aten.add.Tensor", x, builder.constant(numbers(5, seed=seed)))])
        assert torch.equal(run(device, program, [torch.zeros(5)])[0], numbers(5, seed=seed))


def test_an_output_may_be_an_input_a_view_or_the_same_value_twice(device: Device) -> None:
    builder = GraphBuilder("passing")
    x = builder.input((3, 4))
    turned = builder.call("aten.permute.default", x, [1, 0])
    twice = builder.call("aten.mul.Scalar", x, 2.0)
    program = builder.program([x, turned, twice, twice], accumulates=False)
    given = numbers(3, 4)
    found = run(device, program, [given])
    for ours, theirs in zip(found, [given, given.t(), given * 2, given * 2], strict=True):
        assert torch.equal(ours, theirs)


def test_inputs_are_not_written_to(device: Device) -> None:
    program, inputs = feed_forward()
    kernel = device.compile(for_device(program, device))
    buffer, views = upload(device, [*inputs, *(torch.zeros(port.shape) for port in program.outputs)])
    device.queue(QUEUE).run(KernelCall(kernel, views[: len(inputs)], views[len(inputs) :])).wait()
    for given, found in zip(inputs, fetch(device, views[: len(inputs)]), strict=True):
        assert torch.equal(given, found)
    buffer.free()


def test_a_wrong_binding_is_refused_at_the_call(device: Device) -> None:
    builder = GraphBuilder("two")
    x, y = builder.input((4,)), builder.input((4,))
    kernel = device.compile(for_device(builder.program([builder.call("aten.add.Tensor", x, y)]), device))
    buffer, (first, second, out) = upload(device, [torch.ones(4)] * 3)
    queue = device.queue(QUEUE)
    with pytest.raises(ValueError, match="two"):
        queue.run(KernelCall(kernel, [first], [out]))
    with pytest.raises(ValueError, match="two"):
        queue.run(KernelCall(kernel, [first, second], []))
    with pytest.raises(ValueError, match="two"):
        queue.run(KernelCall(kernel, [first, second], [out], (True, False)))
    buffer.free()


def test_an_op_outside_the_table_is_refused_by_name_but_by_pytorch(device: Device) -> None:
    """A device for PyTorch's own graphs runs whatever PyTorch can; no other accepts what it cannot mean."""
    builder = GraphBuilder("outside")
    x = builder.input((4,))
    node = builder.graph.call_function(torch.ops.aten.lgamma.default, (x,))
    node.meta = {"val": torch.empty(4, device="meta")}
    program = builder.program([node])
    if NATIVE in device.info.tags:
        assert torch.equal(run(device, program, [torch.ones(4)])[0], torch.zeros(4))
        return
    with pytest.raises((Unsupported, CompileError), match=r"outside.*lgamma"):
        device.compile(program)
