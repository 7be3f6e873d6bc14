"""Segments and values: the parts of a partition.

Plain data, made by `relay.partition` and read by the folders above it. Nothing runs here. Invariant: a segment uses
only values of the batch and of segments before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hal.slot.layout import Field
from relay.capture.guards.attribute_reads import Reads
from relay.capture.guards.data_guards import Guard
from relay.capture.memory_order import Order, stored_shape
from relay.data.loss_weight import LossPlan
from relay.graph.pytree import TensorTree


@dataclass(eq=False)
class Value:
    """A tensor that passes between segments: made by segment `producer` (None for the batch) and read by `consumers`.

    `order` and `gradient_order` are the orders of dimensions in which the tensor and its gradient lie in memory
    (`relay.capture.memory_order`). A value with `parts` holds the tensors that a segment's forward saves for its own
    backward: several tensors in one block of memory. A tensor of the batch that `requires_grad` gets a gradient. Of a
    value that is `tied` there is the gradient alone, whose parts are gradients of tied weights (`relay.runtime.ties`).
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    producer: int | None
    consumers: list[int] = field(default_factory=list)
    parts: tuple[Field, ...] = ()
    order: Order = ()
    gradient_order: Order = ()
    requires_grad: bool = False
    tied: bool = False
    own: torch.Tensor | None = None
    """The tensor of the batch itself, while the model is captured."""

    def fields(self, gradient: bool = False) -> tuple[Field, ...]:
        """The tensors in the memory of the value, or of its gradient: the tensor itself, or the parts."""
        shape = stored_shape(self.shape, self.gradient_order if gradient else self.order)
        return self.parts or (Field(0, shape, self.dtype),)


@dataclass(frozen=True)
class PositionChunks:
    """A last segment that runs over chunks of `size` of a micro-batch's `positions`, and returns its part of the loss.

    `leads` has for each input of the segment how many of its first dimensions are the positions; a chunk takes its own
    rows of it. It is 0 for an input that every chunk takes whole.
    """

    positions: int
    size: int
    leads: tuple[int, ...]

    def rows(self) -> list[tuple[int, int]]:
        """The first position and the number of positions of each chunk."""
        return [(start, min(self.size, self.positions - start)) for start in range(0, self.positions, self.size)]


@dataclass(eq=False)
class Segment:
    """A part of a model that is loaded and run as one. `module(*inputs)` returns the tuple of its outputs.

    `parameters` and `buffers` map the module's own names to the model's. Segments with equal `alike` are built alike
    (as `relay.partition.find_blocks.same_structure` compares them); None is equal to nothing. `kind` is equal for the
    layers of one stack, which may share a slot, and None for a segment that is not a layer. `layer_index` is the index
    of the segment, or of its first layer, before layers were merged: random keys count by it. `layers` is the number
    of layers in the segment. `chunks` is set for a last segment that runs over chunks of positions, `row_chunk` is how
    many positions the wide pieces of a layer take at a time, and `row_problem` why it has none, once it is captured.
    `held` are the model's names of tensors that are not its own and that its code holds.
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
    chunks: PositionChunks | None = None
    row_chunk: int | None = None
    row_problem: str = ""
    held: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.layer_index < 0:
            self.layer_index = self.index

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Make a parameter or buffer of the model one of this segment's, as its code uses it without owning it."""
        own = f"held_{len(self.held)}"
        self.held.append(name)
        if isinstance(tensor, nn.Parameter):
            self.module.register_parameter(own, tensor)
            self.parameters[own] = name
        else:
            self.module.register_buffer(own, tensor)
            self.buffers[own] = name


@dataclass(frozen=True, eq=False)
class NamedOutput:
    """A part of a model's output: the numbers of its tensors among the results, and how they are nested."""

    numbers: tuple[int, ...]
    tree: TensorTree


@dataclass(eq=False)
class Partition:
    """A model cut into segments for batches of one shape. `inputs` are the values of the batch's tensors, in order.

    With `has_loss` the first output of the last segment is the loss. `results` are the values of the model's other
    outputs; `result_tree` nests them as the model does. `guards` are the conditions on the batch under which the model
    takes the traced path. `loss_plan` says how the losses of micro-batches make the loss of the batch, and what follows
    the batch's tensors among the `inputs`. `reads` are the attributes that the code around the layers read.
    `named_outputs` are the outputs that a training step returns besides the loss. The first `leading` segments prepare
    the batch for the last one. With a `head` the last segment stands for one that runs over the whole batch
    (`relay.partition.whole_head`): its inputs are what the head takes of this micro-batch. `left_whole` is why the last
    segment does not run over chunks of positions where they were asked for.
    """

    segments: list[Segment]
    values: list[Value]
    inputs: tuple[int, ...]
    has_loss: bool
    results: tuple[int, ...]
    result_tree: TensorTree
    loss_plan: LossPlan = field(default_factory=LossPlan)
    guards: tuple[Guard, ...] = ()
    reads: Reads = field(default_factory=dict)
    named_outputs: dict[str, NamedOutput] = field(default_factory=dict)
    leading: int = 0
    head: WholeHead | None = None
    left_whole: str = ""


@dataclass(frozen=True)
class Join:
    """How the micro-batches' parts of a value make that of the whole batch.

    `kind` is "rows" (samples lie along `dim`, in blocks of `unit`), "same" (every micro-batch has the same), "sum", or
    "mean" (every micro-batch counts by its samples).
    """

    kind: str
    dim: int = 0
    unit: int = 1


@dataclass(frozen=True, eq=False)
class WholeHead:
    """The head over the whole batch.

    `partition` has one segment, the head as a module of the whole batch's tensors, and the values of the batch; of its
    results those that are not computed are -1. `joins` are of the inputs of the last segment in the partition of a
    micro-batch. Argument i of the module is number `arguments[i]` of the joined values followed by the batch's tensors
    that the head takes. `form` is equal for heads that compute the same.
    """

    partition: Partition
    joins: tuple[Join, ...]
    arguments: tuple[int, ...]
    form: Any
