"""Every call of CuPy that the CuPy device makes, in one file, so that a stub can test the device without a GPU.

CuPy's current device and stream belong to a thread and are never assumed: each method enters the device, and work is
given inside its stream. Invariant: nothing here blocks but `wait` and `synchronize`, and what CuPy's memory pool takes
back while the device still uses it is the caller's to prevent, by holding references until an event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hal.kit.arrays import random
from hal.kit.arrays.dtypes import Arrays
from hal.kit.streams import Streams
from hal.page_lock import PageLocker

_PORTABLE = 1
"""cudaHostRegisterPortable: locked for all devices, not for the current one alone."""

_NOT_READY = 600
"""cudaErrorNotReady."""


class CupyRuntime(Streams):
    """One CUDA device through CuPy."""

    def __init__(self, number: int) -> None:
        import cupy

        self._cupy = cupy
        self._device = cupy.cuda.Device(number)
        with self._device:
            self._zero = cupy.cuda.Event()
            self._zero.record(cupy.cuda.Stream.null)
            self._zero.synchronize()

    def description(self) -> str:
        """The device's own name."""
        properties = self._cupy.cuda.runtime.getDeviceProperties(self._device.id)
        return f"{properties['name'].decode()}, CuPy {self._cupy.__version__}"

    def memory_size(self) -> int:
        """Bytes of device memory."""
        return int(self._device.mem_info[1])

    def arrays(self) -> Arrays:
        """The op table over CuPy. Its sums are trees, so that float32 holds them."""
        from cupyx.scipy.special import erf

        single = np.dtype(np.float32)
        return Arrays(self._cupy, erf, random.draws(self._cupy), single, single)

    def constant(self, array: Any) -> Any:
        """A host array on the device, there before this returns: no stream need wait for it."""
        with self._device:
            made = self._cupy.asarray(array)
            self._cupy.cuda.get_current_stream().synchronize()
            return made

    def lost(self, failure: BaseException) -> bool:
        """Whether the device is unusable: after an error of CUDA's own it is synchronized once to find out.

        Launches and modules are the driver's, whose errors are of another class than the runtime's.
        """
        errors = (self._cupy.cuda.runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError)
        if not isinstance(failure, errors):
            return False
        try:
            self.synchronize()
        except errors:
            return True
        return False

    def out_of_memory(self, failure: BaseException) -> bool:
        """Whether the pool was refused memory."""
        return isinstance(failure, MemoryError)

    def allocate(self, size: int) -> Any:
        """`size` bytes. Raises MemoryError."""
        with self._device:
            try:
                return self._cupy.cuda.alloc(size)
            except self._cupy.cuda.memory.OutOfMemoryError as failure:
                raise MemoryError(str(failure).splitlines()[0]) from failure

    def array(self, memory: Any, offset: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """An array over part of that memory, which it keeps alive."""
        with self._device:
            return self._cupy.ndarray(tuple(shape), dtype, memptr=memory + offset)

    def new_stream(self) -> Any:
        """A stream that lives as long as its queue, and does not wait for the null stream."""
        with self._device:
            return self._cupy.cuda.Stream(non_blocking=True)

    def launch(self, stream: Any, function: Callable[..., Any], operands: Sequence[Any]) -> None:
        """Call array code whose work goes to the stream; its temporaries come from the stream's own pool."""
        with self._device, stream:
            function(*operands)

    def upload(self, stream: Any, target: Any, source: torch.Tensor) -> None:
        """Host bytes to an array. Asynchronous where the host memory is page-locked."""
        with self._device:
            target.data.copy_from_host_async(source.data_ptr(), target.nbytes, stream)

    def download(self, stream: Any, target: torch.Tensor, source: Any) -> None:
        """An array to host bytes. Asynchronous where the host memory is page-locked."""
        with self._device:
            source.data.copy_to_host_async(target.data_ptr(), source.nbytes, stream)

    def copy(self, stream: Any, target: Any, source: Any) -> None:
        """Bytes within the device."""
        with self._device:
            target.data.copy_from_device_async(source.data, source.nbytes, stream)

    def record(self, stream: Any) -> Any:
        """A mark on the stream, after what it was given so far."""
        with self._device:
            mark = self._cupy.cuda.Event(block=True)  # a waiting thread sleeps: the optimizer needs the cores
            mark.record(stream)
            return mark

    def order(self, stream: Any, mark: Any) -> None:
        """What the stream is given from now on waits for the mark."""
        with self._device:
            stream.wait_event(mark)

    def reached(self, mark: Any) -> bool:
        """Whether the device is past the mark. Raises where it failed, which `mark.done` would take for not yet."""
        with self._device:
            status = self._cupy.cuda.runtime.eventQuery(mark.ptr)
        if status not in (0, _NOT_READY):
            raise self._cupy.cuda.runtime.CUDARuntimeError(status)
        return bool(status == 0)

    def wait(self, mark: Any) -> None:
        """Block until it is. Raises RuntimeError where the device failed."""
        with self._device:
            mark.synchronize()

    def seconds(self, mark: Any) -> float:
        """When the device passed the mark, from when it was opened."""
        return self.between(self._zero, mark)

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to a later one; in single precision, so that short times want marks that are near."""
        with self._device:
            return float(self._cupy.cuda.get_elapsed_time(start, end)) / 1000.0

    def synchronize(self) -> None:
        """Block until everything given to the device has ended."""
        with self._device:
            self._device.synchronize()

    def page_locker(self) -> PageLocker:
        """Registers host memory with CUDA as it is, exact in size."""
        return _HostRegister(self._cupy, self._device)


class _HostRegister:
    def __init__(self, cupy: Any, device: Any) -> None:
        self._cupy = cupy
        self._device = device

    def lock(self, address: int, size: int) -> str:
        try:
            with self._device:
                self._cupy.cuda.runtime.hostRegister(address, size, _PORTABLE)
        except self._cupy.cuda.runtime.CUDARuntimeError as failure:
            return f"cudaHostRegister: {failure}"
        return ""

    def unlock(self, address: int, size: int) -> None:
        with self._device:
            self._cupy.cuda.runtime.hostUnregister(address)


def missing() -> str:
    """Why there is no CuPy device here; empty where there is one."""
    try:
        import cupy
    except ImportError as failure:  # CuPy frames its reason in many lines
        reason = [line.strip() for line in str(failure).splitlines() if line.strip(" =")][-1]
        return f"CuPy is not installed ({reason}). It comes with pip install 'layer-relay[cuda]'."
    try:
        return "" if cupy.cuda.runtime.getDeviceCount() > 0 else "CUDA finds no device"
    except cupy.cuda.runtime.CUDARuntimeError as failure:  # a driver that is missing, old or dead
        return f"CUDA does not answer: {failure}"


def count() -> int:
    """How many devices there are."""
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())
