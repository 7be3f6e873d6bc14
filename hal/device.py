"""Backends, devices, queues and views: the interfaces of an accelerator, and the contracts that every device fulfils.

This file holds the interfaces; it implements nothing that devices could do differently.

Contracts
  1. Every asynchronous call returns its `Event`. Calls on one queue run in the order of their submission; across queues
     only `wait=` orders them. There is no current device and no current stream.
  2. Events exist only through submission, so a call can only wait for calls that were submitted before it, and a
     schedule cannot deadlock.
  3. Errors travel along events. A call that fails, or that waits for a call that failed, fails with the *first* error
     and does not run. The native error is chained to it. Calls that do not wait for a failed call are not affected.
  4. `write` borrows the host memory until its event is done; `read` owns its destination until then.
  5. A freed buffer outlives the work queued on it: `free` gives the bytes back to the account at once, and the memory
     itself when the last queued call that uses it is done.
  6. Storage dtypes and compute dtypes are two sets (`DeviceInfo.storage`, `DeviceInfo.compute`).
  7. What a device does not support is data: tags in `DeviceInfo`, and `Unsupported` at compile time. No caller tests
     for methods with hasattr.
  8. Memory is accounted: `memory()` gives bytes in use, peak and capacity. Beyond the capacity `alloc` and `compile`
     (for its workspace) raise `OutOfMemory`, on every backend.
  9. A device tagged UNIFIED shares the host's memory: `adopt` gives a view of host memory and `host_tensor` the
     reverse, and a transfer between a view and the memory that it aliases copies nothing. Results may not differ.
  10. Probing never raises, and reports a device as available only after it opened the device, ran a small kernel and
      read its result back.
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

from hal.errors import Unsupported, name_native_errors
from hal.event import Event
from hal.host import Host
from hal.known_gaps import KnownGap
from hal.memory import MemoryUse
from hal.program import Kernel, Program
from hal.random import RandomKey

HAL_VERSION = (1, 0)
"""The first number changes when backends must change; the second when an optional ability is added."""

UNIFIED = "unified"
"""Tag: the device works in host memory (contract 9)."""

NATIVE = "native"
"""Tag: the device takes programs undecomposed (with fused attention, say), as PyTorch's own devices run them."""

HOST_CORES = "host-cores"
"""Tag: kernels run on the cores that the host's tasks need too, so the two gain nothing from running at once."""

SIMULATED = "simulated"
"""Tag: there is no such hardware here. Numbers are computed on the host, and time is that of a model."""


@dataclass(frozen=True)
class DeviceInfo:
    """The description of a device.

    Args:
        name: the device string that opens it, such as `cuda:0`.
        description: the hardware, for people.
        tags: what the device is or supports: UNIFIED, NATIVE, HOST_CORES, SIMULATED, or a backend's own.
        storage: dtypes that its memory can hold.
        compute: dtypes that it computes in.
        memory: bytes of memory that the hardware has; None if unknown. It is not a limit.
        notes: advice about this machine, one sentence each.
        traced_for: of a NATIVE device, PyTorch's name of it. Its programs hold the ops that autograd runs there.
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
        """Whether the device works in host memory, so that transfers may alias (contract 9)."""
        return UNIFIED in self.tags


@dataclass(eq=False)
class View:
    """A contiguous, typed region of device memory.

    Args:
        native: the backend's handle of the region: a tensor, a sub-buffer, a buffer with an offset.
        shape: the extents of the region, in elements.
        dtype: the dtype of its elements.
    """

    native: Any
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def check_bounds(self, offset: int, size: int) -> None:
        """Check that the view lies in a buffer of `size` bytes, `offset` bytes from its start, and is aligned.

        Raises:
            ValueError: the view begins before the buffer, ends behind it, or is not aligned to its elements.
        """
        if offset < 0 or offset + self.size > size or offset % self.dtype.itemsize:
            raise ValueError(
                f"A view of {self.size} bytes ({self.shape} of {self.dtype}) at offset {offset} does not lie in a "
                f"buffer of {size} bytes, or its offset is not a multiple of {self.dtype.itemsize} bytes."
            )


def check_transfer(label: str, target: View | torch.Tensor, source: View | torch.Tensor) -> None:
    """Check that memory can be copied from `source` to `target`.

    Args:
        label: the call's name, for the error: `write`, `read` or `copy`.
        target: the memory that is written.
        source: the memory that is read.

    Raises:
        ValueError: dtypes or numbers of elements differ, or a host tensor is not contiguous. Shapes may differ.
    """
    if target.dtype != source.dtype or (
        target.shape != source.shape and math.prod(target.shape) != math.prod(source.shape)
    ):
        raise ValueError(
            f"{label} needs the same dtype and number of elements on both sides; received {tuple(source.shape)} of "
            f"{source.dtype} to copy to {tuple(target.shape)} of {target.dtype}."
        )
    for side in (target, source):
        if isinstance(side, torch.Tensor) and not side.is_contiguous():
            raise ValueError(
                f"{label} needs a contiguous host tensor; received strides {side.stride()}. Call .contiguous()."
            )


class Buffer(abc.ABC):
    """Device memory of a fixed size. Addresses do not change while it lives."""

    size: int

    @abc.abstractmethod
    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> View:
        """A region of the buffer.

        Args:
            offset: bytes from the start of the buffer, a multiple of the element's size.
            shape: extents in elements.
            dtype: the dtype of the elements.

        Raises:
            ValueError: the region does not lie in the buffer (`View.check_bounds`).
            HalError: the buffer was freed.
        """

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
    """Calls that run one after another, asynchronously to the caller.

    Each method submits one call and returns its event. `wait` lists the events after which the call runs: of any queue
    of any device, or of any host. All raise HalError when the device is closed, and DeviceLost when it is lost.
    """

    name: str

    @abc.abstractmethod
    def write(self, target: View, source: torch.Tensor, wait: Sequence[Event] = ()) -> Event:
        """Copy a contiguous host tensor to the device (contract 4).

        The host memory is read after the events of `wait` and after all earlier calls on this queue. Raises ValueError
        where dtype or number of elements differ, or the tensor is not contiguous.
        """

    @abc.abstractmethod
    def read(self, target: torch.Tensor, source: View, wait: Sequence[Event] = ()) -> Event:
        """Copy from the device to a contiguous host tensor (contract 4). Raises ValueError as `write` does."""

    @abc.abstractmethod
    def copy(self, target: View, source: View, wait: Sequence[Event] = ()) -> Event:
        """Copy within the device. Raises ValueError where dtype or number of elements differ."""

    @abc.abstractmethod
    def fill(self, target: View, value: float, wait: Sequence[Event] = ()) -> Event:
        """Set every element of `target` to `value`."""

    @abc.abstractmethod
    def run(self, call: KernelCall, wait: Sequence[Event] = ()) -> Event:
        """Run a kernel on the memory that `call` names."""


class Device(abc.ABC):
    """An opened device, made by `Backend.open`. Its methods may be called from several threads."""

    info: DeviceInfo

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        name_native_errors(cls, {"alloc": Buffer, "compile": Kernel, "memory": MemoryUse, "close": type(None)})

    @abc.abstractmethod
    def alloc(self, size: int, what: str = "buffer") -> Buffer:
        """Allocate device memory.

        Args:
            size: bytes, not negative. The memory is aligned to at least 64 bytes and not initialised.
            what: what the memory is for, as errors name it.

        Raises OutOfMemory: the capacity would be exceeded, or the system refuses the memory.
        """

    @abc.abstractmethod
    def queue(self, name: str) -> Queue:
        """The queue of that name, made at the first use of the name. Queues of different names run concurrently."""

    @abc.abstractmethod
    def compile(self, program: Program) -> Kernel:
        """Make a kernel of a program. Programs with one fingerprint give one kernel.

        Raises:
            Unsupported: the device lacks an op or a dtype of the program, which the error names.
            CompileError: the program is malformed, or the device's compiler refuses it.
            OutOfMemory: the kernel's workspace does not fit into the capacity.
        """

    @abc.abstractmethod
    def host(self, capacity: int | None = None, pinned: int | None = None) -> Host:
        """A host beside this device, for the eager parameter server: its memory and its task queue.

        `capacity` and `pinned` limit its memory and its page-locked memory, in bytes; None for no limit.
        """

    @abc.abstractmethod
    def memory(self) -> MemoryUse:
        """Bytes of device memory in use, their peak, and the capacity (contract 8)."""

    @abc.abstractmethod
    def reset_peak(self) -> None:
        """Start a new peak from the bytes in use now."""

    def adopt(self, tensor: torch.Tensor) -> View:
        """A view of a contiguous host tensor's memory, on a UNIFIED device (contract 9).

        Raises:
            Unsupported: the device has memory of its own.
            ValueError: the tensor is not contiguous.
        """
        raise Unsupported(f"device {self.info.name!r} has memory of its own. Use Queue.write and Queue.read instead.")

    def host_tensor(self, view: View) -> torch.Tensor:
        """A host tensor over a view's memory, on a UNIFIED device (contract 9). Raises Unsupported elsewhere."""
        raise Unsupported(f"device {self.info.name!r} has memory of its own. Use Queue.write and Queue.read instead.")

    @abc.abstractmethod
    def close(self) -> None:
        """Wait for the queued work, stop the queues and free all memory. Closing twice is harmless."""


@dataclass(frozen=True)
class Probe:
    """The result of probing one device.

    Args:
        name: the device string.
        available: whether the device works.
        reason: why it does not; empty where it does.
        description: the hardware, for people.
        memory_bytes: bytes of memory that the hardware has; None if unknown.
        tags: the tags of its `DeviceInfo`.
        notes: advice about this machine, one sentence each.
    """

    name: str
    available: bool
    reason: str = ""
    description: str = ""
    memory_bytes: int | None = None
    tags: frozenset[str] = field(default_factory=frozenset)
    notes: tuple[str, ...] = ()


class Backend(abc.ABC):
    """A family of devices under one name.

    `name` is the part of a device string before the colon, and the name of the entry point in the group
    `relay.backends`. `hal_version` is the one that the backend was written for; unstated, the installed one.
    `known_gaps` are the conformance tests that its devices do not pass, with reasons (contract 7).
    """

    name: str
    hal_version: tuple[int, int] = HAL_VERSION
    known_gaps: tuple[KnownGap, ...] = ()

    @abc.abstractmethod
    def probe(self) -> list[Probe]:
        """One `Probe` for each device on this machine, or one that gives the reason why there is none (contract 10)."""

    @abc.abstractmethod
    def open(self, selector: str, capacity: int | None = None) -> Device:
        """Open a device.

        Args:
            selector: the part of the device string after the colon; empty for the first device.
            capacity: the limit of its memory in bytes; None for no limit.

        Raises:
            Unavailable: there is no such device, or it cannot be opened; the message gives the reason.
        """

    def export(
        self,
        program: Program,
        path: Path,
        inputs: Sequence[str],
        outputs: Sequence[str],
        weights: Mapping[str, torch.Tensor],
    ) -> Path:
        """Write a core program to a file in the backend's own format.

        Args:
            program: a core program (`hal.ops`).
            path: the file that is written.
            inputs, outputs: names of the program's inputs and outputs, in order.
            weights: tensors of inputs, by name, that are stored in the file.

        Returns: the path of the file.

        Raises:
            Unsupported: the backend has no file format.
        """
        raise Unsupported(f"The backend {self.name!r} writes no files. The backend 'onnx' does.")
