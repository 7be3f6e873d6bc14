"""The differences between the families of PyTorch's accelerators: streams, events, page-locking, names of memory.

`torch.cuda` and `torch.xpu` have the same streams and events under two names. `torch.mps` has one stream: queues
share it, in the order of submission. All that the families share is in `backends.torch_device.device`.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from backends.torch_device.cuda_graphs import Recorder
from hal.dtypes import ALL
from hal.kit.streams import Streams
from hal.page_lock import PageLocker


class Accelerator(Streams):
    """One device of a family whose module looks like `torch.cuda` (streams, events, memory)."""

    def __init__(self, module: Any, kind: str, number: int) -> None:
        self._module = module
        self.device = torch.device(kind, number)
        self._number = number
        with self._module.device(self.device):
            self._zero = self.new_mark()
            self._zero.record(self._module.current_stream())
            self._zero.synchronize()

    def new_mark(self) -> Any:
        """An event that takes the time."""
        return self._module.Event(enable_timing=True)

    def description(self) -> str:
        """The device's own name."""
        return str(self._module.get_device_name(self._number))

    def memory_size(self) -> int:
        """Bytes of device memory."""
        return int(self._module.get_device_properties(self._number).total_memory)

    def traced_for(self) -> str:
        """The device that programs are traced for."""
        return str(self.device)

    def dtypes(self) -> frozenset[torch.dtype]:
        """What it stores and computes in."""
        if getattr(self._module, "is_bf16_supported", lambda: True)():
            return ALL
        return ALL - {torch.bfloat16}

    def enter_thread(self) -> None:
        """Make the device the thread's own."""
        self._module.set_device(self._number)

    def new_stream(self) -> Any:
        """A stream that lives as long as its queue."""
        return self._module.Stream(device=self.device)

    def use(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """What runs inside goes to that stream."""
        return self._module.stream(stream)  # type: ignore[no-any-return]

    def record(self, stream: Any) -> Any:
        """A mark on the stream, after what it was given so far."""
        mark = self.new_mark()
        mark.record(stream)
        return mark

    def order(self, stream: Any, mark: Any) -> None:
        """What the stream is given from now on waits for the mark."""
        stream.wait_event(mark)

    def reached(self, mark: Any) -> bool:
        """Whether the device is past the mark."""
        return bool(mark.query())

    def wait(self, mark: Any) -> None:
        """Block until it is."""
        mark.synchronize()

    def seconds(self, mark: Any) -> float:
        """When the device passed the mark, from when it was opened."""
        return self.between(self._zero, mark)

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to a later one; in single precision, so that short times want marks that are near."""
        return float(start.elapsed_time(end)) / 1000.0

    def lost(self, failure: BaseException) -> bool:
        """Whether the device is unusable: after an error of its own it is synchronized once to find out."""
        if self.out_of_memory(failure) or not isinstance(failure, torch.AcceleratorError):
            return False
        try:
            self.synchronize()
        except RuntimeError:
            return True
        return False

    def out_of_memory(self, failure: BaseException) -> bool:
        """Whether the allocator refused memory."""
        return isinstance(failure, torch.OutOfMemoryError)

    def recorder(self) -> Recorder | None:
        """How launches are recorded, for one queue; None where they cannot be."""
        return None

    def page_locker(self) -> PageLocker | None:
        """How host memory is registered for transfers, where that can be done."""
        return None

    def synchronize(self) -> None:
        """Block until everything given to the device has ended."""
        self._module.synchronize(self.device)


class CudaAccelerator(Accelerator):
    """CUDA, and ROCm under the same name: host memory is registered as it is, exact in size."""

    def new_mark(self) -> Any:
        # A waiting thread sleeps: the optimizer needs the cores.
        return self._module.Event(enable_timing=True, blocking=True)

    def page_locker(self) -> PageLocker | None:
        return _CudaHostRegister(self.device)

    def recorder(self) -> Recorder | None:
        return _CudaGraphs()


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


class _CudaGraphs(Recorder):
    """CUDA graphs over one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

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
        finally:
            if collects:
                gc.enable()
        return graph.replay


class MpsAccelerator(Accelerator):
    """Apple's GPU: one stream, whose order is that of submission, so an order between queues costs a wait."""

    def __init__(self) -> None:
        self.device = torch.device("mps")
        self._number = 0

    def description(self) -> str:
        return "Apple GPU"

    def memory_size(self) -> int:
        return int(torch.mps.recommended_max_memory())

    def dtypes(self) -> frozenset[torch.dtype]:
        return ALL - {torch.float64}

    def enter_thread(self) -> None:
        """There is one device."""

    def new_stream(self) -> Any:
        return None

    def use(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def record(self, stream: Any) -> Any:
        torch.mps.synchronize()
        return time.perf_counter()

    def order(self, stream: Any, mark: Any) -> None:
        """A mark is only made when the device is past it."""

    def reached(self, mark: Any) -> bool:
        return True

    def wait(self, mark: Any) -> None:
        """A mark is only made when the device is past it."""

    def seconds(self, mark: Any) -> float:
        return float(mark)

    def between(self, start: Any, end: Any) -> float:
        return float(end - start)

    def synchronize(self) -> None:
        torch.mps.synchronize()


class Family:
    """A family of accelerators, before any of its devices is opened."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def missing(self) -> str:
        """Why there is none here; empty where there is."""
        module = getattr(torch, self.kind)
        built = getattr(torch.backends, self.kind, None)
        if self.kind in ("cuda", "mps") and built is not None and not built.is_built():
            return f"this PyTorch ({torch.__version__}) was built without {self.kind}"
        try:
            return "" if module.is_available() and self.count() > 0 else f"PyTorch finds no {self.kind} device"
        except Exception as failure:  # a driver that is installed but dead
            return f"{type(failure).__name__}: {failure}"

    def count(self) -> int:
        """How many devices there are."""
        return int(getattr(torch, self.kind).device_count())

    def open(self, number: int) -> Accelerator:
        """One of them."""
        if self.kind == "mps":
            return MpsAccelerator()
        made = CudaAccelerator if self.kind == "cuda" else Accelerator
        return made(getattr(torch, self.kind), self.kind, number)


FAMILIES = {kind: Family(kind) for kind in ("cuda", "xpu", "mps")}
