"""Optimizer states in eight bits an element: two moments take two bytes, and a float32 scale for every 256 of each.

Such states are held and converted here. The optimizer reads and writes them in `relay.optim.fused_kernels`, where
values are rounded at random so that the mean is exact; otherwise a second moment that changes by a thousandth a step
would never change its code. Invariant: the value of a code is unchanged when it is encoded again, so saving, loading
and updates that change nothing lose nothing.

A code is a small float relative to its group of 256, not an integer with even steps: an update depends on first /
sqrt(second) of each element by itself, so each needs *relative* precision, small ones too.

    first moment    sign, 4 exponent bits, 3 mantissa bits, subnormals: 2**-17 to 1.875 times the scale
    second moment   5 exponent bits, 3 mantissa bits, no zero: 2**-31 to 1.875 times the scale. An element that is
                    small beside its group keeps a positive second moment: with zero there, the first moment would
                    be divided by epsilon.

A scale is a power of two (zero for a group of zeros), which makes scaling exact. Groups of 256 with a scale each:
Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = 256
_DROPPED_BITS = 20
_SIGNED_OFFSET = (127 - 15) << 3
_UNSIGNED_OFFSET = (127 - 31) << 3
_SUBNORMAL_STEP = 2.0**-17
_LARGEST_MANTISSA = 1.875
_SCALE_EXPONENTS = (-90, 126)


@dataclass(frozen=True, eq=False)
class Int8State:
    """A flat state: `codes` (uint8, one an element) and `scales` (float32, one for every 256, the last group short).

    signed: True for a first moment, False for a second moment.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    signed: bool

    def __post_init__(self) -> None:
        groups = group_count(self.codes.numel())
        if self.codes.dtype != torch.uint8 or self.scales.dtype != torch.float32 or self.scales.numel() != groups:
            raise ValueError(
                f"The parts of an 8-bit state do not fit: expected uint8 codes and {groups} float32 scales for "
                f"{self.codes.numel()} elements, received {self.codes.dtype} codes and {self.scales.numel()} "
                f"{self.scales.dtype} scales. Allocate group_count(elements) scales."
            )

    def numel(self) -> int:
        return self.codes.numel()

    def to_float(self) -> torch.Tensor:
        """The exact values, in a new float32 tensor."""
        codes = self.codes.to(torch.int32)
        if self.signed:
            magnitude = codes & 0x7F
            normal = ((magnitude + _SIGNED_OFFSET) << _DROPPED_BITS).view(torch.float32)
            values = torch.where(magnitude >= 8, normal, magnitude * _SUBNORMAL_STEP)
            values = torch.where(codes >= 128, -values, values)
        else:
            values = ((codes + _UNSIGNED_OFFSET) << _DROPPED_BITS).view(torch.float32)
        return values * self.scales.repeat_interleave(GROUP)[: codes.numel()]

    def assign(self, values: torch.Tensor) -> None:
        """Set the state to values (of a checkpoint, for example), rounded to the nearest codes."""
        elements = self.codes.numel()
        flat = torch.nn.functional.pad(values.detach().reshape(-1).float(), (0, -elements % GROUP)).view(-1, GROUP)
        largest = flat.abs().amax(1)
        mantissa, exponent = torch.frexp(largest)
        exponent = exponent - 1 + (2 * mantissa > _LARGEST_MANTISSA).int()
        scales = torch.ldexp(torch.ones_like(largest), exponent.clamp(*_SCALE_EXPONENTS))
        scales = torch.where(largest.isfinite(), scales, torch.nan)
        relative = flat / scales[:, None]
        magnitude = relative.abs().contiguous()
        half = 1 << (_DROPPED_BITS - 1)
        rounded = (magnitude.view(torch.int32) + half) >> _DROPPED_BITS
        if self.signed:
            small = torch.round(magnitude / _SUBNORMAL_STEP).clamp(max=8).int()
            codes = torch.where(rounded - _SIGNED_OFFSET >= 8, rounded - _SIGNED_OFFSET, small)
            codes = codes | (relative < 0).int() << 7
        else:
            codes = (rounded - _UNSIGNED_OFFSET).clamp(min=0)
        empty = largest == 0
        codes = torch.where(empty[:, None], 0, codes)
        self.codes.copy_(codes.reshape(-1)[:elements])
        self.scales.copy_(torch.where(empty, 0.0, scales))


def group_count(elements: int) -> int:
    """The number of scales for a number of elements."""
    return -(-elements // GROUP)
