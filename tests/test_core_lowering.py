"""The core lowering: any module's forward and gradients as programs of the closed set of ops, equal to autograd's."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import reference
import small_models
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import relay
from hal import registry
from hal.device import Device, DeviceInfo
from hal.errors import CompileError, Unsupported
from hal.kernel import Program, Role
from hal.ops import OPS, Kind, calls, check, name_of
from hal.random import RandomKey, keep_mask
from relay.capture import Captured, Lowering, capture
from relay.models import GPT

aten = torch.ops.aten
KEY = RandomKey(1, 2, 3, 4)
HALVES = frozenset({torch.float16, torch.bfloat16})
COMPUTED = frozenset({torch.float32, torch.int64, torch.bool})
CHIP = DeviceInfo("chip", "holds halves, and computes in float32", frozenset(), COMPUTED | HALVES, COMPUTED)


class Of(nn.Module):
    """A function, or a module's first output, as a segment."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = self.function(*inputs)
        return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)[:1]


def real(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape))
    return torch.randn(shape, generator=generator, requires_grad=True)


def whole(*shape: int, below: int = 3) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(1))


def rows(function: Callable[..., Any]) -> tuple[Callable[[], nn.Module], list[Tensor]]:
    """A case: a function of numbers of shape (2, 6, 8)."""
    return lambda: Of(function), [real(2, 6, 8)]


def made(build: Callable[[], nn.Module], *inputs: Tensor) -> tuple[Callable[[], nn.Module], list[Tensor]]:
    """A case: a module and its inputs."""
    return lambda: Of(build()), list(inputs)


def attention(**options: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.scaled_dot_product_attention(x, x * 0.5, x.cos(), **options)


MASK = torch.ones(6, 6, dtype=torch.bool).tril()
HEADS = real(2, 4, 6, 8)
IMAGE = real(2, 4, 7, 6)

CASES: dict[str, tuple[Callable[[], nn.Module], list[Tensor]]] = {
    "encoder layer": made(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), real(2, 6, 8)),
    "encoder layer, gelu, norm first": made(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.1, "gelu", batch_first=True, norm_first=True), real(2, 6, 8)
    ),
    "multi-head attention": made(lambda: nn.MultiheadAttention(8, 2, 0.2, batch_first=True), *[real(2, 6, 8)] * 3),
    "causal attention": made(lambda: attention(is_causal=True), HEADS),
    "attention with dropout": made(lambda: attention(dropout_p=0.3), HEADS),
    "masked attention": made(lambda: attention(attn_mask=MASK), HEADS),
    "attention to nothing": made(lambda: attention(attn_mask=MASK & (torch.arange(6) > 1)), HEADS),
    "grouped queries": made(
        lambda: lambda x: F.scaled_dot_product_attention(x, x[:, :2], x[:, 2:], is_causal=True, enable_gqa=True), HEADS
    ),
    "cross entropy": made(
        lambda: nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.1), real(9, 5), whole(9, below=5)
    ),
    "cross entropy of images": made(nn.CrossEntropyLoss, real(3, 5, 4), whole(3, 4, below=5)),
    "cross entropy by classes": made(
        lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.5, 2.0])), real(9, 3), whole(9)
    ),
    "embedding": made(lambda: nn.Embedding(11, 6, padding_idx=2), whole(3, 5, below=11)),
    "gelu by tanh": rows(lambda x: F.gelu(x, approximate="tanh")),
    "silu and sigmoid": rows(lambda x: F.silu(x) * x.sigmoid()),
    "tanh, softplus, mish": rows(lambda x: x.tanh() + F.softplus(x) + F.mish(x)),
    "elu, leaky relu, relu6": rows(lambda x: F.elu(x) + F.leaky_relu(x) + F.relu6(x * 4)),
    "hard swish, log sigmoid": rows(lambda x: F.hardswish(x * 2) + F.logsigmoid(x)),
    "gated linear unit": rows(F.glu),
    "rms norm": made(lambda: nn.RMSNorm(8), real(2, 6, 8)),
    "layer norm without parameters": rows(lambda x: F.layer_norm(x, (6, 8))),
    "group norm": made(lambda: nn.GroupNorm(3, 6), real(2, 6, 8)),
    "batch norm": made(lambda: nn.BatchNorm1d(6), real(4, 6, 8)),
    "batch norm of images": made(lambda: nn.BatchNorm2d(4), IMAGE),
    "batch norm at rest": made(lambda: nn.BatchNorm1d(6).eval(), real(4, 6, 8)),
    "convolution": made(lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), IMAGE),
    "convolution in time": made(lambda: nn.Conv1d(6, 5, 3, dilation=2), real(2, 6, 8)),
    "transposed convolution": made(lambda: nn.ConvTranspose2d(4, 3, 3, stride=2, output_padding=1), IMAGE),
    "pooling": made(lambda: nn.MaxPool2d(3, 2, 1), IMAGE),
    "dilated pooling": made(lambda: nn.MaxPool2d(2, 1, 1, dilation=2), IMAGE),
    "average pooling": made(lambda: nn.AvgPool2d(3, 2, 1), IMAGE),
    "adaptive pooling": made(lambda: nn.AdaptiveAvgPool2d(1), IMAGE),
    "losses": made(
        lambda: lambda x, y: F.mse_loss(x, y) + F.l1_loss(x, y) + F.smooth_l1_loss(x, y) + F.huber_loss(x, y),
        real(5, 4),
        real(5, 4).detach().sin(),
    ),
    "binary cross entropy": made(nn.BCEWithLogitsLoss, real(5, 4), real(5, 4).detach().sigmoid().round()),
    "divergence": made(lambda: nn.KLDivLoss(reduction="batchmean"), real(5, 4), real(5, 4).detach().softmax(-1)),
    "scans": rows(lambda x: x.cumsum(1) + x.sigmoid().cumprod(2)),
    "extremes": rows(lambda x: x.amax(-1) + x.max(-1)[0] - x.amin(-1) + x.max()),
    "chosen and sorted": rows(lambda x: x.topk(3, -1)[0].sum() + x.sort(1, descending=True)[0]),
    "arguments of extremes": rows(lambda x: x * x.argmax(-1, keepdim=True) + x.argmin()),
    "triangles": rows(lambda x: x.tril() + x.triu(1)),
    "lookups": made(
        lambda: lambda x, i: x[i].sum(0) + x.index_select(0, i).prod(0) + x[1, i].sum(0),
        real(3, 6, 8),
        torch.tensor([2, 0, 2]),
    ),
    "gathered": made(lambda: lambda x, i: x.gather(1, i), real(2, 5), whole(2, 4, below=5)),
    "scattered": made(
        lambda: lambda x, i: torch.zeros(2, 9).scatter_add(1, i, x) + torch.zeros(2, 9).index_add(1, i[0], x),
        real(2, 5),
        whole(2, 5, below=9),
    ),
    "products of batches": rows(lambda x: torch.einsum("bij,bkj->bik", x, x.exp()) @ x),
    "moments": rows(lambda x: x.var(-1) + x.std((0, 2)) + x.mean() + x.norm()),
    "normalised": rows(lambda x: F.normalize(x) + F.cosine_similarity(x, x.flip(-1), -1)[..., None]),
    "sums of exponents": rows(lambda x: x.logsumexp(-1) + x.log_softmax(0)[0].sum(-1)),
    "trigonometry": rows(lambda x: x.sin() * x.cos() + torch.atan2(x, x.exp()) + (x * 0.1).tan()),
    "powers": rows(lambda x: x**3 + x.abs() ** 1.5 + 2.0**x + x.exp() ** x + x.exp().sqrt() + x.exp().rsqrt()),
    "logarithms": rows(lambda x: x.exp().log() + x.abs().log1p() + x.expm1() + x.erf()),
    "numbers on either side": rows(lambda x: 1 - x + 3 * x / 7 - 2 / (x.exp() + 1) - (x - 4)),
    "maxima of two": rows(lambda x: torch.maximum(x, x * 2) + torch.minimum(x, x.sin())),
    "clamped": rows(lambda x: x.clamp(-1, 1) + x.clamp(min=0.1) + x.clamp(torch.zeros(8), torch.ones(8))),
    "turned": rows(lambda x: x.roll(1, 1) + x.flip(0, 2) + torch.cat(x.chunk(2, -1)[::-1], -1)),
    "chosen by conditions": rows(lambda x: torch.where(x > 0, x, -x * 2) * ((x > 0) & (x < 1) | ~(x == 2))),
    "filled and masked": rows(lambda x: x.masked_fill(x > 0.5, -math.inf).softmax(-1)),
    "repeated": rows(lambda x: x.repeat(2, 1, 3).sum(0) + x.repeat_interleave(3, 2).sum(0)),
    "padded": rows(lambda x: F.pad(x, (1, -1, 2, 0), value=0.5)),
    "windows": rows(lambda x: x.unfold(1, 3, 2).sum(-1)),
    "diagonals": rows(lambda x: x.diagonal(0, 1, 2).sum() + x.diagonal(1, 2, 1)),
    "enlarged": made(lambda: lambda x: F.interpolate(x, scale_factor=2.0), IMAGE),
    "integers": made(lambda: lambda x, i: x * (i * 2 + 1 - i // 2) + (i > 0).sum(), real(2, 5), whole(2, 5)),
    "positions": rows(lambda x: x * torch.outer(torch.arange(6.0), 1.0 / 10000 ** (torch.arange(8) / 8)).cos()),
    "random numbers": rows(lambda x: x * torch.rand(2, 1, 8) + torch.randn_like(x)),
    "dropout of channels": made(lambda: nn.Dropout1d(0.5), real(2, 6, 8)),
    "lstm": made(lambda: nn.LSTM(8, 4, batch_first=True), real(2, 6, 8)),
    "gru": made(lambda: nn.GRU(8, 4, batch_first=True), real(2, 6, 8)),
}


def module_of(case: str) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    build, inputs = CASES[case]
    return build(), inputs


def run(name: str, program: Program, given: dict[Role, Sequence[Tensor]]) -> list[Tensor]:
    """Run a program on the device of that name, its inputs by role and index."""
    device = registry.open(name)
    try:
        queue = device.queue("compute")

        def place(shape: Sequence[int], dtype: torch.dtype) -> Any:
            size = math.prod(shape) * dtype.itemsize
            return device.alloc(max(size, 1)).view(0, shape, dtype)

        inputs = [place(port.shape, port.dtype) for port in program.inputs]
        written = [
            queue.write(view, given[port.role][port.index].detach().contiguous())
            for view, port in zip(inputs, program.inputs, strict=True)
        ]
        outputs = [place(port.shape, port.dtype) for port in program.outputs]
        ran = queue.run(device.compile(program), inputs, outputs, (), KEY, written)
        results = [torch.empty(port.shape, dtype=port.dtype) for port in program.outputs]
        for result, view in zip(results, outputs, strict=True):
            queue.read(result, view, [ran]).wait()
        return results
    finally:
        device.close()


def given_to(module: nn.Module, captured: Captured, inputs: Sequence[Tensor]) -> dict[Role, Sequence[Tensor]]:
    ports = captured.backward.inputs if captured.backward else ()
    generator = torch.Generator().manual_seed(9)
    seeds = {port.index: torch.randn(port.shape, generator=generator) for port in ports if port.role is Role.SEED}
    return {
        Role.PARAMETER: [module.get_parameter(names[0]) for names in captured.parameter_names],
        Role.BUFFER: [module.get_buffer(name) for name in captured.buffer_names],
        Role.VALUE: inputs,
        Role.SEED: [seeds.get(index, torch.empty(0)) for index in range(max(seeds, default=-1) + 1)],
    }


def assert_alike(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=3e-6, equal_nan=True)
        if other.dtype.is_floating_point and other.isfinite().all() and other.norm() > 1e-3:
            assert (mine - other).norm() / other.norm() < 3e-6


@pytest.mark.parametrize("case", CASES)
def test_core_programs_on_numpy_give_what_autograd_gives(case: str) -> None:
    module, inputs = module_of(case)
    core = capture(module, inputs, case, lowering=Lowering.CORE)
    native = capture(module, inputs, case, strides=False)
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
    captured = capture(module, inputs, case, lowering=Lowering.CORE)
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
    captured = capture(Of(layer), inputs, which, lowering=Lowering.CORE)
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
    captured = capture(Of(lambda x: x.exp() * 2 + x.exp() * 2), [real(3, 4)], "twice", lowering=Lowering.CORE)
    names = [name_of(node.target) for node in calls(captured.forward.graph)]
    assert names == ["aten.exp.default", "aten.mul.Scalar", "aten.add.Tensor"]


def test_what_computes_nothing_is_not_there() -> None:
    def idle(x: Tensor) -> Tensor:
        y = x.clone().detach() + torch.zeros(()) * 2.0 * x.transpose(0, 1).transpose(0, 1).contiguous()
        return (y.view(4, 3).view(3, 4).expand(3, 4)[:] * 1.0).float() + torch.full((), 2.0) * 3.0

    captured = capture(Of(idle), [real(3, 4)], "idle", lowering=Lowering.CORE)
    names = [name_of(node.target) for node in calls(captured.forward.graph)]
    assert names == ["aten.mul.Scalar", "aten.add.Tensor", "aten.view.default", "aten.add.Scalar"] or names == [
        "aten.mul.Scalar",
        "aten.add.Tensor",
        "aten.add.Scalar",
    ]


def test_equal_layers_have_one_fingerprint_and_others_another() -> None:
    def fingerprint(layer: nn.Module) -> str:
        program = capture(Of(layer), [real(2, 6, 8)], "layer", lowering=Lowering.CORE).backward
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
    core = capture(module, inputs, case, lowering=Lowering.CORE)
    native = capture(module, inputs, case, strides=False)
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
    program = capture(Constant(), [], "constant", lowering=lowering).forward
    assert program.inputs == ()
    device = registry.open(name)
    queue = device.queue("compute")
    view = device.alloc(64).view(0, (3,), torch.float32)
    found = torch.zeros(3)
    ran = queue.run(device.compile(program), [], [view])
    queue.read(found, view, [ran]).wait()
    device.close()
    assert found.tolist() == [2.0, 4.0, 6.0]


def test_half_precision_programs_cast_in_the_open() -> None:
    layer = Of(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True))
    for compute in (torch.bfloat16, torch.float16):
        captured = capture(layer, [real(2, 6, 8)], "layer", compute=compute, lowering=Lowering.CORE)
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
        assert "1" in str(refused.value).split()[0]  # the layer's name
        reference.assert_same_state(trainer.state_dict(), before)
    finally:
        trainer.close()


def test_a_device_may_lack_an_op_of_the_table() -> None:
    program = capture(Of(torch.tanh), [real(3)], "layer 7", lowering=Lowering.CORE).forward
    check(program, CHIP)
    with pytest.raises(Unsupported, match=r"layer 7.*aten\.tanh\.default.*'chip'"):
        check(program, CHIP, frozenset({"aten.tanh.default"}))


def test_a_malformed_program_is_refused() -> None:
    program = capture(Of(torch.tanh), [real(3)], "layer", lowering=Lowering.CORE).forward
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
