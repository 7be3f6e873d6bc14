"""Modules and functions that core devices must have right, and a run of a captured one on a device by its name.

A case is a function that makes a module, and its inputs; `given_to` says what its programs take, by role and index.
`CHIP` describes a device that holds halves and computes in float32. Nothing here says what the right values are.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hal import registry
from hal.device import DeviceInfo, KernelCall
from hal.program import Program, Role
from hal.random import RandomKey
from relay.capture import Captured

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

        def allocate(shape: Sequence[int], dtype: torch.dtype) -> Any:
            size = math.prod(shape) * dtype.itemsize
            return device.alloc(max(size, 1)).view(0, shape, dtype)

        inputs = [allocate(port.shape, port.dtype) for port in program.inputs]
        written = [
            queue.write(view, given[port.role][port.index].detach().contiguous())
            for view, port in zip(inputs, program.inputs, strict=True)
        ]
        outputs = [allocate(port.shape, port.dtype) for port in program.outputs]
        ran = queue.run(KernelCall(device.compile(program), inputs, outputs, key=KEY), written)
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
