"""Backends, devices, queues and events: the contracts that every accelerator fulfils.

This file holds the interface and its contracts; it implements nothing a device could do differently.

Contracts
  1. Every asynchronous call returns its `Event`. Ordering across queues is only by `wait=`; calls on one queue run
     in the order of their submission. There is no ambient current device or stream.
  2. Events exist only through submission, so waiting for what nobody submitted cannot be written. Since a call can
     only wait for calls submitted before it, a schedule cannot deadlock.
  3. Errors travel along events: a call that fails, or that waits on one that failed, fails with the *first* error,
     and does not run. The native error is chained to it. Calls that do not wait on a failed one are not touched.
  4. `write` borrows the host memory until its event is done; `read` owns its destination until then.
  5. A freed buffer outlives the work queued on it: `free` gives the bytes back to the account at once, and the
     memory itself when the last queued call that uses it is done.
  6. Storage dtypes and compute dtypes are two sets (`DeviceInfo.storage`, `DeviceInfo.compute`).
  7. What is unsupported is data: tags in `DeviceInfo`, `Unsupported` at compile time. Nobody asks with hasattr.
  8. Memory is accounted: `memory()` gives bytes in use, peak and capacity; beyond the capacity `alloc` and
     `compile` (for its workspace) raise `OutOfMemory`, on every backend.
  9. A device tagged UNIFIED shares the host's memory: `adopt` gives a view of host memory and `host_tensor` the
     reverse, and a transfer between a view and the memory that it aliases copies nothing. Results may not differ.
  10. Probing never raises and never lies: it opens the device, runs a small kernel and reads it back.
"""

from __future__ import annotations

import abc
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hal.errors import Unsupported
from hal.event import Event
from hal.host import Host
from hal.known_gaps import KnownGap
from hal.memory import MemoryUse
from hal.program import Kernel, Program
from hal.random import RandomKey

UNIFIED = "unified"
"""Tag: the device works in host memory (contract 9)."""

NATIVE = "native"
"""Tag: programs are wanted undecomposed (fused attention and the like), as PyTorch's own devices run them."""

HOST_CORES = "host-cores"
"""Tag: kernels run on the cores that the host's tasks need too, so the two gain nothing from running at once."""

SIMULATED = "simulated"
"""Tag: there is no such hardware here. Numbers are computed on the host, and time is that of a model."""


@dataclass(frozen=True)
class DeviceInfo:
    """What a device is. `name` is the string that opens it.

    `traced_for` is PyTorch's own name of a NATIVE device: its programs hold the ops that autograd would run there.
    """

    name: str
    description: str
    tags: frozenset[str]
    storage: frozenset[torch.dtype]
    compute: frozenset[torch.dtype]
    memory: int | None = None
    notes: tuple[str, ...] = ()
    traced_for: str = "cpu"

    @property
    def unified(self) -> bool:
        """Whether transfers may alias (contract 9)."""
        return UNIFIED in self.tags


@dataclass(eq=False)
class View:
    """A contiguous, typed region of device memory. `native` is the backend's own handle (a tensor, a sub-buffer)."""

    native: Any
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def check_place(self, offset: int, size: int) -> None:
        """Hold it to a buffer of `size` bytes, `offset` bytes in: ValueError where it passes an end or is unaligned."""
        if offset < 0 or offset + self.size > size or offset % self.dtype.itemsize:
            raise ValueError(
                f"a view of {self.size} bytes ({self.shape} of {self.dtype}) at offset {offset} does not lie, aligned,"
                f" in a buffer of {size} bytes"
            )


def check_transfer(label: str, target: View | torch.Tensor, source: View | torch.Tensor) -> None:
    """Hold the two sides of a copy to each other: ValueError where dtypes or counts differ or a tensor has gaps."""
    if target.dtype != source.dtype or (
        target.shape != source.shape and math.prod(target.shape) != math.prod(source.shape)
    ):
        raise ValueError(
            f"{label} needs two sides alike; got {tuple(target.shape)} of {target.dtype} from {tuple(source.shape)} of "
            f"{source.dtype}"
        )
    for side in (target, source):
        if isinstance(side, torch.Tensor) and not side.is_contiguous():
            raise ValueError(f"{label} needs contiguous memory on both sides, got strides {side.stride()}")


class Buffer(abc.ABC):
    """Device memory of a fixed size. Addresses do not change while it lives."""

    size: int

    @abc.abstractmethod
    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> View:
        """The region of this shape and dtype starting `offset` bytes in. ValueError where it passes the end."""

    @abc.abstractmethod
    def free(self) -> None:
        """Give the memory back (contract 5). Freeing twice is harmless."""


_NATIVE = operator.attrgetter("native")


@dataclass(frozen=True, slots=True, eq=False)
class KernelCall:
    """What a queue is asked to run: a kernel, the memory that it reads and writes, and how it writes.

    Args:
        kernel: what `Device.compile` returned, on the device of the queue.
        inputs: one view for each of `program.inputs`, in that order, with its shape and dtype.
        outputs: one view for each of `program.outputs`, in that order, with its shape and dtype. The view of an output
            with the role BUFFER_UPDATE may be the view of the input that it replaces; no other output may overlap an
            input.
        accumulate: for each output, True to add it to what its view holds (only where `Port.accumulates`), False to
            replace that. An empty tuple replaces all outputs.
        key: the key of the program's random numbers; None for a program that draws none.

    Raises:
        ValueError: the number of inputs, outputs or entries of `accumulate` is not the program's, or a program that
            draws random numbers is given no key.
    """

    kernel: Kernel
    inputs: Sequence[View]
    outputs: Sequence[View]
    accumulate: tuple[bool, ...] = ()
    key: RandomKey | None = None

    def __post_init__(self) -> None:
        program = self.kernel.program
        inputs, outputs = len(self.inputs), len(self.outputs)
        if inputs != len(program.inputs) or outputs != len(program.outputs):
            raise ValueError(
                f"{program.name} takes {len(program.inputs)} inputs and {len(program.outputs)} outputs, "
                f"got {inputs} and {outputs}"
            )
        if self.accumulate and len(self.accumulate) != outputs:
            raise ValueError(
                f"{program.name} has {outputs} outputs, and `accumulate` has {len(self.accumulate)} entries. Give one "
                "for each output, or an empty tuple."
            )
        if program.draws and self.key is None:
            raise ValueError(f"{program.name} draws random numbers and was run without a key. Give `key=`.")

    def arguments(self, handle: Callable[[View], Any] = _NATIVE) -> list[Any]:
        """The arguments of a function over the call's memory: inputs, the key if the program draws, outputs.

        Args:
            handle: what the function takes for a view; `View.native` unless given.
        """
        keys = [self.key] if self.kernel.program.draws else []
        return [*map(handle, self.inputs), *keys, *map(handle, self.outputs)]


class Queue(abc.ABC):
    """Calls that run one after another, asynchronously to the caller. `wait` lists events of any queue or host."""

    name: str

    @abc.abstractmethod
    def write(self, target: View, source: torch.Tensor, wait: Sequence[Event] = ()) -> Event:
        """Copy a contiguous host tensor to the device. Same dtype and number of elements, else ValueError."""

    @abc.abstractmethod
    def read(self, target: torch.Tensor, source: View, wait: Sequence[Event] = ()) -> Event:
        """Copy from the device to a contiguous host tensor. Same dtype and number of elements, else ValueError."""

    @abc.abstractmethod
    def copy(self, target: View, source: View, wait: Sequence[Event] = ()) -> Event:
        """Copy within the device. Same dtype and number of elements, else ValueError."""

    @abc.abstractmethod
    def fill(self, target: View, value: float, wait: Sequence[Event] = ()) -> Event:
        """Set every element."""

    @abc.abstractmethod
    def run(self, call: KernelCall, wait: Sequence[Event] = ()) -> Event:
        """Run a kernel on the memory that `call` names. Returns the event of its end."""


class Device(abc.ABC):
    """An opened device."""

    info: DeviceInfo

    @abc.abstractmethod
    def alloc(self, size: int, what: str = "buffer") -> Buffer:
        """`size` bytes of device memory, aligned to at least 64 bytes. OutOfMemory names `what`."""

    @abc.abstractmethod
    def queue(self, name: str) -> Queue:
        """The queue of that name, made on first use. Names are the caller's; queues run side by side."""

    @abc.abstractmethod
    def compile(self, program: Program) -> Kernel:
        """Make a kernel. The same program, by fingerprint, gives the same kernel.

        Raises Unsupported (naming the op), CompileError, or OutOfMemory for the workspace.
        """

    @abc.abstractmethod
    def host(self, capacity: int | None = None, pinned: int | None = None) -> Host:
        """A host beside this device: where the EPS keeps and updates what the device only borrows.

        `capacity` limits its memory and `pinned` the page-locked part of it, in bytes; None is no limit of ours.
        """

    @abc.abstractmethod
    def memory(self) -> MemoryUse:
        """Bytes in use, peak and capacity."""

    @abc.abstractmethod
    def reset_peak(self) -> None:
        """Start a new peak from the bytes in use now."""

    def adopt(self, tensor: torch.Tensor) -> View:
        """A view of host memory, on a UNIFIED device; elsewhere Unsupported. The tensor must be contiguous."""
        raise Unsupported(f"device {self.info.name!r} has memory of its own: write and read instead of aliasing")

    def host_tensor(self, view: View) -> torch.Tensor:
        """The host's tensor over a view's memory, on a UNIFIED device; elsewhere Unsupported."""
        raise Unsupported(f"device {self.info.name!r} has memory of its own: write and read instead of aliasing")

    @abc.abstractmethod
    def close(self) -> None:
        """Wait for queued work, stop the queues, free everything. Closing twice is harmless."""


@dataclass(frozen=True)
class Probe:
    """What probing found: a device that works (`reason` empty), or why it does not."""

    name: str
    available: bool
    reason: str = ""
    description: str = ""
    memory_bytes: int | None = None
    tags: frozenset[str] = field(default_factory=frozenset)
    notes: tuple[str, ...] = ()


class Backend(abc.ABC):
    """A family of devices under one name: the part of a device string before the colon.

    `known_gaps` are the conformance tests that its devices do not pass, with reasons (contract 7).
    """

    name: str
    known_gaps: tuple[KnownGap, ...] = ()

    @abc.abstractmethod
    def probe(self) -> list[Probe]:
        """What is here and works, and what is not and why (contract 10). Never raises."""

    @abc.abstractmethod
    def open(self, selector: str, capacity: int | None = None) -> Device:
        """Open the device chosen by the part of the device string after the colon (empty: the first).

        Raises Unavailable with the reason.
        """

    def export(
        self,
        program: Program,
        path: Path,
        inputs: Sequence[str],
        outputs: Sequence[str],
        weights: Mapping[str, torch.Tensor],
    ) -> Path:
        """Write a core program as a file of the backend's own format, its ports under these names. Returns the path.

        Inputs that `weights` has are put into the file. Unsupported where the backend has no format for files.
        """
        raise Unsupported(f"the backend {self.name!r} writes no files; `onnx` does")
