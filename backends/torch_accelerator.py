"""What the families of PyTorch's accelerators differ in: streams, events, page-locking, and what they call memory.

`torch.cuda` and `torch.xpu` have the same streams and events under two names. `torch.mps` has one stream: queues
share it, and order is theirs by submission. Everything else is `backends.torch_device`'s.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch

from hal.pages import PageLocker


class Accelerator:
    """One device of a family whose module looks like `torch.cuda` (streams, events, memory)."""

    def __init__(self, module: Any, kind: str, number: int) -> None:
        self._module = module
        self.device = torch.device(kind, number)
        self._number = number
        with self._module.device(self.device):
            self._zero = self._module.Event(enable_timing=True)
            self._zero.record(self._module.current_stream())
            self._zero.synchronize()

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
        dtypes = {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16}
        dtypes |= {torch.int8, torch.uint8, torch.bool}
        if getattr(self._module, "is_bf16_supported", lambda: True)():
            dtypes.add(torch.bfloat16)
        return frozenset(dtypes)

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
        mark = self._module.Event(enable_timing=True)
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
        return float(self._zero.elapsed_time(mark)) / 1000.0

    def outlive(self, tensor: torch.Tensor, streams: Sequence[Any]) -> None:
        """Keep a tensor's memory from being used again before these streams are past what they were given."""
        for stream in streams:
            tensor.record_stream(stream)

    def page_locker(self) -> PageLocker | None:
        """How host memory is registered for transfers, where that can be done."""
        return None

    def synchronize(self) -> None:
        """Block until everything given to the device has ended."""
        self._module.synchronize(self.device)


class CudaAccelerator(Accelerator):
    """CUDA, and ROCm under the same name: host memory is registered as it is, exact in size."""

    def page_locker(self) -> PageLocker | None:
        return _CudaHostRegister()


class _CudaHostRegister:
    """Registers memory with the CUDA runtime."""

    def lock(self, address: int, size: int) -> str:
        code = torch.cuda.cudart().cudaHostRegister(address, size, 0)
        return "" if int(code) == 0 else f"cudaHostRegister: error {int(code)}"

    def unlock(self, address: int, size: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)


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
        integers = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
        return frozenset({torch.float32, torch.float16, torch.bfloat16} | integers)

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

    def outlive(self, tensor: torch.Tensor, streams: Sequence[Any]) -> None:
        """Nothing is under way once a mark is made."""

    def synchronize(self) -> None:
        torch.mps.synchronize()


class Family:
    """How a family is asked for, before any of its devices is opened."""

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
