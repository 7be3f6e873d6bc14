"""Tensors without dimensions or elements, and infinities in windows, come out on core devices as in PyTorch."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relay.capture import CaptureRequest, Lowering, capture
from tests.support import devices
from tests.support.zoo import core_modules
from tests.support.zoo.core_modules import Of

Function = Callable[..., Any]

ALONG_NOTHING: dict[str, Function] = {
    "logsumexp": lambda x: x.logsumexp(0),
    "softmax": lambda x: x.softmax(0) * x + x.log_softmax(0),
    "sum and mean": lambda x: x.sum(0) + x.mean(0) + x.mean() * x.nansum(),
    "scans": lambda x: x.cumsum(0) + x.cumprod(0) + x.logcumsumexp(0) + x.cummax(0)[0],
    "products": lambda x: x.prod(0) + x.prod() * 2,
    "extremes": lambda x: x.max(0)[0] + x.min(0)[0] * x.min(0)[1] + x.amax(0) + x.aminmax(dim=0)[1],
    "arguments of extremes": lambda x: x * x.argmax(0) + x * x.argmin(),
    "any and all": lambda x: x * (x > 0).any(0) + x * (x > 0).all(0),
    "variance": lambda x: x.var(0, correction=0) + x.std(0, correction=0) + x,
    "norms": lambda x: x.norm(2, 0) + torch.linalg.vector_norm(x),
    "sorted": lambda x: x.sort(0)[0] + x.topk(1, 0)[0] + x.kthvalue(1, 0)[0],
    "median": lambda x: x.median(0)[0] + x.median(),
    "unfold": lambda x: x.unfold(0, 1, 1).exp(),
    "turned": lambda x: x.flip(0) + x.roll(1) + x.squeeze(0) + x.transpose(0, 0),
    "lookups": lambda x: x.gather(0, torch.tensor(0)) + x.index_select(0, torch.tensor([0])),
    "scattered": lambda x: x.scatter_add(0, torch.tensor(0), x * 2),
    "repeated": lambda x: x.repeat(3) + x.expand(2, 3).sum(0),
}
NOTHING: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...]]] = {
    "sum": (lambda x, y: x.sum() + y.sum() + x.sum(0), (0, 3), (3,)),
    "product": (lambda x, y: x.prod() * y.sum(), (0,), (2,)),
    "mean": (lambda x, y: x.mean() + y.sum(), (0,), (2,)),
    "extremes of no rows": (lambda x, y: x.max(1)[0].sum() + x.amax(1).sum() + y.sum(), (0, 3), (3,)),
    "logsumexp": (lambda x, y: x.logsumexp(0) + y, (0, 3), (3,)),
    "softmax": (lambda x, y: x.softmax(0).sum(0) + x.softmax(1).sum(0) + x.log_softmax(0).sum(0) + y, (0, 3), (3,)),
    "joined": (lambda x, y: torch.cat([x, y]), (0, 3), (2, 3)),
    "products of matrices": (lambda x, y: x @ y, (2, 0), (0, 3)),
    "products of no rows": (lambda x, y: (x @ y).sum() + y.sum(), (0, 2), (2, 3)),
    "windows": (lambda x, y: x.unfold(1, 2, 1).sum() + y.sum(), (0, 3), (3,)),
    "scans": (lambda x, y: x.cumsum(0).sum() + x.sort(0)[0].sum() + y.sum(), (0, 3), (3,)),
    "layer norm": (lambda x, y: F.layer_norm(x, (3,), y).sum() + y.sum(), (0, 3), (3,)),
    "convolution": (lambda x, y: F.conv1d(x, y).sum() + y.sum(), (0, 2, 5), (3, 2, 3)),
    "any and all": (lambda x, y: y * (x > 0).any() + y * (x > 0).all(), (0,), (2,)),
}


def agree(
    function: Function, inputs: list[Tensor], name: str, gradients: bool = True, finite_only: bool = False
) -> None:
    """Value and gradients of a function on a device are PyTorch's, or those values that are finite."""
    devices.require(name)
    module = Of(function)
    core = capture(CaptureRequest(module, inputs, "odd", lowering=Lowering.CORE))
    given = core_modules.given_to(module, core, inputs)
    (expected,) = module(*inputs)
    found = core_modules.run(name, core.forward, given)[-1]
    compared = expected.isfinite() if finite_only else torch.ones_like(expected, dtype=torch.bool)
    torch.testing.assert_close(found[compared], expected.detach()[compared], rtol=2e-5, atol=2e-6, equal_nan=True)
    if not gradients:
        return
    assert core.backward is not None
    (seed,) = [port for port in core.backward.inputs if port.role.value == "seed"]
    wanted = torch.autograd.grad(expected, inputs, given[seed.role][seed.index], allow_unused=True)
    for port, gradient in zip(core.backward.outputs, core_modules.run(name, core.backward, given), strict=True):
        torch.testing.assert_close(gradient, wanted[port.index], rtol=2e-5, atol=2e-6, equal_nan=True)


DEVICES = ["numpy", "opencl", "onnx:cpu"]


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("case", ALONG_NOTHING)
@pytest.mark.sample(12)
def test_ops_along_dimension_0_of_a_tensor_without_dimensions_are_pytorchs(case: str, name: str) -> None:
    agree(ALONG_NOTHING[case], [torch.tensor(0.7, requires_grad=True)], name)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("case", NOTHING)
@pytest.mark.sample(10)
def test_ops_of_tensors_without_elements_are_pytorchs(case: str, name: str) -> None:
    function, *shapes = NOTHING[case]
    generator = torch.Generator().manual_seed(0)
    agree(function, [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes], name)


def with_infinities(*shape: int) -> Tensor:
    """A map with an infinity, a negative one and NaN far apart."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    x.view(-1)[3], x.view(-1)[-2], x.view(-1)[x.numel() // 2] = math.inf, -math.inf, math.nan
    return x.requires_grad_()


def both_ways(pool: Function) -> Function:
    """A pool of a map with infinities, and the gradient that comes down with infinities to a finite map."""

    def function(x: Tensor) -> Tensor:
        finite = x.detach().nan_to_num(0.0, 1.0, -1.0)
        _, back = torch.func.vjp(pool, finite)
        pooled = pool(x)
        return torch.cat([pooled.flatten(), back(pooled)[0].flatten()])

    return function


WINDOWS: dict[str, tuple[Function, tuple[int, ...]]] = {
    "adaptive": (nn.AdaptiveAvgPool2d((3, 4)), (1, 1, 7, 9)),
    "adaptive, of all": (nn.AdaptiveAvgPool2d(1), (2, 1, 4, 4)),
    "adaptive, more windows than places": (nn.AdaptiveAvgPool1d(11), (1, 2, 7)),
    "adaptive in three dimensions": (nn.AdaptiveAvgPool3d((2, 3, 2)), (1, 1, 4, 5, 6)),
    "even": (nn.AvgPool2d(3, 2, 1), (1, 2, 7, 8)),
    "rounded up": (nn.AvgPool2d(3, 2, 1, ceil_mode=True), (1, 2, 6, 8)),
    "without the padding": (nn.AvgPool2d(3, 2, 1, count_include_pad=False), (1, 2, 7, 8)),
    "with a divisor": (nn.AvgPool2d(2, 1, divisor_override=3), (1, 1, 5, 5)),
    "in one dimension": (nn.AvgPool1d(4, 3, 2, ceil_mode=True), (1, 2, 12)),
    "in three dimensions": (nn.AvgPool3d(3, 2, 1), (1, 1, 5, 6, 4)),
    "with gaps": (nn.AvgPool3d(1, 3, 0), (1, 1, 5, 6, 4)),
    "area": (lambda x: F.interpolate(x, size=(5, 4), mode="area"), (1, 1, 7, 9)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), (1, 1, 4, 5)),
    "replicated padding": (nn.ReplicationPad2d((2, 1, 0, 3)), (1, 1, 4, 5)),
    "replicated, cropped": (nn.ReplicationPad1d((3, -1)), (1, 1, 6)),
    "reflected padding": (nn.ReflectionPad2d((2, 1, 0, 3)), (1, 1, 5, 5)),
    "largest": (nn.MaxPool2d(3, 2, 1), (1, 1, 7, 7)),
}  # fmt: skip


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("case", WINDOWS)
@pytest.mark.sample(14)
def test_an_infinity_in_a_map_spreads_as_in_pytorch_and_no_further(case: str, name: str) -> None:
    pool, shape = WINDOWS[case]
    agree(both_ways(pool), [with_infinities(*shape)], name, gradients=False)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.sample(2)
def test_linear_interpolation_takes_an_infinity_no_further_than_pytorch(aligned: bool, name: str) -> None:
    """Beside the infinity itself, where one weight is 0, PyTorch has an infinity and core devices NaN."""

    def resample(x: Tensor) -> Tensor:
        return F.interpolate(x, size=(7, 9), mode="bilinear", align_corners=aligned)

    agree(both_ways(resample), [with_infinities(1, 1, 4, 5)], name, gradients=False, finite_only=True)
