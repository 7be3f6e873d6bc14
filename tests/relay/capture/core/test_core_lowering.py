"""The core lowering: any module's forward and gradients as programs of the closed set of ops, equal to autograd's."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import relay
from hal import registry
from hal.device import Device, KernelCall
from hal.errors import CompileError, Unsupported
from hal.ops import OPS, Kind, calls, check, name_of
from hal.program import Program, Role
from hal.random import keep_mask
from relay.capture import CaptureRequest, Lowering, capture
from relay.models import GPT
from tests.support import reference
from tests.support.zoo import small_models
from tests.support.zoo.core_modules import CASES, CHIP, KEY, Of, assert_alike, given_to, module_of, real, run

aten = torch.ops.aten


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(3)
def test_core_programs_on_numpy_give_what_autograd_gives(case: str) -> None:
    module, inputs = module_of(case)
    core = capture(CaptureRequest(module, inputs, case, lowering=Lowering.CORE))
    native = capture(CaptureRequest(module, inputs, case, strides=False))
    given = given_to(module, core, inputs)
    assert core.forward.inputs == native.forward.inputs
    assert core.forward.outputs == native.forward.outputs
    assert_alike(run("numpy", core.forward, given), run("cpu", native.forward, given))
    assert (core.backward is None) == (native.backward is None)
    if core.backward is not None and native.backward is not None:
        assert core.backward.outputs == native.backward.outputs
        assert_alike(run("numpy", core.backward, given), run("cpu", native.backward, given))


def op_by_op(program: Program, given: dict[Role, Sequence[Tensor]]) -> list[Tensor]:
    """PyTorch runs the same graph op by op in float64."""

    class Interpreter(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target is aten.view.default:
                return args[0].reshape(args[1])
            kwargs = {**kwargs}
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
            return super().call_function(target, args, kwargs)

    arguments: list[Any] = [
        given[port.role][port.index].detach().to(torch.float64 if port.dtype is torch.float32 else port.dtype)
        for port in program.inputs
    ]
    graph = fx.GraphModule(program.constants, program.graph)
    return list(Interpreter(graph).run(*arguments, *([KEY] if program.draws else [])))


@pytest.mark.parametrize(
    "case", ["encoder layer", "causal attention", "masked attention", "batch norm", "cross entropy", "grouped queries"]
)
def test_a_program_gives_on_the_oracle_what_pytorch_gives_op_by_op(case: str) -> None:
    module, inputs = module_of(case)
    captured = capture(CaptureRequest(module, inputs, case, lowering=Lowering.CORE))
    given = given_to(module, captured, inputs)
    for program in (captured.forward, captured.backward):
        assert program is not None
        for mine, theirs in zip(run("numpy:float64", program, given), op_by_op(program, given), strict=True):
            torch.testing.assert_close(mine, theirs.to(mine.dtype), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("which", ["gpt", "bert", "llama"])
def test_a_transformer_layer_has_no_copies_and_few_ops(which: str) -> None:
    model = small_models.build(which)
    layer = (model.blocks if isinstance(model, GPT) else model.layers)[0]
    shape = (2, small_models.LENGTH, small_models.HIDDEN)
    tables = [torch.ones(small_models.LENGTH, small_models.HIDDEN // small_models.HEADS)] * 2
    further = {"gpt": [], "bert": [torch.zeros(2, 1, 1, small_models.LENGTH)], "llama": tables}[which]
    inputs = [torch.zeros(shape, requires_grad=True), *further]
    captured = capture(CaptureRequest(Of(layer), inputs, which, lowering=Lowering.CORE))
    program = captured.backward
    assert program is not None
    names = [name_of(node.target) for node in calls(program.graph)]
    assert set(names) <= set(OPS)
    kinds = [OPS[name].kind for name in names]
    assert kinds.count(Kind.MATMUL) <= 26
    assert len(names) < 260
    assert program.flops > 0
    assert program.moved > program.workspace > 0


def test_equal_ops_are_there_once() -> None:
    captured = capture(
        CaptureRequest(Of(lambda x: x.exp() * 2 + x.exp() * 2), [real(3, 4)], "twice", lowering=Lowering.CORE)
    )
    names = [name_of(node.target) for node in calls(captured.forward.graph)]
    assert names == ["aten.exp.default", "aten.mul.Scalar", "aten.add.Tensor"]


def test_what_computes_nothing_is_not_there() -> None:
    def idle(x: Tensor) -> Tensor:
        y = x.clone().detach() + torch.zeros(()) * 2.0 * x.transpose(0, 1).transpose(0, 1).contiguous()
        return (y.view(4, 3).view(3, 4).expand(3, 4)[:] * 1.0).float() + torch.full((), 2.0) * 3.0

    captured = capture(CaptureRequest(Of(idle), [real(3, 4)], "idle", lowering=Lowering.CORE))
    names = [name_of(node.target) for node in calls(captured.forward.graph)]
    assert names == ["aten.mul.Scalar", "aten.add.Tensor", "aten.view.default", "aten.add.Scalar"] or names == [
        "aten.mul.Scalar",
        "aten.add.Tensor",
        "aten.add.Scalar",
    ]


def test_equal_layers_have_one_fingerprint_and_others_another() -> None:
    def fingerprint(layer: nn.Module) -> str:
        program = capture(CaptureRequest(Of(layer), [real(2, 6, 8)], "layer", lowering=Lowering.CORE)).backward
        assert program is not None
        return program.fingerprint

    first, second, other = (nn.TransformerEncoderLayer(8, 2, 16, p, batch_first=True) for p in (0.1, 0.1, 0.2))
    assert fingerprint(first) == fingerprint(second) != fingerprint(other)


def drawn(program: Program) -> list[tuple[Any, ...]]:
    """(op number, shape, probability) of each mask."""
    return sorted(node.args[1:] for node in program.graph.nodes if node.target is keep_mask)


@pytest.mark.parametrize("case", ["encoder layer", "multi-head attention", "attention with dropout"])
def test_masks_have_the_same_numbers_in_every_program_and_lowering(case: str) -> None:
    module, inputs = module_of(case)
    core = capture(CaptureRequest(module, inputs, case, lowering=Lowering.CORE))
    native = capture(CaptureRequest(module, inputs, case, strides=False))
    assert core.backward is not None
    assert native.backward is not None
    assert drawn(core.forward) == drawn(native.forward) != []
    # What the gradient does not need of the recompute is not drawn, and what it needs is the same.
    assert set(drawn(core.backward)) <= set(drawn(core.forward))
    assert drawn(core.backward) == drawn(native.backward)


class Constant(nn.Module):
    """A segment that is given nothing, as a prologue is that only makes a mask."""

    def forward(self) -> tuple[Tensor, ...]:
        return (torch.ones(3).cumsum(0) * 2,)


@pytest.mark.parametrize("name", ["cpu", "cpu:discrete", "numpy", "sim"])
def test_a_program_without_inputs_runs(name: str) -> None:
    lowering = Lowering.CORE if name == "numpy" else Lowering.NATIVE
    program = capture(CaptureRequest(Constant(), [], "constant", lowering=lowering)).forward
    assert program.inputs == ()
    device = registry.open(name)
    queue = device.queue("compute")
    view = device.alloc(64).view(0, (3,), torch.float32)
    found = torch.zeros(3)
    ran = queue.run(KernelCall(device.compile(program), [], [view]))
    queue.read(found, view, [ran]).wait()
    device.close()
    assert found.tolist() == [2.0, 4.0, 6.0]


def test_half_precision_programs_cast_in_the_open() -> None:
    layer = Of(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True))
    for compute in (torch.bfloat16, torch.float16):
        captured = capture(
            CaptureRequest(layer, [real(2, 6, 8)], "layer", compute_dtype=compute, lowering=Lowering.CORE)
        )
        for program in (captured.forward, captured.backward):
            assert program is not None
            check(program, CHIP)  # the operands of every op have one dtype
            products = [node for node in calls(program.graph) if node.target in (aten.mm.default, aten.addmm.default)]
            assert {node.meta["val"].dtype for node in products} == {compute}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_training_on_numpy_follows_the_cpu(precision: str) -> None:
    ours = small_models.relayed("gpt", "adamw", 5, "numpy", precision=precision)
    theirs = small_models.relayed("gpt", "adamw", 5, "cpu:discrete", precision=precision)
    # bf16 has 8 bits: what is rounded in another order differs by parts of a thousand.
    assert small_models.loss_error(ours.losses, theirs.losses) < (3e-3 if precision == "bf16" else 5e-4)


class Gamma(nn.Module):
    """A layer with an op that is not in the table."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        return torch.lgamma(self.inner(value).exp())


def test_an_op_outside_the_table_is_refused_with_its_layer_before_anything_runs() -> None:
    modules = [nn.Linear(4, 4), Gamma(), nn.Linear(4, 1)]
    before = reference.copy_of(nn.Sequential(*modules).state_dict())
    trainer = relay.Trainer(modules, loss=F.mse_loss, device="numpy", optimizer=relay.SGD(lr=1.0))
    try:
        with pytest.raises(Unsupported, match=r"aten\.lgamma\.default") as refused:
            trainer.step((torch.ones(4, 4), torch.ones(4, 1)))
        assert refused.value.op == "aten.lgamma.default"
        assert refused.value.device == "numpy"
        assert "layer '1' forward" in str(refused.value)
        reference.assert_same_state(trainer.state_dict(), before)
    finally:
        trainer.close()


def test_a_device_may_lack_an_op_of_the_table() -> None:
    program = capture(CaptureRequest(Of(torch.tanh), [real(3)], "layer 7", lowering=Lowering.CORE)).forward
    check(program, CHIP)
    with pytest.raises(Unsupported, match=r"layer 7.*aten\.tanh\.default.*'chip'"):
        check(program, CHIP, frozenset({"aten.tanh.default"}))


def test_a_malformed_program_is_refused() -> None:
    program = capture(CaptureRequest(Of(torch.tanh), [real(3)], "layer", lowering=Lowering.CORE)).forward
    node = calls(program.graph)[0]
    node.meta = {"val": torch.empty(4, device="meta")}
    with pytest.raises(CompileError, match="tanh"):
        check(program, CHIP)


def test_native_devices_still_get_native_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Program] = []
    original = type(registry.open("cpu")).compile

    def compile(device: Device, program: Program) -> Any:
        compiled.append(program)
        return original(device, program)

    monkeypatch.setattr(type(registry.open("cpu")), "compile", compile)
    small_models.relayed("gpt", "sgd", 1, "cpu")
    targets = {node.target for program in compiled for node in program.graph.nodes}
    assert aten.native_layer_norm_backward.default in targets
