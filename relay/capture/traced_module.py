"""A segment's module in the form in which it is traced.

The joint export requires something to differentiate, outputs that share no memory, and buffers that change in place;
modules need not obey that. Invariant: outputs and gradients are those of the module, to the bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from relay.capture.guards.attribute_reads import reads_unrecorded
from relay.capture.guards.counters import Counter, changed, computed_with, numbers_of
from relay.capture.guards.executed_code import recorded_code
from relay.capture.guards.functional_call import carry_attributes, tensor_at
from relay.capture.guards.held_tensors import replacing
from relay.capture.guards.plain_tensors import PlainTensors
from relay.capture.memory_order import Seeded, as_written, order_in_memory
from relay.capture.request import CaptureRequest
from relay.capture.trace_for_device import CPU, OnDevice


def autocast(dtype: torch.dtype, device_type: str = "cpu") -> contextlib.AbstractContextManager[Any]:
    """PyTorch's autocast to `dtype` on devices of that type, or a context without effect for float32."""
    if dtype is torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=dtype)


class TracedModule(nn.Module):
    """The module of a request as it is traced.

    `forward` takes `CaptureRequest.arguments`. It returns the outputs, and one more if there is nothing else to
    differentiate. `holds_tensors` is whether its code was found to hold parameters by itself, `counters`
    the numbers that its last call changed and that its code computes with.
    """

    def __init__(self, request: CaptureRequest) -> None:
        super().__init__()
        self.module = request.module
        self.compute_dtype = request.compute_dtype
        self.device = request.device
        self.has_spare_input = not request.wants_gradients
        self.seed_orders = request.seed_orders
        self.keeps_strides = request.keeps_strides
        self.unreached = request.unreached
        self.layer = request.name
        self.holds_tensors = False
        self.counters: list[Counter] = []
        self.plain: list[PlainTensors] = []
        self._assigned: set[str] = set()
        self.originals = dict([*self.module.named_parameters(), *self.module.named_buffers()])
        self.attributes = [(name, dict(vars(one))) for name, one in self.module.named_parameters() if vars(one)]

    def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        spare = arguments[-1:] if self.has_spare_input else ()
        last = len(arguments) - len(spare)
        first_seed = last - len(self.seed_orders)
        inputs, seeds = arguments[:first_seed], arguments[first_seed:last]
        buffers = dict(self.module.named_buffers())
        for name, attributes in self.attributes:
            owner, _, own_name = name.rpartition(".")
            carry_attributes(attributes, getattr(self.module.get_submodule(owner), own_name))
        for name in self._assigned:  # autograd may have saved the buffer, which is written to afterwards
            owner, _, own_name = name.rpartition(".")
            setattr(self.module.get_submodule(owner), own_name, buffers[name].clone())
        with reads_unrecorded():
            current = [tensor_at(self.module, name) for name in self.originals]
        own = replacing(list(self.originals.values()), current, self.layer)
        on_device = OnDevice(self.device) if self.device != CPU else contextlib.nullcontext()
        # The backward is traced outside of autocast, as PyTorch runs it outside of autocast.
        before = numbers_of(self.module)
        with autocast(self.compute_dtype, self.device.type), on_device, recorded_code() as ran, own as replaced:
            with PlainTensors(self.module) as plain:  # the module is run several times, each time as it was
                outputs: tuple[torch.Tensor, ...] = self.module(*inputs)
        self.plain.append(plain)
        self.counters = computed_with(changed(before, numbers_of(self.module), ran), ran)
        self.holds_tensors = replaced is not None and bool(replaced.used)
        self._copy_assigned_buffers(buffers)
        # An output that shares memory with an input or another output would get no gradient of its own.
        taken = {id(tensor) for tensor in inputs}
        separate = []
        for output in outputs:
            shares = id(output) in taken or output._is_view()
            if not self.keeps_strides:
                own = output.clone(memory_format=torch.contiguous_format) if shares else output.contiguous()
            else:
                own = output.clone() if shares or order_in_memory(output) is None else output
            separate.append(own)
            taken.add(id(output))
        for (index, order), seed in zip(self.seed_orders.items(), seeds, strict=True):
            separate[index] = Seeded.apply(separate[index], as_written(seed, order))
        for index in self.unreached:
            separate[index] = separate[index].detach()
        return (*separate, *(tensor * 2 for tensor in spare))

    def _copy_assigned_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors that the forward assigned to buffers (`self.average = ...`) into the buffers, as traces see
        that.
        """
        for name, buffer in buffers.items():
            owner, _, own_name = name.rpartition(".")
            module = self.module.get_submodule(owner)
            assigned = getattr(module, own_name)
            if assigned is not buffer:
                self._assigned.add(name)
                buffer.copy_(assigned.detach())
                setattr(module, own_name, buffer)
