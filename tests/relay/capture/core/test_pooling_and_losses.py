"""Ops that the core lowering decomposes give PyTorch's values and gradients on numpy."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hal.errors import Unsupported
from hal.ops import check
from relay.capture import Captured, CaptureRequest, Lowering, capture
from relay.errors import CaptureError
from tests.support import devices
from tests.support.zoo import core_modules
from tests.support.zoo.core_modules import Of, real, whole

CUBE = real(2, 3, 5, 6, 4)
IMAGE = real(2, 3, 7, 9)
SERIES = real(2, 3, 9)
INSIDE = real(4, 5).detach().tanh().mul(0.95).requires_grad_()


def each(function: Callable[[Tensor], Tensor], scale: float = 1.0) -> tuple[Callable[..., Any], list[Tensor]]:
    """A function of numbers between -scale and scale."""
    return lambda x: function(x * scale), [INSIDE]


def of(build: Callable[[], Any], *inputs: Tensor) -> tuple[Callable[..., Any], list[Tensor]]:
    """A layer, built at import so that it has its weights."""
    torch.manual_seed(1)
    return build(), list(inputs)


CASES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "log2": (lambda x: (x + 1.5).log2(), [INSIDE]),
    "log10": (lambda x: (x + 1.5).log10(), [INSIDE]),
    "exp2": each(torch.exp2, 3),
    "sinh": each(torch.sinh, 3),
    "sinh near zero": each(torch.sinh, 1e-3),
    "cosh": each(torch.cosh, 3),
    "asinh": each(torch.asinh, 5),
    "asinh far away": each(torch.asinh, 1e20),
    "acosh": (lambda x: (x + 2.5).acosh(), [INSIDE]),
    "acosh far away": (lambda x: (x * 1e18 + 1e19).acosh(), [INSIDE]),
    "atanh": each(torch.atanh),
    "asin": each(torch.asin),
    "acos": each(torch.acos),
    "atan": each(torch.atan, 5),
    "beyond their domain": (lambda x: (x * 3).detach().asin() + (x * 3).detach().atanh() + x, [INSIDE]),
    "hypot": (lambda x, y: torch.hypot(x, y), [INSIDE, real(5)]),
    "hypot of large numbers": (lambda x: torch.hypot(x * 1e25, x.cos() * 1e25), [INSIDE]),
    "copysign": (lambda x: torch.copysign(x, x.sin() * 0.0 - 0.0) + torch.copysign(x, x.roll(1)), [INSIDE]),
    "copysign of a number": (lambda x: torch.copysign(x, -2.0), [INSIDE]),
    "remainders of whole numbers": (lambda x, i: x * torch.remainder(i - 5, i % 3 + 1), [INSIDE, whole(4, 5, below=9)]),
    "bits": (lambda x, i: x * ((i & 5) + (i | 2) + (i ^ 3)), [INSIDE, whole(4, 5, below=9)]),
    "instance norm": of(lambda: nn.InstanceNorm2d(3, affine=True), IMAGE),
    "instance norm without parameters": of(lambda: F.instance_norm, SERIES),
    "circular padding": of(lambda: nn.Conv2d(3, 2, 3, padding=1, padding_mode="circular"), IMAGE),
    "replicated padding": of(lambda: nn.Conv2d(3, 2, 3, padding=2, padding_mode="replicate"), IMAGE),
    "replicated padding in one dimension": of(lambda: nn.ReplicationPad1d((3, 1)), SERIES),
    "replicated padding in three dimensions": of(lambda: nn.ReplicationPad3d((1, 2, 0, 3, 2, 1)), CUBE),
    "adaptive average pooling": of(lambda: nn.AdaptiveAvgPool2d((3, 4)), IMAGE),
    "adaptive average pooling in one dimension": of(lambda: nn.AdaptiveAvgPool1d(4), SERIES),
    "adaptive average pooling in three dimensions": of(lambda: nn.AdaptiveAvgPool3d((2, 4, 3)), CUBE),
    "area interpolation": of(lambda: lambda x: F.interpolate(x, size=(5, 4), mode="area"), IMAGE),
    "average pooling rounded up": of(lambda: nn.AvgPool2d(2, 3, ceil_mode=True), IMAGE),
    "average pooling rounded up, padded": of(lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True), real(2, 3, 6, 8)),
    "average pooling without the padding": of(lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), IMAGE),
    "average pooling with a divisor": of(lambda: nn.AvgPool2d(3, 2, 1, True, divisor_override=5), IMAGE),
    "average pooling in one dimension": of(lambda: nn.AvgPool1d(4, 3, 2, ceil_mode=True), SERIES),
    "average pooling in three dimensions": of(lambda: nn.AvgPool3d(3, 2, 1), CUBE),
    "largest pooling rounded up": of(lambda: nn.MaxPool2d(3, 2, ceil_mode=True), real(2, 3, 6, 8)),
    "largest pooling rounded up, dilated": of(lambda: nn.MaxPool2d(2, 3, 1, dilation=2, ceil_mode=True), IMAGE),
    "bilinear": of(lambda: nn.Bilinear(4, 3, 5), real(2, 6, 4), real(2, 6, 3)),
    "buckets": (
        lambda x: x * (torch.bucketize(x, x.detach()[0].sort()[0]) + torch.bucketize(x, x[1].sort()[0], right=True)),
        [INSIDE],
    ),
    "places in sorted rows": (lambda x: x * torch.searchsorted(x.sort(-1)[0], x.detach(), right=True), [INSIDE]),
    "median": (lambda x: x.median(-1)[0] + x.median(0, keepdim=True)[0].sum(), [INSIDE]),
    "median of all": (lambda x: x.median() * x, [INSIDE]),
    "largest pooling in three dimensions": of(lambda: nn.MaxPool3d(2), CUBE),
    "largest pooling in three dimensions, padded": of(lambda: nn.MaxPool3d(3, 2, 1, ceil_mode=True), CUBE),
    "largest pooling in three dimensions, dilated": of(lambda: nn.MaxPool3d((2, 3, 2), 1, (1, 1, 0), 2), CUBE),
    "adaptive largest pooling": of(lambda: nn.AdaptiveMaxPool2d((3, 4)), IMAGE),
    "adaptive largest pooling in one dimension": of(lambda: nn.AdaptiveMaxPool1d(4), SERIES),
    "scattered sums and means": (
        lambda x, y, i: y.scatter_reduce(1, i, x, "sum") + y.scatter_reduce(1, i, x, "mean"),
        [INSIDE, real(4, 9), whole(4, 5, below=9)],
    ),
    "scattered by a mask": (lambda x, y: x.masked_scatter(x > 0, y), [INSIDE, real(5, 6)]),
    "distances": (lambda x, y: torch.cdist(x, y) + torch.cdist(x, y, p=1), [real(2, 6, 4), real(2, 3, 4)]),
    "distances to itself": (lambda x: torch.cdist(x, x), [real(2, 6, 4)]),
    "kth value": (lambda x: x.kthvalue(2, 1)[0] + x.kthvalue(3, 0)[0].sum(), [INSIDE]),
}


def points(*shape: int) -> Tensor:
    """Where to sample: inside, beyond the borders, and far beyond."""
    torch.manual_seed(3)
    return (torch.rand(shape) * 5 - 2.5).requires_grad_()


WAYS = list(itertools.product(("zeros", "border", "reflection"), (False, True)))
FEWER = [("zeros", True), ("border", False), ("reflection", False)]


def sampled(mode: str, ways: Any, x: Tensor, *grid: int) -> tuple[Callable[..., Any], list[Tensor]]:
    """An image or volume sampled with every kind of padding, corners aligned or not."""

    def sample(x: Tensor, grid: Tensor) -> Tensor:
        return torch.stack([F.grid_sample(x, grid, mode, padding, aligned) for padding, aligned in ways])

    return sample, [x, points(*grid)]


def bags(mode: str, **options: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    """Bags of five, and with offsets some of one and none."""
    torch.manual_seed(1)
    bag = nn.EmbeddingBag(9, 4, mode=mode, **options)
    several = torch.tensor([0, 3, 3, 4, 9] + ([15] if options.get("include_last_offset") else []))
    return OfBags(bag, several), [whole(3, 5, below=9), whole(15, below=9)]


class OfBags(nn.Module):
    """A layer of bags, called with a table of indices and with a list of them."""

    def __init__(self, bag: nn.EmbeddingBag, offsets: Tensor) -> None:
        super().__init__()
        self.bag = bag
        self.register_buffer("offsets", offsets)

    def forward(self, table: Tensor, line: Tensor) -> Tensor:
        return torch.cat([*([] if self.bag.include_last_offset else [self.bag(table)]), self.bag(line, self.offsets)])


def weighted(table: Tensor, line: Tensor, by: Tensor) -> Tensor:
    """Embeddings of bags with a weight for each index."""
    return F.embedding_bag(line, table, torch.tensor([0, 2, 2, 5]), mode="sum", per_sample_weights=by)


STEPS = torch.tensor([[3.0, 1.0, 3.0, -2.0, 3.0, 5.0], [0.0, -0.0, -1.0, 2.0, 2.0, 1.0]])
WIDE = (real(4, 5).detach() * 40).requires_grad_()

CASES |= {
    "erfc": (lambda x: torch.erfc(x * 3) + torch.erfc(x.abs() * 9) * 1e30 + torch.erfc(-x * 30), [INSIDE]),
    "erfcx": (lambda x: torch.special.erfcx(x * 4) + torch.special.erfcx(x.detach().abs() * 1e6), [INSIDE]),
    "log_ndtr": (lambda x: torch.special.log_ndtr(x * 9), [INSIDE]),
    "remainders of numbers": (lambda x, y: torch.fmod(x, y) + torch.remainder(x, y), [WIDE, real(5)]),
    "remainders of large numbers": (
        lambda x, y: torch.fmod(x * 1e20, y) + torch.remainder(x * 1e20, y).sin(),
        [WIDE, INSIDE],
    ),
    "truncated remainders of whole numbers": (
        lambda x, i: x * torch.fmod(i - 5, i % 3 - 4),
        [INSIDE, whole(4, 5, below=9)],
    ),
    "fractions and signs": (
        lambda x: (
            x.frac() * x.signbit()
            + x * (x.detach().sign() * 0.0).signbit()
            + x * torch.heaviside(x.detach().trunc(), torch.full((), 0.5))
        ),
        [WIDE],
    ),
    "ldexp": (lambda x, i: torch.ldexp(x, i) + torch.ldexp(x.detach(), i - 5), [INSIDE, whole(4, 5, below=9)]),
    "running extremes": (lambda x: x.cummax(1)[0] + x.cummin(0)[0] + (x * STEPS[0, :5]).cummax(-1)[1], [real(4, 5)]),
    "running extremes of equals": (
        lambda x: x * (STEPS.cummax(1)[1] + STEPS.cummin(1)[1] + STEPS.long().cummax(0)[1]),
        [real(2, 6)],
    ),
    "running extremes with NaN": (lambda x: x.log().cummax(1)[0] + x.log().cummin(0)[1], [real(4, 5)]),
    "running sums of exponentials": (lambda x: x.logcumsumexp(1) + x.mul(50).logcumsumexp(0), [real(4, 5)]),
    "running sums from nothing": (
        lambda x: x.detach().log().nan_to_num(-math.inf).logcumsumexp(1).exp() + x,
        [real(4, 7)],
    ),
    **{f"bags, {mode}": bags(mode) for mode in ("sum", "mean", "max")},
    **{f"bags with padding, {mode}": bags(mode, padding_idx=2) for mode in ("sum", "mean", "max")},
    **{f"bags with a last offset, {mode}": bags(mode, include_last_offset=True) for mode in ("sum", "mean", "max")},
    "bags of weighted embeddings": (weighted, [real(9, 4), whole(8, below=9), real(8)]),
    "an image sampled, bilinear": sampled("bilinear", WAYS, IMAGE, 2, 4, 5, 2),
    "an image sampled, nearest": sampled("nearest", WAYS, IMAGE, 2, 4, 5, 2),
    "an image sampled, bicubic": sampled("bicubic", FEWER[1:], IMAGE, 2, 4, 5, 2),
    "a volume sampled, bilinear": sampled("bilinear", FEWER[1:], CUBE, 2, 3, 2, 4, 3),
    "a volume sampled, nearest": sampled("nearest", FEWER, CUBE, 2, 3, 2, 4, 3),
    "one row sampled": (
        lambda x, g: F.grid_sample(x[:, :, :1], g, padding_mode="reflection", align_corners=True),
        [IMAGE, points(2, 4, 5, 2)],
    ),
    "strided": (lambda x: x.as_strided((2, 3), (5, 1), 1).sin(), [INSIDE]),
    "strided, with elements twice": (lambda x: (x + 1).as_strided((3, 3), (2, 1), 4) * STEPS[0, :3], [INSIDE]),
    "strided in another order": (lambda x: x.sin().t().as_strided((3, 2), (1, 7), 2) * STEPS[0, :2], [INSIDE]),
    "strided and put back": (
        lambda x, y: torch.as_strided_scatter(x, y, (2, 3), (9, 2), 1) * x,
        [INSIDE, real(2, 3)],
    ),
    "warped by an affine map": (
        lambda x, t: F.grid_sample(x, F.affine_grid(t, [2, 3, 4, 5], align_corners=False), align_corners=False),
        [IMAGE, real(2, 2, 3)],
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(5)
def test_values_and_gradients_on_numpy_are_pytorchs(case: str) -> None:
    function, inputs = CASES[case]
    module = Of(function)
    core = capture(CaptureRequest(module, inputs, case, lowering=Lowering.CORE))
    for tensor in [*inputs, *module.parameters()]:
        tensor.grad = None
    (expected,) = module(*inputs)
    given = core_modules.given_to(module, core, inputs)
    assert core.backward is not None
    (seed,) = [port for port in core.backward.inputs if port.role.value == "seed"]
    expected.backward(core_modules.given_to(module, core, inputs)[seed.role][seed.index])
    wanted = {"value gradient": [x.grad for x in inputs], "parameter gradient": [p.grad for p in module.parameters()]}
    found = core_modules.run("numpy", core.forward, given)
    torch.testing.assert_close(found[-1], expected.detach(), rtol=2e-5, atol=2e-6, equal_nan=True)
    gradients = core_modules.run("numpy", core.backward, given)
    for port, gradient in zip(core.backward.outputs, gradients, strict=True):
        theirs = wanted[port.role.value][port.index]
        torch.testing.assert_close(gradient, theirs, rtol=5e-5, atol=5e-6, equal_nan=True)


@pytest.mark.parametrize("name", ["onnx:cpu", "opencl"])
@pytest.mark.parametrize(
    "case",
    [
        *("asinh far away", "acos", "hypot", "adaptive average pooling", "largest pooling rounded up", "median"),
        *("erfc", "remainders of numbers", "running extremes", "bags with padding, mean", "warped by an affine map"),
    ],
)
@pytest.mark.sample(
    "acos-opencl", "hypot-onnx:cpu", "adaptive average pooling-onnx:cpu", "largest pooling rounded up-onnx:cpu",
    "median-opencl", "running extremes-onnx:cpu", "bags with padding, mean-onnx:cpu",
)  # fmt: skip
def test_other_core_devices_give_what_numpy_gives(case: str, name: str) -> None:
    devices.require(name)
    function, inputs = CASES[case]
    module = Of(function)
    core = capture(CaptureRequest(module, inputs, case, lowering=Lowering.CORE))
    given = core_modules.given_to(module, core, inputs)
    for program in (core.forward, core.backward):
        assert program is not None
        for ours, theirs in zip(
            core_modules.run(name, program, given), core_modules.run("numpy", program, given), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


ODD = torch.tensor([0.0, math.nan, math.inf, -math.inf, 1e8, -1e30, 1000.0, -0.3])
AROUND = torch.tensor([[math.nan, 1.0, 2.0, 3.0], [4.0, math.nan, -1.0, math.nan], [2.0, -math.inf, math.inf, 5.0]])
HUGE = torch.tensor([[1e-20, 1e20, 1e20, 1e-10, 1.0], [1e-30, 1e30, -1e30, 88.0, -88.0], [math.nan, 1.0, 2.0, 0, 3]])
TURNS = torch.cartesian_prod(torch.tensor([0.0, 1.0, -1.0, math.nan]), torch.tensor([0.0, 2.0, -2.0, math.nan]))
AT_ODD_PLACES = torch.stack([torch.cat([ODD, 0 * ODD.nan_to_num()]), torch.cat([0 * ODD.nan_to_num(), ODD])], -1)


def at_odd_places(mode: str) -> tuple[Callable[..., Any], list[Tensor]]:
    return sampled(mode, WAYS[::2], IMAGE)[0], [IMAGE, AT_ODD_PLACES.view(1, 4, 4, 2).repeat(2, 1, 1, 1)]


ODD_CASES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "median": (lambda x: x.median(1)[0] + x.median(1, keepdim=True)[0].sum(1), [AROUND]),
    "median of whole numbers": (lambda x: x.median(1)[0] * 1.0, [whole(3, 6)]),
    "median of all": (lambda x: x.median() * 1, [AROUND]),
    "cumprod": (lambda x: x.cumprod(1) + x.t().cumprod(0).t(), [HUGE]),
    "atan2": (lambda x: torch.atan2(x[:, 0], x[:, 1]), [TURNS]),
    "an image sampled, bilinear": at_odd_places("bilinear"),
    "an image sampled, nearest": at_odd_places("nearest"),
}


@functools.cache
def captured_at_odd_numbers(case: str) -> tuple[nn.Module, Captured, list[Tensor]]:
    function, inputs = ODD_CASES[case]
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    return Of(function), capture(CaptureRequest(Of(function), inputs, case, lowering=Lowering.CORE)), inputs


@pytest.mark.parametrize("name", ["numpy", "onnx:cpu", "opencl"])
@pytest.mark.parametrize("case", ODD_CASES)
@pytest.mark.sample(4)
def test_nan_infinities_and_overflow_come_out_as_in_pytorch(case: str, name: str) -> None:
    devices.require(name)
    module, core, inputs = captured_at_odd_numbers(case)
    given = core_modules.given_to(module, core, inputs)
    (expected,) = module(*inputs)
    torch.testing.assert_close(
        core_modules.run(name, core.forward, given)[-1], expected.detach(), rtol=2e-5, atol=2e-6, equal_nan=True
    )


def test_the_gradient_of_a_median_goes_to_the_first_nan() -> None:
    x = AROUND.clone().requires_grad_()
    core = capture(CaptureRequest(Of(lambda x: x.median(1)[0]), [x], "median", lowering=Lowering.CORE))
    assert core.backward is not None
    x.median(1)[0].sum().backward()
    given = core_modules.given_to(Of(lambda x: x.median(1)[0]), core, [x])
    (gradient,) = core_modules.run("numpy", core.backward, given)
    assert x.grad is not None
    assert torch.equal(gradient != 0, x.grad != 0)


def margins(x: Tensor) -> Tensor:
    """With labels behind the first -1, which do not count."""
    return F.multilabel_margin_loss(x, torch.tensor([[0, 1, -1, 0, 0], [2, -1, 3, 3, 3], [1, 0, 2, 3, 4], [-1] * 5]))


def test_what_pytorch_takes_apart_wrongly_is_refused() -> None:
    program = capture(CaptureRequest(Of(margins), [INSIDE], "margins", lowering=Lowering.CORE)).forward
    with pytest.raises(Unsupported, match="multilabel_margin_loss_forward"):
        check(program, core_modules.CHIP)


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: x * F.embedding_bag(torch.arange(5), x, torch.tensor([0, 3]), scale_grad_by_freq=True).sum(), "bag"),
        (lambda x: F.ctc_loss(x.log_softmax(-1).unsqueeze(1), torch.tensor([[1, 2]]), [4], [2]), "_ctc_loss"),
        (lambda x: x + torch.special.i0(x), "i0"),
        (lambda x: x[1:].as_strided((2, 3), (5, 1), 0), "as_strided"),
        (lambda x: x + torch.lgamma(x + 2), "lgamma"),
    ],
)
def test_what_has_no_core_form_is_refused_by_name_before_it_runs(function: Callable[..., Any], op: str) -> None:
    def compile_both() -> None:
        core = capture(CaptureRequest(Of(function), [INSIDE], "odd", lowering=Lowering.CORE))
        for program in (core.forward, core.backward):
            assert program is not None
            check(program, core_modules.CHIP)

    with pytest.raises((Unsupported, CaptureError), match=op) as refused:
        compile_both()
    assert op in refused.value.op


def test_what_pytorch_takes_apart_wrongly_is_right_where_pytorch_runs_it() -> None:
    captured = capture(CaptureRequest(Of(margins), [INSIDE], "margins"))
    expected = margins(INSIDE)
    (gradient,) = torch.autograd.grad(expected, INSIDE)
    given = core_modules.given_to(nn.Identity(), captured, [INSIDE])
    assert captured.backward is not None
    (seed,) = [port for port in captured.backward.inputs if port.role.value == "seed"]
    given[seed.role] = [torch.ones(seed.shape)]
    assert torch.equal(core_modules.run("cpu", captured.forward, given)[-1], expected.detach())
    assert torch.equal(core_modules.run("cpu", captured.backward, given)[0], gradient)
