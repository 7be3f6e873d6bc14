"""An opened device with an account of its memory: buffers, queues by name, kernels by fingerprint, and its closing.

A backend defines memory, queues, kernels, and how its queues end. Nothing here depends on drivers, threads or streams.
Invariant: memory is charged before it exists, queues and kernels are made once whichever thread is first, and after
`close` the account is empty.
"""

from __future__ import annotations

import abc
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch

from hal.device import Buffer, Device, DeviceInfo, Queue, View
from hal.errors import HalError, OutOfMemory, Unsupported
from hal.memory import MemoryAccount, MemoryUse
from hal.program import Kernel, Program

AnyQueue = TypeVar("AnyQueue", bound=Queue)
Memory = TypeVar("Memory")


class AccountedBuffer(Buffer, Generic[Memory]):
    """A buffer that charges the account before its memory exists. The backend sets `memory` after `__init__`.

    Args:
        account: the account of the device.
        size: bytes.
        what: what the memory is for, as errors name it.

    Raises:
        OutOfMemory: the capacity is exceeded.
    """

    memory: Memory | None = None

    def __init__(self, account: MemoryAccount, size: int, what: str) -> None:
        account.charge(size, what)
        self.size = size
        self._account = account

    @abc.abstractmethod
    def native_view(self, memory: Memory, offset: int, view: View) -> Any:
        """The handle (`View.native`) of a view that begins `offset` bytes into the memory."""

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> View:
        if self.memory is None:
            raise HalError("This buffer was freed. Allocate a new one.")
        view = View(None, tuple(shape), dtype)
        view.check_bounds(offset, self.size)
        view.native = self.native_view(self.memory, offset, view)
        return view

    def free(self) -> None:
        if self.memory is not None:
            self.memory = None  # views and queued calls have references of their own
            self._account.release(self.size)


class AccountedDevice(Device, Generic[AnyQueue]):
    """An opened device with accounted memory: queues by name, kernels by fingerprint, and its closing.

    Args:
        info: the description of the device.
        capacity: the limit of its memory in bytes; None for no limit.
    """

    def __init__(self, info: DeviceInfo, capacity: int | None) -> None:
        self.info = info
        self.account = MemoryAccount(f"device {info.name!r}", capacity)
        self.closed = False
        self._queues: dict[str, AnyQueue] = {}
        # Callers own their kernels; a kernel without a reference is compiled anew at its next use.
        self._kernels: weakref.WeakValueDictionary[str, Kernel] = weakref.WeakValueDictionary()
        self._buffers: weakref.WeakSet[Buffer] = weakref.WeakSet()
        self._workspace = 0
        self.lock = threading.RLock()

    @abc.abstractmethod
    def make_buffer(self, size: int, what: str) -> Buffer:
        """A new buffer, which charges the account. Raises OutOfMemory."""

    @abc.abstractmethod
    def make_queue(self, name: str) -> AnyQueue:
        """A new queue."""

    @abc.abstractmethod
    def make_kernel(self, program: Program) -> Kernel:
        """A new kernel. Raises Unsupported or CompileError."""

    @abc.abstractmethod
    def end_queues(self) -> None:
        """Wait for the queued work and stop all of `queues()`. Called once, by `close`."""

    def workspace(self, kernel: Kernel) -> int:
        """Bytes of device memory that a run of the kernel needs beside its inputs and outputs."""
        return kernel.program.workspace

    def load(self, kernel: Kernel) -> None:
        """Send the constants of a new kernel to the device, and charge them to the account. Raises OutOfMemory."""

    def spare(self) -> bool:
        """Free memory that only makes the device faster; True if there was any. Called before an OutOfMemory."""
        return False

    def queues(self) -> list[AnyQueue]:
        """All queues made so far."""
        with self.lock:
            return list(self._queues.values())

    def alloc(self, size: int, what: str = "buffer") -> Buffer:
        with self.lock:
            self.check_open()
            try:
                buffer = self.make_buffer(size, what)
            except OutOfMemory:
                if not self.spare():
                    raise
                buffer = self.make_buffer(size, what)
            self._buffers.add(buffer)
        return buffer

    def queue(self, name: str) -> AnyQueue:
        with self.lock:
            self.check_open()
            if name not in self._queues:
                self._queues[name] = self.make_queue(name)
            return self._queues[name]

    def compile(self, program: Program) -> Kernel:
        with self.lock:
            self.check_open()
            kernel = self._kernels.get(program.fingerprint)
            if kernel is None or not _has_constants_of(kernel, program):
                # One kernel runs at a time, so the largest workspace serves all.
                kernel = self.make_kernel(program)
                growth = self.workspace(kernel) - self._workspace
                if growth > 0:
                    self._charge_workspace(growth, program.name)
                self.load(kernel)
                self._kernels[program.fingerprint] = kernel
            return kernel

    def _charge_workspace(self, growth: int, name: str) -> None:
        what = f"workspace of {name}"
        try:
            self.account.charge(growth, what)
        except OutOfMemory:
            if not self.spare():
                raise
            self.account.charge(growth, what)
        self._workspace += growth

    def memory(self) -> MemoryUse:
        return self.account.use()

    def reset_peak(self) -> None:
        self.account.reset_peak()

    def close(self) -> None:
        with self.lock:
            if self.closed:
                return
            self.closed = True
        self.end_queues()
        self._queues.clear()
        self._kernels.clear()
        for buffer in list(self._buffers):
            buffer.free()
        # The workspace, and buffers that were dropped without being freed.
        self.account.release(self.account.use().in_use)
        self._workspace = 0

    def check_open(self) -> None:
        """Raises HalError on a closed device."""
        if self.closed:
            raise HalError(f"device {self.info.name!r} is closed. Open it again.")

    def check_unified(self) -> None:
        """Raises Unsupported on a device with memory of its own."""
        if not self.info.unified:
            raise Unsupported(
                f"device {self.info.name!r} has memory of its own. Use Queue.write and Queue.read instead."
            )


def _has_constants_of(kernel: Kernel, program: Program) -> bool:
    """Whether the constants of a kernel with the program's fingerprint are still the program's.

    They may be tensors of a user's, who has changed those of the program that the kernel was made from.
    """
    if kernel.program is program:
        return True
    own, given = kernel.program.constants, program.constants
    return own.keys() == given.keys() and all(_same_bytes(constant, given[name]) for name, constant in own.items())


def _same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits, NaN included."""
    if first is second or first.is_meta:  # without numerics there are none to differ
        return True
    one, other = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second))
    return torch.equal(one, other)
