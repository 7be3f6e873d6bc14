"""The gradient of `prod` as PyTorch computes it for plain tensors.

Eager PyTorch looks for zeros in the input. Without any the gradient is `grad * (result / x)`; with more than one, in a
product of all elements, it is zero; else it is made of cumulative products from both sides. A trace cannot look, so
PyTorch traces the cumulative products alone, which round otherwise. Here a graph computes all of them, and selects.

Where the results would lie otherwise in memory, or are differentiated again, the trace fails with NotAGraph, and the
layer runs eagerly.
Invariant: what is selected comes from the ops, and lies in memory in the order, of eager PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch

from relay.capture.guards.messages import NotAGraph

aten = torch.ops.aten


def product(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> Any:
    """`aten::prod`."""
    return _Product.apply(x, None, False, dtype)  # type: ignore[no-untyped-call]


def product_along(x: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """`aten::prod.dim_int`."""
    return _Product.apply(x, dim, keepdim, dtype)  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """The kernel, with a backward that selects."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            if dim is None:
                result: torch.Tensor = aten.prod.default(x, dtype=dtype)
            else:
                result = aten.prod.dim_int(x, dim, keepdim, dtype=dtype)
        ctx.save_for_backward(x, result)
        ctx.dim = dim
        ctx.inserts = dim is not None and not keepdim
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotAGraph("prod", "has a gradient that is differentiated again, and depends on which inputs are zero")
        x, result = ctx.saved_tensors
        x = x.to(gradient.dtype)
        if x.dim() and ctx.inserts:
            gradient, result = gradient.unsqueeze(ctx.dim), result.unsqueeze(ctx.dim)
        return gradient if x.dim() == 0 else _gradient(gradient, x, result, ctx.dim), None, None, None


def _gradient(gradient: torch.Tensor, x: torch.Tensor, result: torch.Tensor, dim: int | None) -> torch.Tensor:
    zeros = (x == 0).sum()
    quotient = result / x
    without_zeros = gradient * (quotient.conj() if x.is_complex() else quotient)
    if x.numel() == 0:
        return without_zeros
    if dim is None:
        with_zeros = _by_cumulative_products(gradient, x.contiguous().view(-1), 0).view(x.shape)
    else:
        with_zeros = _by_cumulative_products(gradient, x, dim)
    if _steps(with_zeros) != _steps(without_zeros):
        raise NotAGraph("prod of a tensor that is not contiguous", "orders its gradient in memory by whether one is 0")
    if dim is None:
        with_zeros = torch.where(zeros > 1, torch.zeros_like(with_zeros), with_zeros)
    return torch.where(zeros == 0, without_zeros, with_zeros)


def _by_cumulative_products(gradient: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """The gradient as the product of all elements before an element, and of all after it."""
    length = x.shape[dim]
    if length == 1:
        return gradient.expand(x.shape)
    shape = list(x.shape)
    shape[dim] = 1
    ones = torch.ones(shape, dtype=gradient.dtype, device=gradient.device)
    before = torch.cat([ones, x.narrow(dim, 0, length - 1)], dim).cumprod(dim)
    after = torch.cat([ones, x.narrow(dim, 1, length - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    both = before * after
    return gradient * (both.conj() if x.is_complex() else both)


def _steps(tensor: torch.Tensor) -> list[int]:
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
