"""The outputs of a batch, joined from those of its micro-batches.

What belongs to samples is put together along the dimension of the samples, sums are added, means averaged. How is known
from following the batch through the model; where it is not, an output is joined only if its shape leaves no doubt.
Invariant: what is returned is what the model gives for the whole batch, or it is refused, or a warning names it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from relay.errors import PartitionError

FREE = "free"
"""The same for every micro-batch."""
SUMMED = "summed"
"""A sum over samples."""
AVERAGED = "averaged"
"""A mean over samples."""


@dataclass(frozen=True)
class RowsAlong:
    """What stands at index i of dimension `dim` belongs to sample (i // unit) % (number of samples)."""

    dim: int
    unit: int

    def join(self, rows: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
        """The rows of all samples."""
        dim, shape = self.dim, rows[0].shape
        outer = shape[dim] // (sizes[0] * self.unit)
        parts = [
            row.reshape(*shape[:dim], outer, size, self.unit, *shape[dim + 1 :])
            for row, size in zip(rows, sizes, strict=True)
        ]
        return torch.cat(parts, dim + 1).reshape(*shape[:dim], -1, *shape[dim + 1 :])


Join = RowsAlong | str


def join_output(
    rows: Sequence[torch.Tensor], sizes: Sequence[int], weights: Sequence[float], how: Join | None, name: str
) -> torch.Tensor:
    """One output of the model, from those of the micro-batches.

    `weights` are what a mean counts, `how` is None where it is not known. Raises PartitionError for a tensor that the
    micro-batches do not give. `name` is used in errors.
    """
    first = rows[0]
    if len(rows) == 1 or how == FREE:
        return first
    if isinstance(how, RowsAlong):
        return how.join(rows, sizes)
    if how == SUMMED:
        return torch.stack(list(rows)).sum(0)
    if how is None and first.dim() and [len(row) for row in rows] == list(sizes):
        return torch.cat(list(rows))
    if how is None and all(torch.equal(row, first) for row in rows[1:]):
        return first
    if first.dim() == 0 and first.dtype.is_floating_point:
        if how is None:
            warnings.warn(
                f"{name}, a scalar, cannot be followed through the model, so it is the mean of what the micro-batches "
                "give, which may not be that of the whole batch. Use microbatches=1 for that.",
                stacklevel=2,
            )
        return torch.stack([row * weight for row, weight in zip(rows, weights, strict=True)]).sum()
    shapes = ", ".join(str(tuple(row.shape)) for row in rows[:3])
    raise PartitionError(
        f"{name} cannot be put together from micro-batches of {', '.join(map(str, sizes[:3]))} samples, which give "
        f"tensors of shapes {shapes}: which of their dimensions is that of the samples cannot be seen. Use "
        "microbatches=1, or return tensors whose first dimension is that of the samples."
    )
