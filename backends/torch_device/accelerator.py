"""The differences between the families of PyTorch's accelerators: streams, events, page-locking, names of memory.

`torch.cuda` and `torch.xpu` have the same streams and events under two names. `torch.mps` has one stream: queues
share it, in the order of submission. All that the families share is in `backends.torch_device.device`.
"""

from __future__ import annotations

import contextlib
import time
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

    def free_memory(self) -> int | None:
        """Bytes that this process can still allocate: other processes may hold the rest. None if it is not known.

        What PyTorch's allocator has cached is free, though the driver counts it as used.
        """
        ask = getattr(self._module, "mem_get_info", None)
        if ask is None:
            return None
        free, _ = ask(self.device)
        cached = self._module.memory_reserved(self.device) - self._module.memory_allocated(self.device)
        return int(free) + int(cached)

    def peak_memory(self) -> int | None:
        """The most bytes that PyTorch's allocator has had in use since `reset_peak`. None if it does not count them."""
        ask = getattr(self._module, "max_memory_allocated", None)
        return int(ask(self.device)) if ask is not None else None

    def reset_peak(self) -> None:
        """Start a new peak from the bytes in use now."""
        reset = getattr(self._module, "reset_peak_memory_stats", None)
        if reset is not None:
            reset(self.device)

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

    def end_stream(self, stream: Any) -> None:
        """Give back a stream of `new_stream` whose work has ended."""

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


class MpsAccelerator(Accelerator):
    """Apple's GPU: one stream, whose order is that of submission, so an order between queues costs a wait."""

    def __init__(self) -> None:
        self.device = torch.device("mps")
        self._number = 0

    def description(self) -> str:
        return "Apple GPU"

    def memory_size(self) -> int:
        return int(torch.mps.recommended_max_memory())

    def free_memory(self) -> int | None:
        return None

    def peak_memory(self) -> int | None:
        return None

    def reset_peak(self) -> None:
        """Its allocator counts no peak."""

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
