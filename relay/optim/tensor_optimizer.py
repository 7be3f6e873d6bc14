"""Optimizers whose update of a tensor looks at its shape, such as Adafactor and Muon.

An element-wise optimizer updates flat memory in one pass (`relay.optim.fused`). Those here need the whole tensor, as
matrix: rows and columns, or a product with itself. Each says which states a tensor has and what memory its update
needs, so that both are in the ledger before a run starts. Allocation is in `relay.eps.tensor_states`. Invariant: an
update takes no memory that grows with the tensor beyond what `work_elements` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from relay.optim.optimizers import HostOptimizer

TAKEN = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of parameters; half precision is updated as float32 and rounded back."""


@dataclass(frozen=True)
class TensorOptimizer(HostOptimizer):
    """What such optimizers have in common."""

    def check_dtype(self, name: str, dtype: torch.dtype, state_dtype: str) -> None:
        if dtype not in TAKEN:
            raise ValueError(
                f"{name!r} is {dtype}: {type(self).__name__} updates float32 and half precision. Freeze it with "
                "requires_grad_(False), or make it float32."
            )

    def state_shapes(self, shape: torch.Size, group: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The shapes of a tensor's float32 states by name, besides its step count."""
        raise NotImplementedError

    def work_elements(self, shape: torch.Size, group: Mapping[str, Any]) -> int:
        """How many float32 the update of a tensor needs as work space."""
        raise NotImplementedError

    def update_tensor(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        state: Mapping[str, Any],
        group: Mapping[str, Any],
        work: torch.Tensor,
    ) -> None:
        """Change a float32 weight in place; `step` of the state counts this update already.

        The gradient (float32) may be overwritten, and so may `work`, flat float32 memory.
        """
        raise NotImplementedError
