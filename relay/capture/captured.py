"""The result of a capture: the programs of a segment, and what is needed to run them.

Plain data, made by `relay.capture.capture` and read by `relay.runtime`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hal.program import Port, Program
from relay.capture.eager_call import EagerSegment
from relay.capture.guards.attribute_reads import Reads
from relay.capture.memory_order import Order


@dataclass(frozen=True, eq=False)
class Captured:
    """The programs of a segment.

    The `index` of a program's port counts the segment's parameters (each once, in the order of `parameter_names`), its
    buffers, its input values or its output values, by the port's role. Ports of values, of their gradients and of seeds
    have the shape of the contiguous memory that holds them.
    """

    parameter_names: tuple[tuple[str, ...], ...]
    """All names of each parameter in the module."""

    buffer_names: tuple[str, ...]
    """The name of each buffer in the module."""

    forward: Program
    """From parameters, buffers and inputs to outputs, saved tensors and new values of buffers."""

    backward: Program | None
    """The gradients of parameters and inputs. None if no gradient is wanted, or if the segment ends in the loss."""

    loss: Program | None
    """For a segment that ends in the loss: the loss and the new values of buffers alone."""

    joint: Program | None
    """For a segment that ends in the loss: what `loss` gives, the `shown` outputs and the gradients, in one run."""

    output_requires_grad: tuple[bool, ...]
    """For each output, whether a gradient flows back through it."""

    saved_bytes: int
    """The bytes that autograd would save between this segment's forward and backward."""

    saved: tuple[Port, ...] = ()
    """What `backward` takes of the forward besides the segment's inputs: some of the outputs, and then tensors saved
    for it and copies of buffers as the forward found them. The latter are further outputs of `forward`, whose `index`
    continues that of the outputs."""

    eager: EagerSegment | None = None
    """The module as it is run, for a segment that runs eagerly."""

    reads: Reads | None = None
    """The attributes that the module's code read while it was traced."""

    row_problem: str = ""
    """Why no piece of the module runs over chunks of positions, where that was asked for."""

    holds_tensors: bool = False
    """Whether the module's code holds parameters outside its own tables. The capture then serves this segment alone."""

    output_orders: Mapping[int, Order] = field(default_factory=dict)
    """The memory orders of outputs, by number."""

    seed_orders: Mapping[int, Order] = field(default_factory=dict)
    """The memory orders of seeds, which are gradients of outputs, by number of the output."""

    gradient_orders: Mapping[int, Order] = field(default_factory=dict)
    """The memory orders of gradients of inputs, by number of the input."""

    recut: Callable[[str, Mapping[int, Order], bool, frozenset[int]], Captured] | None = None
    """Cuts the programs out of the same trace for another (name, gradient_orders, save, shown), as `capture` would for
    such a request. None if the trace has not been kept."""
