"""An opened OpenCL device: memory, queues, kernels.

Memory is allocated at once and charged before (drivers allocate lazily, and their errors come late). A view's
`native` is the buffer and the bytes before the view, since sub-buffers would have to be aligned. Each queue that runs
kernels has a workspace of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from backends.opencl.codegen.loops import Traits
from backends.opencl.errors import translated
from backends.opencl.kernels import Library, Memory, OpenClKernel
from backends.opencl.platforms import Found
from backends.opencl.queues import Clock, OpenClQueue
from hal import dtypes
from hal.device import HOST_CORES, Buffer, DeviceInfo, View
from hal.host import Host
from hal.kit.accounted_device import AccountedBuffer, AccountedDevice
from hal.ops import check
from hal.page_lock import LockedMemory, Mlock, PageLocker
from hal.program import Kernel, Program

_ADVICE = {torch.float64: "It has no cl_khr_fp64. Use float32, or another device."}
GPU_LANES = 128


class OpenClBuffer(AccountedBuffer[Any]):
    """A cl.Buffer, charged to the device's account. OpenCL keeps what its commands use."""

    def __init__(self, device: OpenClDevice, size: int, what: str) -> None:
        super().__init__(device.account, size, what)
        try:
            self.memory = device.allocate(max(size, 64))
        except Exception as failure:
            raise device.account.refused(size, what) from failure

    def native_view(self, memory: Any, offset: int, view: View) -> Memory:
        return memory, offset


class DriverLock:
    """Page-locked memory by way of the driver: host memory that OpenCL knows as a buffer is locked for its DMA."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._known: dict[int, Any] = {}

    def lock(self, address: int, size: int) -> str:
        import ctypes

        import pyopencl

        flags = pyopencl.mem_flags
        memory: Any = (ctypes.c_uint8 * size).from_address(address)
        host = np.frombuffer(memory, dtype=np.uint8)
        try:
            self._known[address] = pyopencl.Buffer(self._context, flags.READ_WRITE | flags.USE_HOST_PTR, hostbuf=host)
        except Exception as failure:
            return f"the OpenCL driver refused: {failure}"
        return ""

    def unlock(self, address: int, size: int) -> None:
        self._known.pop(address, None)


class OpenClDevice(AccountedDevice[OpenClQueue]):
    """An opened OpenCL device."""

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
        info = DeviceInfo(
            name,
            f"{found.description}, {native.version.strip()}",
            tags,
            dtypes.INTEGERS | dtypes.HALVES | real,
            dtypes.INTEGERS | real,
            native.global_mem_size,
            (f"{native.max_compute_units} compute units",),
        )
        super().__init__(info, capacity)
        self.library = Library(self._context, native, name)
        self._processor = processor
        self._loaded: list[Kernel] = []
        self._clock = Clock()
        self._service = self._new_queue()
        self.allocate(64)  # and so the clock is set

    def allocate(self, size: int) -> Any:
        """Memory, now and not when it is first used."""
        import pyopencl

        memory = pyopencl.Buffer(self._context, pyopencl.mem_flags.READ_WRITE, size)
        flags = pyopencl.mem_migration_flags.CONTENT_UNDEFINED
        with self.lock:
            event = pyopencl.enqueue_migrate_mem_objects(self._service, [memory], flags)
            event.wait()
            self._clock.set_by(event)
        return memory

    def _new_queue(self) -> Any:
        import pyopencl

        properties = pyopencl.command_queue_properties.PROFILING_ENABLE
        return pyopencl.CommandQueue(self._context, self._native, properties)

    def make_buffer(self, size: int, what: str) -> Buffer:
        return OpenClBuffer(self, size, what)

    def make_queue(self, name: str) -> OpenClQueue:
        return OpenClQueue(name, self._new_queue(), self._clock, self.info.name, self._context, self._workspace_of)

    def _workspace_of(self, size: int) -> Any:
        """A queue's workspace: as large as any kernel needs, so that it is made once."""
        try:
            return self.allocate(max(size, self._workspace))
        except Exception as failure:
            raise translated(failure, "the workspace", self.info.name) from failure

    def make_kernel(self, program: Program) -> Kernel:
        check(program, self.info, advice=_ADVICE)
        return OpenClKernel(program, self.traits, self.library)

    def workspace(self, kernel: Kernel) -> int:
        assert isinstance(kernel, OpenClKernel)
        return kernel.workspace

    def load(self, kernel: Kernel) -> None:
        assert isinstance(kernel, OpenClKernel)
        constants = kernel.program.constants.values()
        self.account.charge(sum(constant.nbytes for constant in constants), f"constants of {kernel.program.name}")
        kernel.upload(self._context)
        self._loaded.append(kernel)  # its constants stay charged, so the kernel stays for its next use

    def host(self, capacity: int | None = None, pinned: int | None = None) -> Host:
        self.check_open()
        locker: PageLocker = Mlock() if self._processor else DriverLock(self._context)
        return Host(capacity, locked=LockedMemory(locker, pinned))

    def end_queues(self) -> None:
        for queue in self.queues():
            queue.close()
        self._loaded.clear()
