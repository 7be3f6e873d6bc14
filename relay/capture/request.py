"""What to capture, and for which device: the one record that travels through `relay.capture`.

Plain data. Nothing is traced here. Invariant: a request is never changed; variants are made by `dataclasses.replace`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from relay.capture.core.lowering import Lowering
from relay.capture.memory_order import Order, order_of, stored
from relay.capture.trace_for_device import CPU


@dataclass(frozen=True, eq=False)
class CaptureRequest:
    """A segment to capture: `module(*inputs)`, which returns a tuple of tensors.

    Inputs and outputs are numbered by their position, from 0.

    Example::

        layer = nn.Linear(8, 8)
        captured = capture(CaptureRequest(AsTuple(layer), [torch.zeros(2, 8)], "linear", lowering=Lowering.CORE))
    """

    module: nn.Module
    """The module. Its parameters' `requires_grad` and its training mode count; nothing in it is changed."""

    inputs: Sequence[torch.Tensor]
    """Examples of the inputs. Their shapes, dtypes, strides and `requires_grad` count, their values do not."""

    name: str
    """The name of the layer in errors, warnings and names of programs."""

    ends_in_loss: bool = False
    """Whether the first output is the loss. Such a segment also gets programs that compute the loss alone, and forward
    and backward in one."""

    compute_dtype: torch.dtype = torch.float32
    """With bfloat16 or float16 the module runs as under PyTorch's autocast to that dtype. A parameter that is only used
    rounded to the dtype is then an input of that dtype."""

    lowering: Lowering = Lowering.NATIVE
    """The kind of graph that the device executes."""

    device: torch.device = CPU
    """The device that native graphs are traced for."""

    training: bool = True
    """Whether a backward is wanted."""

    save: bool = False
    """Whether the forward returns the tensors that the backward needs, so that the backward recomputes nothing. It has
    no effect on a segment that ends in the loss or runs eagerly."""

    seeds: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Examples of the gradients of outputs, by number, whose memory order differs from that of the output."""

    gradient_orders: Mapping[int, Order] = field(default_factory=dict)
    """The memory orders wanted for gradients of inputs, by number. Others come in the order in which they are made."""

    strides: bool = True
    """Whether tensors keep their memory order. Without it, and in core graphs, every tensor is contiguous."""

    unreached: frozenset[int] = frozenset()
    """Outputs to which no gradient comes back. As in plain PyTorch, what only they depend on has no gradient then,
    rather than a gradient of zeros."""

    values: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Inputs whose own numbers are known, by number: those of the batch. A dry run takes them."""

    shown: frozenset[int] = frozenset()
    """Outputs besides the loss that the joint program of a segment that ends in the loss returns too."""

    adds_loss: bool = False
    """Whether the loss may be added to what its memory holds, since it is one part of a sum."""

    late: bool = False
    """Whether the backward recomputes each op of the forward shortly before it is read, rather than all at first."""

    @property
    def wants_gradients(self) -> bool:
        """Whether there is a parameter or an input that requires a gradient."""
        return any(tensor.requires_grad for tensor in [*self.module.parameters(), *self.inputs])

    @property
    def keeps_strides(self) -> bool:
        """Whether tensors keep their memory order in the graph of this request."""
        return self.strides and self.lowering is not Lowering.CORE

    @property
    def seed_orders(self) -> dict[int, Order]:
        """The memory orders of `seeds`, by number; empty where no gradient is wanted."""
        return {number: order_of(seed) for number, seed in self.seeds.items()} if self.wants_gradients else {}

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """The tensors to trace with: the inputs, then the seeds as memory holds them.

        The joint export needs something to differentiate. If there is nothing, an input without elements follows.
        """
        if not self.wants_gradients:
            return (*self.inputs, torch.zeros(0, requires_grad=True))
        return (*self.inputs, *(stored(self.seeds[number], order) for number, order in self.seed_orders.items()))
