"""The norm of gradients whose elements lie on several ranks, the same to the bit whatever the number of ranks.

A parameter is cut into blocks whose size depends on its own size alone, and a rank owns whole blocks. The norms of a
parameter's blocks are joined in their order, those of parameters in the model's order. Invariant: the norm depends on
the gradients alone, not on the number of ranks or threads.
"""

from __future__ import annotations

import torch

SMALLEST = 64
"""Elements of the smallest block: a cache line of any dtype, so that vectorised kernels see no boundary."""
ROW = 16_384
"""The most elements that are reduced by one loop of PyTorch's. Fewer than it would share out among threads."""
MOST = 1024
"""About how many blocks a parameter has at most."""


def block_of(size: int) -> int:
    """The elements of a block of a parameter of `size` elements."""
    block = SMALLEST * -(-size // (SMALLEST * MOST))
    return block if block <= ROW else -(-block // ROW) * ROW


def block_count(elements: int, size: int) -> int:
    """How many blocks so many elements of a parameter of `size` elements are; they begin with a block."""
    return -(-elements // block_of(size)) if elements else 0


def block_norms(share: torch.Tensor, size: int) -> torch.Tensor:
    """The 2-norms of a flat share's blocks, in float64. The share begins with a block; `size` is the parameter's."""
    block = block_of(size)
    whole = share.numel() // block
    parts = [_norms(share[: whole * block].view(whole, block))] if whole else []
    if share.numel() > whole * block:
        parts.append(_last(share[whole * block :]))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _norms(rows: torch.Tensor) -> torch.Tensor:
    """The norm of each row. PyTorch shares rows out among threads, and reduces each in one loop."""
    count, block = rows.shape
    if block <= ROW:
        return torch.linalg.vector_norm(rows, dim=1).double()
    inner = torch.linalg.vector_norm(rows.reshape(-1, ROW), dim=1).double().view(count, -1)
    return torch.linalg.vector_norm(inner, dim=1)


def _last(rest: torch.Tensor) -> torch.Tensor:
    """The norm of a block that is shorter, as one number."""
    whole = rest.numel() // ROW
    parts = [torch.linalg.vector_norm(rest[: whole * ROW].view(whole, ROW), dim=1).double()] if whole else []
    if rest.numel() > whole * ROW:
        parts.append(torch.linalg.vector_norm(rest[whole * ROW :].view(1, -1), dim=1).double())
    return joined(torch.cat(parts)).view(1)


def joined(norms: torch.Tensor) -> torch.Tensor:
    """The norm of tensors whose norms are these (float64, flat)."""
    if not norms.numel():
        return torch.zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(norms)
