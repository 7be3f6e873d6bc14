"""Optimizers whose update of a tensor looks at its shape, such as Adafactor and Muon.

An element-wise optimizer updates flat memory in one pass (`relay.optim.fused`). Those here need the whole tensor, as
matrix: rows and columns, or a product with itself. Each has which states a tensor gets and what memory its update
needs, so that both are in the ledger before a run starts. An update may have a part for the device, which then splits
it in two halves (`relay.eps.updates`). Allocation is in `relay.eps.tensor_states`. Invariant: an update takes no
memory that grows with the tensor beyond `work_elements`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from relay.optim.optimizers import HostOptimizer

TAKEN = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of parameters; half precision is updated as float32 and rounded back."""


class DevicePart(Protocol):
    """A function of one bfloat16 tensor that returns another of the same shape. It is hashable.

    A device runs it as a program, traced from `__call__` or `in_float32`. On the host it is the same function in memory
    that is given.
    """

    def __call__(self, matrix: torch.Tensor) -> torch.Tensor:
        """The function, of a tensor that it does not change."""

    def __hash__(self) -> int:
        """Of equal functions the same."""

    def in_float32(self, matrix: torch.Tensor) -> torch.Tensor:
        """The same for devices that do not run PyTorch's kernels, which may round each operation to bfloat16."""

    def work_elements(self, shape: torch.Size) -> int:
        """How many float32 `on_host` needs as work space."""

    def on_host(self, matrix: torch.Tensor, work: torch.Tensor) -> torch.Tensor:
        """The function of a float32 or bfloat16 tensor; the result lies in `work`, flat float32 memory."""


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

    def work_elements(self, shape: torch.Size, group: Mapping[str, Any], on_device: bool) -> int:
        """How many float32 the update of a tensor needs as work space; `on_device`, where a device has its part."""
        raise NotImplementedError

    def device_part(self, group: Mapping[str, Any]) -> DevicePart | None:
        """What a device computes between `begin_update` and `finish_update` of a group's tensors, if anything."""
        return None

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

    def begin_update(
        self, gradient: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any], work: torch.Tensor
    ) -> torch.Tensor:
        """The first half of an update with a device's part: change the states, and return what the device takes.

        It is a float32 tensor, rounded to bfloat16 on its way, in `work` or in a state. `step` counts this update.
        """
        raise NotImplementedError

    def again(
        self, gradient: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any], work: torch.Tensor
    ) -> torch.Tensor:
        """What `begin_update` returned, from the states that it left, after a device was lost."""
        raise NotImplementedError

    def finish_update(self, weight: torch.Tensor, result: torch.Tensor, group: Mapping[str, Any]) -> None:
        """The second half: change a float32 weight in place by what the device made, a bfloat16 tensor."""
        raise NotImplementedError
