"""Gradients for which PyTorch looks at the data, and computes otherwise where it finds zeros, are eager PyTorch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.relay.capture.sweep.comparison import verdict
from tests.relay.capture.sweep.sample_layers import Operator, Sample
from tests.support.zoo.plain_models import Block, Build, Stack, batches, check

MASK = torch.eye(5, 7) == 0
EVERY_THIRD = torch.arange(700) % 3 == 0
ZEROS: dict[str, tuple[tuple[int, int], ...]] = {"none": (), "one": ((1, 2),), "several": ((1, 2), (1, 4), (3, 3))}


def trained(function: Callable[[Tensor], Tensor], zeros: str) -> str:
    """How a layer of the function fares beside plain PyTorch, for numbers with so many zeros."""

    def make() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        value = torch.randn(5, 7)
        for index in ZEROS[zeros]:
            value[index] = 0.0
        layer = Operator(function, ((value.requires_grad_(),), {}))
        return layer, layer.take_example()

    found = verdict(Sample("by zeros", make))
    return f"{found.kind} {found.detail}".strip()


PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda x: x.prod(),
    "prod along a dimension": lambda x: x.prod(1),
    "prod that keeps it": lambda x: x.prod(-2, keepdim=True),
    "prod in float64": lambda x: x.prod(1, dtype=torch.float64),
    "prod of one element each": lambda x: x[:, :1].prod(1),
    "masked.prod": lambda x: torch.masked.prod(x, (0, 1), mask=MASK),
    "cumprod": lambda x: x.cumprod(1),
    "masked.cumprod": lambda x: torch.masked.cumprod(x, 0, mask=MASK),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_have_eager_pytorchs_gradients_with_and_without_zeros(name: str) -> None:
    assert {zeros: trained(PRODUCTS[name], zeros) for zeros in ZEROS} == dict.fromkeys(ZEROS, "equal")


EAGER: dict[str, Callable[[Tensor], Tensor]] = {
    "prod of a transposed tensor": lambda x: x.t().prod(1),
    "masked_fill with a trained value": lambda x: torch.zeros(700).masked_fill(EVERY_THIRD, x.sum()).cos().cumsum(0),
    "masked_fill in place": lambda x: torch.zeros(700).masked_fill_(EVERY_THIRD, x.sum()).cos().cumsum(0),
}


@pytest.mark.parametrize("name", EAGER)
def test_layers_whose_gradient_no_graph_computes_as_eager_pytorch_run_eagerly(name: str) -> None:
    assert trained(EAGER[name], "none") == "equal eagerly"


def test_masked_fill_with_a_constant_is_captured() -> None:
    assert trained(lambda x: x.masked_fill(x > 0.5, torch.tensor(2.0)) * x.sin(), "one") == "equal"


class Descending(Block):
    """It follows the slope of a product, whose gradient is differentiated again."""

    def forward(self, value: Tensor) -> Tensor:
        with torch.enable_grad():
            start = value.clone() if value.requires_grad else value.clone().requires_grad_()
            (slope,) = torch.autograd.grad(start.prod(-1).sum(), start, create_graph=True)
        return super().forward(value - 0.1 * slope)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_a_layer_that_differentiates_a_product_itself_trains_as_in_pytorch(build: Build) -> None:
    check(build, lambda: Stack(Descending), batches(1), microbatches=1)
