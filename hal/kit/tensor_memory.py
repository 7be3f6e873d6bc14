"""Device memory that is torch tensors: the host's, and that of PyTorch's accelerators.

A view's `native` is a typed slice of the buffer's tensor of bytes, so a transfer is a copy of one tensor to another. A
backend defines how the bytes are allocated, and on which thread or stream a copy runs.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch

from hal.device import Queue, View, check_transfer
from hal.event import Event
from hal.kit.accounted_device import AccountedBuffer


class TensorBuffer(AccountedBuffer[torch.Tensor]):
    """A flat tensor of bytes."""

    def native_view(self, memory: torch.Tensor, offset: int, view: View) -> torch.Tensor:
        return memory[offset : offset + view.size].view(view.dtype).view(view.shape)


class TensorTransfers(Queue):
    """A queue's transfers, as copies of tensors."""

    def write(self, target: View, source: torch.Tensor, wait: Sequence[Event] = ()) -> Event:
        return self._transfer(target.native, source, wait, "write")

    def read(self, target: torch.Tensor, source: View, wait: Sequence[Event] = ()) -> Event:
        return self._transfer(target, source.native, wait, "read")

    def copy(self, target: View, source: View, wait: Sequence[Event] = ()) -> Event:
        return self._transfer(target.native, source.native, wait, "copy")

    def _transfer(self, target: torch.Tensor, source: torch.Tensor, wait: Sequence[Event], label: str) -> Event:
        check_transfer(label, target, source)
        return self.submit_copy(target, source, wait, label)

    @abc.abstractmethod
    def submit_copy(self, target: torch.Tensor, source: torch.Tensor, wait: Sequence[Event], label: str) -> Event:
        """Copy between contiguous tensors of one dtype and number of elements, whose shapes may differ."""
