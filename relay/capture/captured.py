"""What capture makes of a segment: its programs, and what belongs to them.

Plain data: made by `joint`, read by `relay.runtime.stages`.
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

    `backward` is None where nothing asks for a gradient. In a program's ports `index` counts the segment's own
    parameters (each once, in the order of `parameter_names`), buffers, input values and output values.

    A segment that ends in the loss also has `loss` (the loss and buffer updates alone) and `joint` (those and the
    gradients, in one run: the last segment is not run twice).

    `saved_bytes` is what plain training would keep of this segment between its forward and its backward, in bytes.
    `saved` are what `backward` is given of the forward besides its inputs: own outputs, then tensors kept for it and
    copies of buffers as the forward found them, which are further outputs (`index` counts on from the outputs).
    `eager` is the segment as it is run where it could not be captured, `reads` what the module's code looked at.

    Ports of values, their gradients and seeds have the shape of the memory that holds them; `output_orders`,
    `seed_orders` and `gradient_orders` (of inputs) say in which order of dimensions where it is not as written.

    `recut`, where the trace was kept, cuts the programs out of it under another name, for gradients of inputs in other
    orders, or the other way as to keeping: what `capture` would have made, without tracing.
    """

    parameter_names: tuple[tuple[str, ...], ...]
    buffer_names: tuple[str, ...]
    forward: Program
    backward: Program | None
    loss: Program | None
    joint: Program | None
    output_requires_grad: tuple[bool, ...]
    saved_bytes: int
    saved: tuple[Port, ...] = ()
    eager: EagerSegment | None = None
    reads: Reads | None = None
    output_orders: Mapping[int, Order] = field(default_factory=dict)
    seed_orders: Mapping[int, Order] = field(default_factory=dict)
    gradient_orders: Mapping[int, Order] = field(default_factory=dict)
    recut: Callable[[str, Mapping[int, Order], bool], Captured] | None = None
