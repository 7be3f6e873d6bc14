"""Decompositions of the complementary error function erfc, and of its scaled form erfcx.

Part of the core lowering (`relay.capture.core.lowering`): functions to trace with, written in PyTorch ops. 1 - erf(x)
would not do: in float32 it has no more than four correct digits above x = 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.dtypes import widened

aten = torch.ops.aten

_COEFFICIENTS = (
    -1.3026537197817094, 6.4196979235649026e-1, 1.9476473204185836e-2, -9.561514786808631e-3, -9.46595344482036e-4,
    3.66839497852761e-4, 4.2523324806907e-5, -2.0278578112534e-5, -1.624290004647e-6, 1.303655835580e-6,
    1.5626441722e-8, -8.5238095915e-8, 6.529054439e-9, 5.059343495e-9, -9.91364156e-10, -2.27365122e-10,
    9.6467911e-11, 2.394038e-12, -6.886027e-12, 8.94487e-13, 3.13092e-13, -1.12708e-13, 3.81e-16, 7.106e-15,
    -1.523e-15, -9.4e-17, 1.21e-16, -2.8e-17,
)  # fmt: skip
"""Of the Chebyshev series P in erfc(x) = t exp(-x^2 + P(t)), t = 2 / (2 + x), x >= 0; right to 1.2e-16. Source: Press
et al., "Numerical Recipes", 3rd edition, section 6.2.2."""


def _scaled_erfc(x: Tensor) -> Tensor:
    """exp(x^2) erfc(x) for x >= 0, by Clenshaw's recurrence, with the terms that matter in the dtype."""
    t = 2 / (2 + x)
    y = 4 * t - 2
    least = torch.finfo(x.dtype).eps / 16
    terms = [coefficient for coefficient in _COEFFICIENTS[1:] if abs(coefficient) > least]
    last, before = torch.zeros_like(x), torch.zeros_like(x)
    for coefficient in reversed(terms):
        last, before = y * last - before + coefficient, last
    return t * torch.exp(0.5 * (_COEFFICIENTS[0] + y * last) - before)


def _real(x: Tensor) -> Tensor:
    return x.to(widened(x.dtype) if x.dtype.is_floating_point else torch.get_default_dtype())


def _erfc(x: Tensor) -> Tensor:
    """erfc(x), with full relative precision for small results."""
    real = _real(x)
    size = real.abs()
    found = _scaled_erfc(size) * torch.exp(-size * size)
    return torch.where(real < 0, 2 - found, found).to(x.dtype if x.dtype.is_floating_point else real.dtype)


def _erfcx(x: Tensor) -> Tensor:
    """exp(x^2) erfc(x)."""
    real = _real(x)
    found = _scaled_erfc(real.abs())
    found = torch.where(real < 0, 2 * torch.exp(real * real) - found, found)
    return found.to(x.dtype if x.dtype.is_floating_point else real.dtype)


ERROR_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.erfc.default: _erfc,
    aten.special_erfcx.default: _erfcx,
}
"""Decompositions by the overload that they replace."""
