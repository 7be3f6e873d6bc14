"""An opened OpenCL device: memory, queues, kernels.

Memory is allocated at once and charged before (drivers allocate lazily, and their errors come late). A view's
`native` is the buffer and the bytes before the view, since sub-buffers would have to be aligned. Each queue that runs
kernels has a workspace of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from backends.opencl.faults import translated
from backends.opencl.kernels import Library, OpenClKernel
from backends.opencl.loops import Traits
from backends.opencl.platforms import Found
from backends.opencl.queues import Clock, OpenClQueue
from hal.device import HOST_CORES, Buffer, Device, DeviceInfo, View
from hal.errors import HalError, Unsupported
from hal.host import Host
from hal.kernel import Kernel, Program
from hal.memory import MemoryAccount, MemoryUse
from hal.ops import check
from hal.pages import LockedMemory, Mlock, PageLocker

_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
_HALVES = frozenset({torch.float16, torch.bfloat16})
_ADVICE = {torch.float64: "It has no cl_khr_fp64. Use float32, or another device."}
GPU_LANES = 128


class OpenClBuffer(Buffer):
    """A cl.Buffer, charged to the device's account."""

    def __init__(self, device: OpenClDevice, size: int, what: str) -> None:
        device.account.charge(size, what)
        self.size = size
        self._account = device.account
        try:
            self._memory: Any = device.allocate(max(size, 64))
        except Exception as failure:
            raise device.account.refused(size, what) from failure
        self._freed = False

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> View:
        if self._freed:
            raise HalError("this buffer was freed; allocate a new one")
        view = View((self._memory, offset), tuple(shape), dtype)
        view.check_place(offset, self.size)
        return view

    def free(self) -> None:
        if not self._freed:
            self._freed = True
            self._memory = None  # queued calls hold it, and OpenCL keeps what its commands use
            self._account.release(self.size)


class DriverLock:
    """Page-locked memory by way of the driver: host memory that OpenCL knows as a buffer is locked for its DMA."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._known: dict[int, Any] = {}

    def lock(self, address: int, size: int) -> str:
        import ctypes

        import pyopencl

        flags = pyopencl.mem_flags
        host = np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=np.uint8)
        try:
            self._known[address] = pyopencl.Buffer(self._context, flags.READ_WRITE | flags.USE_HOST_PTR, hostbuf=host)
        except Exception as failure:
            return f"the OpenCL driver refused: {failure}"
        return ""

    def unlock(self, address: int, size: int) -> None:
        self._known.pop(address, None)


class OpenClDevice(Device):
    """See `hal.device.Device`."""

    def __init__(self, name: str, found: Found, capacity: int | None) -> None:
        import pyopencl

        native = found.device
        self._native = native
        self._context = pyopencl.Context([native])
        processor = bool(native.type & pyopencl.device_type.CPU)
        double = "cl_khr_fp64" in native.extensions
        wide = max(4, min(16, native.native_vector_width_float or 4))
        self.traits = Traits(native.max_compute_units, 1 if processor else GPU_LANES, wide, double)
        real = {torch.float32, torch.float64} if double else {torch.float32}
        tags = frozenset({HOST_CORES}) if processor else frozenset()
        self.info = DeviceInfo(
            name,
            f"{found.description}, {native.version.strip()}",
            tags,
            _INTEGERS | _HALVES | real,
            _INTEGERS | real,
            native.global_mem_size,
            (f"{native.max_compute_units} compute units",),
        )
        self.account = MemoryAccount(f"device {name!r}", capacity)
        self.library = Library(self._context, native, name)
        self._processor = processor
        self._queues: dict[str, OpenClQueue] = {}
        self._kernels: dict[str, OpenClKernel] = {}
        self._buffers: weakref.WeakSet[OpenClBuffer] = weakref.WeakSet()
        self._workspace = 0
        self._lock = threading.RLock()
        self._closed = False
        self._clock = Clock()
        self._service = self._new_queue()
        self.allocate(64)  # and so the clock is set

    def allocate(self, size: int) -> Any:
        """Memory, now and not when it is first used."""
        import pyopencl

        memory = pyopencl.Buffer(self._context, pyopencl.mem_flags.READ_WRITE, size)
        flags = pyopencl.mem_migration_flags.CONTENT_UNDEFINED
        with self._lock:
            event = pyopencl.enqueue_migrate_mem_objects(self._service, [memory], flags)
            event.wait()
            self._clock.set_by(event)
        return memory

    def _new_queue(self) -> Any:
        import pyopencl

        properties = pyopencl.command_queue_properties.PROFILING_ENABLE
        return pyopencl.CommandQueue(self._context, self._native, properties)

    def alloc(self, size: int, what: str = "buffer") -> Buffer:
        with self._lock:
            self._check_open()
            buffer = OpenClBuffer(self, size, what)
            self._buffers.add(buffer)
        return buffer

    def queue(self, name: str) -> OpenClQueue:
        with self._lock:
            self._check_open()
            if name not in self._queues:
                self._queues[name] = OpenClQueue(
                    name, self._new_queue(), self._clock, self.info.name, self._context, self._workspace_of
                )
            return self._queues[name]

    def _workspace_of(self, size: int) -> Any:
        """A queue's workspace: as large as any kernel needs, so that it is made once."""
        try:
            return self.allocate(max(size, self._workspace))
        except Exception as failure:
            raise translated(failure, "the workspace", self.info.name) from failure

    def compile(self, program: Program) -> Kernel:
        with self._lock:
            self._check_open()
            kernel = self._kernels.get(program.fingerprint)
            if kernel is None:
                check(program, self.info, advice=_ADVICE)
                kernel = OpenClKernel(program, self.traits, self.library)
                growth = kernel.workspace - self._workspace
                if growth > 0:
                    self.account.charge(growth, f"workspace of {program.name}")
                    self._workspace += growth
                size = sum(constant.nbytes for constant in program.constants.values())
                self.account.charge(size, f"constants of {program.name}")
                kernel.upload(self._service, self._context)
                self._kernels[program.fingerprint] = kernel
            return kernel

    def host(self, capacity: int | None = None, pinned: int | None = None) -> Host:
        self._check_open()
        locker: PageLocker = Mlock() if self._processor else DriverLock(self._context)
        return Host(capacity, locked=LockedMemory(locker, pinned))

    def memory(self) -> MemoryUse:
        return self.account.use()

    def reset_peak(self) -> None:
        self.account.reset_peak()

    def adopt(self, tensor: torch.Tensor) -> View:
        raise Unsupported(f"device {self.info.name!r} has memory of its own", device=self.info.name)

    def host_tensor(self, view: View) -> torch.Tensor:
        raise Unsupported(f"device {self.info.name!r} has memory of its own", device=self.info.name)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for queue in self._queues.values():
            queue.close()
        self._queues.clear()
        self._kernels.clear()
        for buffer in list(self._buffers):
            buffer.free()
        # The workspace, constants, and buffers that were dropped without being freed.
        self.account.release(self.account.use().in_use)

    def _check_open(self) -> None:
        if self._closed:
            raise HalError(f"device {self.info.name!r} is closed; open it again")
