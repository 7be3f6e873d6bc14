"""Programs and kernels: the computations that a device compiles and runs.

A `Program` is a captured graph of ATen ops (`torch.fx`) with named, shaped inputs and outputs; it is data, the same for
every device. A `Kernel` is what one device made of it. Neither has memory: a `hal.device.KernelCall` binds it.

Contract of a program
  * The graph is functional: no op writes to its inputs. Its placeholders are `inputs` in order (then, when `draws`,
    one more for the random key); it returns a tuple of tensors, `outputs` in order.
  * Inputs and outputs are contiguous tensors of the given shapes and dtypes.
  * `Port.accumulates` marks outputs that may be added to what the destination holds instead of replacing it
    (gradients over micro-batches, gradients of a value with several uses). Each run decides whether they are. The sum
    is destination + value, rounded once, in that order; a value's gradient that is itself a sum over uses (its adds
    are marked `is_gradient_acc`) may be added use by use instead, which is what autograd does.
  * An output with role BUFFER_UPDATE may be given the same memory as the input it replaces: a kernel writes it only
    after every read of that input.
  * Random ops are calls of `hal.random` with the key and an op number; nothing else in a graph draws random numbers.

Contract of a kernel: it belongs to one device, may be run many times and on several queues of that device, and keeps no
state between runs.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

import torch
from torch import fx


class Role(enum.Enum):
    """The meaning of a port for the relay."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    VALUE = "value"
    SEED = "seed"
    PARAMETER_GRADIENT = "parameter gradient"
    VALUE_GRADIENT = "value gradient"
    BUFFER_UPDATE = "buffer update"


@dataclass(frozen=True)
class Port:
    """An input or an output of a program.

    Args:
        role: what the tensor is.
        index: the number of the parameter, buffer or value in its segment.
        shape: extents in elements.
        dtype: the dtype of the elements.
        accumulates: of an output, whether it may be added to its memory.
    """

    role: Role
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    accumulates: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Program:
    """A captured computation. Two programs with equal `fingerprint` compute the same.

    Args:
        name: the name of the layer and of the pass, for errors.
        graph: the ops.
        inputs: the ports of the graph's placeholders, in order, without the key.
        outputs: the ports of the graph's results, in order.
        constants: the tensors that the graph's `get_attr` nodes name.
        draws: whether the graph draws random numbers; then its last placeholder is the key.
        flops: multiplications and additions of matrix products and attention (2 for a multiply-add), as
            torch.utils.flop_counter counts them.
        moved: bytes that the ops read and write in sum, if no value stays in a cache.
        workspace: the peak of bytes that live only inside a run, by the liveness of the graph. Inputs, outputs and the
            internals of libraries are not counted.
        fingerprint: a hash of all that decides the results.
    """

    name: str
    graph: fx.Graph = field(repr=False)
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    constants: dict[str, torch.Tensor] = field(repr=False)
    draws: bool
    flops: int
    moved: int
    workspace: int
    fingerprint: str


class Kernel:
    """A program as one device runs it. Backends subclass it; the relay only passes it on, in a `KernelCall`."""

    def __init__(self, program: Program) -> None:
        self.program = program
