"""What CUDA has beyond the other families: page-locking in place, recorded launches, and streams of one's own.

AMD's devices have the same under the same names (ROCm). PyTorch's streams come from a pool of 32 that all of a process
share, so that two queues could be one stream; here each queue has a stream that the driver makes. Nothing here knows
buffers or programs. Invariant: after a recording that failed, stream and allocator are as before it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
from collections.abc import Callable
from typing import Any

import torch

from backends.torch_device.accelerator import Accelerator
from backends.torch_device.cuda_graphs import Recorder
from hal.page_lock import PageLocker

logger = logging.getLogger(__name__)


class CudaAccelerator(Accelerator):
    """CUDA, and ROCm under the same name: host memory is registered as it is, exact in size."""

    def __init__(self, module: Any, kind: str, number: int) -> None:
        super().__init__(module, kind, number)
        self._own_streams = OwnStreams(driver())

    def new_mark(self) -> Any:
        # A waiting thread sleeps: the optimizer needs the cores.
        return self._module.Event(enable_timing=True, blocking=True)

    def new_stream(self) -> Any:
        with self._module.device(self.device):
            address = self._own_streams.new()
            if address is None:
                return self._module.Stream(device=self.device)
            return self._module.ExternalStream(address, device=self.device)

    def end_stream(self, stream: Any) -> None:
        with self._module.device(self.device):
            self._own_streams.end(int(stream.cuda_stream))

    def page_locker(self) -> PageLocker | None:
        return _CudaHostRegister(self.device)

    def recorder(self) -> Recorder | None:
        return CudaGraphs(self.device)


_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING and hipStreamNonBlocking: the stream does not wait for the default stream."""


def driver() -> Any:
    """The two calls of the driver that make and end streams: (create, destroy), or None where there is no driver."""
    library, create, destroy = "libcuda.so.1", "cuStreamCreate", "cuStreamDestroy_v2"
    if torch.version.hip is not None:
        library, create, destroy = "libamdhip64.so", "hipStreamCreateWithFlags", "hipStreamDestroy"
    try:
        loaded = ctypes.CDLL(library)
        return getattr(loaded, create), getattr(loaded, destroy)
    except (OSError, AttributeError):
        return None


class OwnStreams:
    """Streams made by the driver. All calls are made with the device's context current.

    Args:
        calls: `driver()`.
    """

    def __init__(self, calls: Any) -> None:
        self._calls = calls
        self._made: set[int] = set()

    def new(self) -> int | None:
        """The address of a new stream; None where the driver makes none, after a warning."""
        if self._calls is None:
            return None
        create, _ = self._calls
        address = ctypes.c_void_p()
        code = int(create(ctypes.byref(address), ctypes.c_uint(_NON_BLOCKING)))
        if code or not address.value:
            logger.warning("the driver makes no stream (error %d): this queue has one of PyTorch's", code)
            return None
        self._made.add(address.value)
        return address.value

    def end(self, address: int) -> None:
        """Destroy a stream of `new`. Others are left alone."""
        if address in self._made:
            self._made.discard(address)
            self._calls[1](ctypes.c_void_p(address))


_PORTABLE = 1
"""cudaHostRegisterPortable: locked for all devices, not for the current one alone."""


class _CudaHostRegister:
    """Registers memory with the CUDA runtime."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, address: int, size: int) -> str:
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
            if code == 0:
                return ""
            # The runtime keeps the error for the thread's next launch to report, as if that had failed.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device)
        return f"cudaHostRegister: error {code}"

    def unlock(self, address: int, size: int) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(address)


class CudaGraphs(Recorder):
    """CUDA graphs over one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._failed: list[Any] = []

    def record(self, stream: Any, call: Callable[[], Any]) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # what a collection would free on the device cannot be freed while a stream records
        try:
            # Calls that a recording forbids are errors on this thread only.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                call()
            finally:
                graph.capture_end()
        except BaseException:
            self._leave_recording(graph)
            raise
        finally:
            if collects:
                gc.enable()
        return graph.replay

    def forget(self) -> None:
        """New recordings have a pool of their own; the memory of the old one returns to the driver."""
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()

    def _leave_recording(self, graph: Any) -> None:
        """End what `capture_end` leaves open after an invalid recording, since it raises before its last lines.

        Those end the allocator's use of the pool for this stream, and only a graph that has ended gives up its share of
        the pool. The graph itself is kept: the allocator of pinned memory holds its address from `capture_begin` on.
        """
        try:
            graph.pool()
            return  # it ended well, and an error came before or after that: dropping the graph releases all
        except RuntimeError:
            self._failed.append(graph)
        for leave in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with contextlib.suppress(RuntimeError):  # as far as `capture_end` came
                leave(self._device.index, self._pool)
