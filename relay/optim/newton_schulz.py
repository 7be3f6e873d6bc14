"""Newton-Schulz iterations: a matrix of the same singular vectors whose singular values are near 1, as Muon needs it.

`NewtonSchulz` is a function of one bfloat16 matrix, which a device runs as a program of its own; `on_host` is the same
arithmetic in memory that is given. No optimizer and no device is known here. Invariant: both give the numbers of
`torch.optim.Muon`, to the bit where PyTorch runs them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NewtonSchulz:
    """The quintic iteration of `torch.optim.Muon`, as a function of a matrix. Its attributes are named as there."""

    ns_coefficients: tuple[float, float, float]
    ns_steps: int
    eps: float

    def __call__(self, matrix: torch.Tensor) -> torch.Tensor:
        """A matrix of the same shape, in bfloat16."""
        rows, columns = matrix.shape
        a, b, c = self.ns_coefficients
        now = matrix.T if rows > columns else matrix
        now = now / now.norm().clamp(min=self.eps)
        for _ in range(self.ns_steps):
            gram = now @ now.T
            polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            now = torch.addmm(now, polynomial, now, beta=a)
        return now.T.contiguous() if rows > columns else now

    def in_float32(self, matrix: torch.Tensor) -> torch.Tensor:
        """The same with products in float32, rounded to bfloat16 where PyTorch's kernels round."""

        def rounded(value: torch.Tensor) -> torch.Tensor:
            return value.bfloat16().float()

        rows, columns = matrix.shape
        a, b, c = self.ns_coefficients
        wide = matrix.float()
        now = wide.T if rows > columns else wide
        now = rounded(now / rounded(now.norm()).clamp(min=self.eps))
        for _ in range(self.ns_steps):
            gram = rounded(now @ now.T)
            polynomial = rounded(b * gram + c * (gram @ gram))
            now = rounded(a * now + polynomial @ now)
        return (now.T.contiguous() if rows > columns else now).bfloat16()

    def work_elements(self, shape: torch.Size) -> int:
        """How many float32 `on_host` needs: two bfloat16 matrices, and two squares of the shorter side."""
        return shape.numel() + min(shape) ** 2

    def on_host(self, matrix: torch.Tensor, work: torch.Tensor) -> torch.Tensor:
        """The same for a float32 or bfloat16 matrix. `work` is flat float32 memory, in which the result lies."""
        rows, columns = matrix.shape
        count, short = matrix.numel(), min(rows, columns)
        halves = work.view(torch.bfloat16)
        first, second = halves[:count], halves[count : 2 * count]
        squares = halves[2 * count : 2 * count + 2 * short * short].view(2, short, short)
        now = first.view(rows, columns).copy_(matrix)
        now = now.T if rows > columns else now
        now.div_(now.norm().clamp(min=self.eps))
        other = second
        a, b, c = self.ns_coefficients
        for _ in range(self.ns_steps):
            gram = torch.mm(now, now.T, out=squares[0])
            polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c, out=squares[1])
            then = torch.addmm(now, polynomial, now, beta=a, out=other.view(short, count // short if short else 0))
            now, other = then, first if other is second else second
        return now.T if rows > columns else now
