"""A segment's module in the form in which it is traced.

Tracing asks for something to differentiate, for outputs that share no memory, and for buffers that are changed in
place; modules do as they like. Invariant: what comes out is what the module returns, to the bit, as is what flows
back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from relay.capture.memory_order import Order, Seeded, as_written, order_in_memory
from relay.capture.trace_for_device import CPU, OnDevice


def autocast(compute: torch.dtype, kind: str = "cpu") -> contextlib.AbstractContextManager[Any]:
    """PyTorch's autocast to that dtype on devices of that type; nothing for float32."""
    if compute is torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(kind, dtype=compute)


class Traced(nn.Module):
    """The module as it is traced: under autocast if asked, with a spare output to differentiate if it has none."""

    def __init__(
        self,
        module: nn.Module,
        compute: torch.dtype,
        has_spare: bool,
        device: torch.device,
        seeds: Mapping[int, Order],
        strided: bool,
        unreached: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self.module = module
        self.compute = compute
        self.has_spare = has_spare
        self.device = device
        self.seeds = dict(seeds)
        self.strided = strided
        self.unreached = unreached

    def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        spare = arguments[-1:] if self.has_spare else ()
        last = len(arguments) - len(spare)
        inputs, seeds = arguments[: last - len(self.seeds)], arguments[last - len(self.seeds) : last]
        # The backward is traced outside of autocast, as eager backward runs outside of it.
        buffers = dict(self.module.named_buffers())
        on_device = OnDevice(self.device) if self.device != CPU else contextlib.nullcontext()
        with autocast(self.compute, self.device.type), on_device:
            outputs: tuple[torch.Tensor, ...] = self.module(*inputs)
        self._take_in_assigned(buffers)
        # Tracing gives an output that shares memory with an input or another output no gradient of its own.
        taken = {id(tensor) for tensor in inputs}
        separate = []
        for output in outputs:
            shares = id(output) in taken or output._is_view()
            if not self.strided:
                own = output.clone(memory_format=torch.contiguous_format) if shares else output.contiguous()
            else:
                own = output.clone() if shares or order_in_memory(output) is None else output
            separate.append(own)
            taken.add(id(output))
        for (index, order), seed in zip(self.seeds.items(), seeds, strict=True):
            separate[index] = Seeded.apply(separate[index], as_written(seed, order))
        for index in self.unreached:
            separate[index] = separate[index].detach()
        return (*separate, *(one * 2 for one in spare))

    def _take_in_assigned(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """A buffer that the forward replaced (`self.average = ...`) is changed in place, as the trace can see it."""
        for name, buffer in buffers.items():
            owner, _, own_name = name.rpartition(".")
            module = self.module.get_submodule(owner)
            assigned = getattr(module, own_name)
            if assigned is not buffer:
                buffer.copy_(assigned.detach())
                setattr(module, own_name, buffer)
