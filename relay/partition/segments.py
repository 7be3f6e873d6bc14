"""Segments and values: what a partition is made of.

Plain data, made by `partition` and read by everything after it. Nothing runs here. Invariant: no segment uses a value
before the one that makes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hal.slot import Field
from relay.capture.guards.data_guards import Guard
from relay.capture.memory_order import Order, stored_shape
from relay.data.loss_weight import LossWeight
from relay.graph.pytree import TensorTree


@dataclass(eq=False)
class Value:
    """A tensor that one segment makes (or the batch brings, where `producer` is None) and others use.

    `order` and `gradient_order` say how its memory and its gradient's lie (`relay.capture.memory_order`). With `parts`
    it is what a segment's forward keeps for its own backward: several tensors in one piece of memory.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    producer: int | None
    consumers: list[int] = field(default_factory=list)
    parts: tuple[Field, ...] = ()
    order: Order = ()
    gradient_order: Order = ()

    def fields(self, gradient: bool = False) -> tuple[Field, ...]:
        """The tensors that its memory (or its gradient's) holds: itself, or its parts."""
        shape = stored_shape(self.shape, self.gradient_order if gradient else self.order)
        return self.parts or (Field(0, shape, self.dtype),)


@dataclass(eq=False)
class Segment:
    """A part of a model that is loaded and run as one. `module(*inputs)` returns the tuple of its outputs.

    `parameters` and `buffers` map the module's own names to the model's. Segments with equal `alike` are built alike
    (as `relay.partition.find_blocks.same_structure` compares them); None is equal to nothing. `kind` is equal for the
    layers of one stack, which may share a slot, and None for a segment that is not a layer. `layer_index` is the index
    of the segment, or of its first layer, before layers were merged: random keys count by it. `layers` is the number
    of layers in the segment.
    """

    index: int
    name: str
    module: nn.Module
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    parameters: dict[str, str]
    buffers: dict[str, str]
    alike: Any = None
    kind: Any = None
    layer_index: int = -1
    layers: int = 1

    def __post_init__(self) -> None:
        if self.layer_index < 0:
            self.layer_index = self.index


@dataclass(eq=False)
class Partition:
    """A model cut up for batches of one shape. `inputs` are the values of the batch's tensors in order.

    The last segment's first output is the loss when `has_loss`; `results` are the values of the model's other
    outputs, which `result_tree` puts back into the model's own structure. `guards` are the model's questions about
    the batch that was traced: for one that answers otherwise it takes another path. `loss_doubt` says why the pieces'
    losses may not make the batch's (`relay.partition.loss_forms`).
    """

    segments: list[Segment]
    values: list[Value]
    inputs: tuple[int, ...]
    has_loss: bool
    results: tuple[int, ...]
    result_tree: TensorTree
    loss_weight: LossWeight | None
    loss_doubt: str | None = None
    guards: tuple[Guard, ...] = ()
