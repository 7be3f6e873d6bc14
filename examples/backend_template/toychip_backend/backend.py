"""The toy chip as a device of the relay: the five classes of `hal.device`, whose docstrings are the contract.

The driver's calls block, so each queue is a `hal.worker.Worker`: a thread that keeps order, waits for events and passes
errors on. This file adds memory, transfers and kernels.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hal.device import Backend, Buffer, Device, DeviceInfo, KernelCall, Probe, Queue, View, check_transfer
from hal.dtypes import INTEGERS
from hal.errors import HalError, Unavailable
from hal.event import Event
from hal.host import Host
from hal.kit.arrays.dtypes import stored_dtype
from hal.kit.arrays.numpy_arrays import as_array, numpy_arrays, numpy_constants
from hal.kit.arrays.program import lower
from hal.kit.pattern_kernel import PatternKernel
from hal.kit.self_test import self_test
from hal.memory import MemoryAccount, MemoryUse
from hal.ops import check
from hal.program import Kernel, Program
from hal.worker import Worker
from toychip_backend.chip import Chip
from toychip_backend.known_gaps import KNOWN_GAPS, LACKING

STORAGE = INTEGERS | {torch.float32, torch.float16, torch.bfloat16}


class Region:
    """Memory of the chip that lives as long as anything refers to it: a buffer, a view, a queued call."""

    def __init__(self, chip: Chip, size: int) -> None:
        self.handle = chip.allocate(size)
        weakref.finalize(self, chip.release, self.handle)


class ToyBuffer(Buffer):
    """Charged to the account, then allocated; freed in the account at once, and on the chip with its last reference."""

    def __init__(self, chip: Chip, account: MemoryAccount, size: int, what: str) -> None:
        account.charge(size, what)
        self.size = size
        self._account = account
        try:
            self._region: Region | None = Region(chip, size)
        except MemoryError as failure:
            raise account.refused(size, what) from failure

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> View:
        if self._region is None:
            raise HalError("This buffer was freed. Allocate a new one.")
        view = View((self._region, offset), tuple(shape), dtype)
        view.check_bounds(offset, self.size)
        return view

    def free(self) -> None:
        if self._region is not None:
            self._region = None
            self._account.release(self.size)


class ToyKernel(PatternKernel[Callable[..., None]]):
    """A program as the chip runs it: one function for each pattern of accumulation."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._arrays = numpy_arrays(np.float32)
        self._constants = numpy_constants(self._arrays, program.constants)

    def make(self, accumulate: tuple[bool, ...]) -> Callable[..., None]:
        return lower(self.program, self._arrays, self._constants, accumulate)


class ToyQueue(Queue):
    """A thread that makes the driver's calls in order."""

    def __init__(self, chip: Chip, name: str) -> None:
        self.name = name
        self.worker = Worker(name)
        self._chip = chip

    def write(self, target: View, source: torch.Tensor, wait: Sequence[Event] = ()) -> Event:
        check_transfer("write", target, source)
        data = host_bytes(source)
        region, offset = target.native
        return self.worker.submit(lambda: self._chip.write(region.handle, offset, data), wait, "write")

    def read(self, target: torch.Tensor, source: View, wait: Sequence[Event] = ()) -> Event:
        check_transfer("read", target, source)
        data = host_bytes(target)
        region, offset = source.native
        return self.worker.submit(lambda: self._chip.read(region.handle, offset, data), wait, "read")

    def copy(self, target: View, source: View, wait: Sequence[Event] = ()) -> Event:
        check_transfer("copy", target, source)
        return self._launch(lambda to, of: np.copyto(to.reshape(-1), of.reshape(-1)), [target, source], wait, "copy")

    def fill(self, target: View, value: float, wait: Sequence[Event] = ()) -> Event:
        bits = as_array(torch.full((1,), value, dtype=target.dtype))[0]
        return self._launch(lambda to: to.fill(bits), [target], wait, "fill")

    def run(self, call: KernelCall, wait: Sequence[Event] = ()) -> Event:
        assert isinstance(call.kernel, ToyKernel)
        operands = call.arguments(lambda view: view)
        return self._launch(call.kernel.function(call.accumulate), operands, wait, call.kernel.program.name)

    def _launch(self, function: Callable[..., Any], operands: list[Any], wait: Sequence[Event], label: str) -> Event:
        def call() -> None:  # holds the views, and so their memory, until it has run
            arguments = [self._array(item) if isinstance(item, View) else item for item in operands]
            self._chip.launch(function, arguments)

        return self.worker.submit(call, wait, label)

    def _array(self, view: View) -> Any:
        region, offset = view.native
        return self._chip.array(region.handle, offset, view.shape, stored_dtype(view.dtype))


def host_bytes(tensor: torch.Tensor) -> Any:
    """The bytes of a contiguous host tensor."""
    return tensor.view(-1).view(torch.uint8).numpy()


class ToyDevice(Device):
    """The opened chip."""

    def __init__(self, capacity: int | None) -> None:
        self.info = DeviceInfo("toychip", "a toy", frozenset(), STORAGE, INTEGERS | {torch.float32})
        self._chip = Chip()
        self._account = MemoryAccount("device 'toychip'", capacity)
        self._queues: dict[str, ToyQueue] = {}
        self._kernels: dict[str, Kernel] = {}
        self._workspace = 0
        self._lock = threading.Lock()  # queues and kernels are made once, whichever thread is first
        self._closed = False

    def alloc(self, size: int, what: str = "buffer") -> Buffer:
        self._check_open()
        return ToyBuffer(self._chip, self._account, size, what)

    def queue(self, name: str) -> Queue:
        with self._lock:
            self._check_open()
            if name not in self._queues:
                self._queues[name] = ToyQueue(self._chip, name)
            return self._queues[name]

    def compile(self, program: Program) -> Kernel:
        with self._lock:
            self._check_open()
            if program.fingerprint not in self._kernels:
                check(program, self.info, LACKING)
                needed = 2 * program.workspace  # half precision is computed in float32
                if needed > self._workspace:
                    self._account.charge(needed - self._workspace, f"workspace of {program.name}")
                    self._workspace = needed
                self._kernels[program.fingerprint] = ToyKernel(program)
            return self._kernels[program.fingerprint]

    def host(self, capacity: int | None = None, pinned: int | None = None) -> Host:
        return Host(capacity)

    def memory(self) -> MemoryUse:
        return self._account.use()

    def reset_peak(self) -> None:
        self._account.reset_peak()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for queue in self._queues.values():
            queue.worker.close()
        self._account.release(self._account.use().in_use)

    def _check_open(self) -> None:
        if self._closed:
            raise HalError("the toy chip is closed. Open it again.")


class ToyBackend(Backend):
    """`toychip`: what the entry point names."""

    name = "toychip"
    known_gaps = KNOWN_GAPS

    def probe(self) -> list[Probe]:
        return [self_test(self, "toychip")]

    def open(self, selector: str, capacity: int | None = None) -> Device:
        if selector:
            raise Unavailable(f"There is no device 'toychip:{selector}'. The chip is 'toychip'.")
        return ToyDevice(capacity)
