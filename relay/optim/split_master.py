"""Split master weights: a float32 tensor as the bfloat16 that the device takes and a remainder of 16 bits.

The bfloat16 is the float32 rounded to nearest; with the remainder it is that float32 again, to the bit. So the host
needs no rounded copy beside a master: 4.13 bytes a parameter instead of 6. The encoding is in
`relay.optim.split_kernels`; updates of split masters are in `relay.optim.fused`. Which parameters are split, and their
memory, is the store's concern. Invariant: `to_float` gives what `assign` was given, to the bit (a NaN stays a NaN).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from relay.optim.thread_pool import work_through

BLOCK = 2048
"""Values that share a flag: whether any of them is a tie that was rounded down."""

SMALLEST_SHARE = 2**18  # elements below which a second thread costs more than it gains


@dataclass(frozen=True, eq=False)
class SplitMaster:
    """A float32 tensor in two halves.

    Attributes:
        high: bfloat16, of the tensor's shape, contiguous: what crosses the link.
        low: int16, flat: the lower halves of the float32 patterns.
        flags: uint8, one for each `BLOCK` of values.
        ties: uint8, one bit for each value; what it holds counts only where the block's flag is set.
    """

    high: torch.Tensor
    low: torch.Tensor
    flags: torch.Tensor
    ties: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """The tensor's shape."""
        return self.high.shape

    def numel(self) -> int:
        """The number of elements."""
        return self.high.numel()

    def addresses(self) -> tuple[int, int, int, int]:
        """Of the four parts, for compiled kernels."""
        return self.high.data_ptr(), self.low.data_ptr(), self.flags.data_ptr(), self.ties.data_ptr()

    def to_float(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The float32 tensor, in new memory or in `out` (contiguous, of as many elements)."""
        result = torch.empty(self.shape, dtype=torch.float32) if out is None else out
        if not self.high.is_meta:
            _work(_kernels().join, self, result)
        return result

    def assign(self, values: torch.Tensor) -> None:
        """Set the tensor to these values, which are converted to float32."""
        if self.high.is_meta:
            return
        _work(_kernels().split, self, values.detach().to(torch.float32).contiguous())

    def forget_remainder(self) -> None:
        """Make the tensor what its bfloat16 shows."""
        self.low.zero_()
        self.flags.zero_()


def sizes(elements: int) -> tuple[int, int]:
    """The bytes of the flags and of the bitmap of ties, for a number of elements."""
    return -(-elements // BLOCK), -(-elements // 8)


def _work(kernel: Any, master: SplitMaster, floats: torch.Tensor) -> None:
    if floats.numel() != master.numel() or floats.dtype is not torch.float32 or not floats.is_contiguous():
        raise ValueError(
            f"A split master of {master.numel()} elements is read and written as contiguous float32 of as many; "
            f"received {floats.dtype} of {floats.numel()}. Convert it first."
        )
    addresses = (*master.addresses(), floats.data_ptr())

    def work(begin: int, end: int) -> None:
        kernel(begin, end, *addresses)

    work_through(work, master.numel(), alignment=BLOCK, threads=None, smallest=SMALLEST_SHARE)


@functools.cache
def _kernels() -> Any:
    from relay.optim import split_kernels

    return split_kernels
