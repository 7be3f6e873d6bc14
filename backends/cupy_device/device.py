"""CUDA through CuPy: core programs run op by op over CuPy's arrays, matrix products by cuBLAS.

Each queue is a stream with a thread that submits to it (`hal.kit.streams`). CuPy cannot tell its memory pool
that a stream still uses memory; queues have references to the memory of their calls, so a freed buffer outlives its
work. All calls of CuPy are in `backends.cupy_device.runtime`.

Invariant: every call names its device and its stream; none uses CuPy's current ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from backends.cupy_device import runtime as cupy_runtime
from backends.cupy_device.runtime import CupyRuntime
from hal import dtypes
from hal.device import Backend, Buffer, Device, DeviceInfo, KernelCall, Probe, View, check_transfer
from hal.errors import Unavailable, Unsupported
from hal.event import Event
from hal.host import Host
from hal.kit.accounted_device import AccountedBuffer, AccountedDevice
from hal.kit.arrays.dtypes import stored_dtype
from hal.kit.arrays.numpy_arrays import as_array, numpy_arrays, numpy_constants
from hal.kit.arrays.program import lower
from hal.kit.pattern_kernel import PatternKernel
from hal.kit.self_test import self_test
from hal.kit.streams import StreamQueue, allocate, end
from hal.known_gaps import KnownGap
from hal.ops import calls, check, name_of
from hal.page_lock import LockedMemory
from hal.program import Kernel, Program

logger = logging.getLogger(__name__)


class CupyBuffer(AccountedBuffer[Any]):
    """Device memory from CuPy's pool. It returns there with the last reference: a view's, or a queue's."""

    def __init__(self, device: CupyDevice, size: int, what: str) -> None:
        super().__init__(device.account, size, what)
        self._runtime = device.runtime
        try:
            self.memory = allocate(lambda: device.runtime.allocate(size), device.runtime, device.queues)
        except MemoryError as failure:
            raise device.account.refused(size, what) from failure

    def native_view(self, memory: Any, offset: int, view: View) -> Any:
        return self._runtime.array(memory, offset, view.shape, stored_dtype(view.dtype))


class CupyKernel(PatternKernel[Callable[..., None]]):
    """A program as Python functions over CuPy's arrays."""

    def __init__(self, program: Program, runtime: CupyRuntime) -> None:
        super().__init__(program)
        self._arrays = runtime.arrays()
        # Widened on the host: work on the device would be on no queue's stream.
        widened = numpy_constants(numpy_arrays(np.float32), program.constants)
        self._constants = {name: runtime.constant(array) for name, array in widened.items()}

    def make(self, accumulate: tuple[bool, ...]) -> Callable[..., None]:
        return lower(self.program, self._arrays, self._constants, accumulate)


class CupyQueue(StreamQueue):
    """A stream of CuPy's."""

    def __init__(self, device: CupyDevice, name: str) -> None:
        super().__init__(name, device.info.name, device.runtime, device.memory)
        self._runtime = device.runtime

    def write(self, target: View, source: torch.Tensor, wait: Sequence[Event] = ()) -> Event:
        check_transfer("write", target, source)
        return self.submit(
            lambda: self._runtime.upload(self.stream, target.native, source), wait, "write", (target, source)
        )

    def read(self, target: torch.Tensor, source: View, wait: Sequence[Event] = ()) -> Event:
        check_transfer("read", target, source)
        return self.submit(
            lambda: self._runtime.download(self.stream, target, source.native), wait, "read", (target, source)
        )

    def copy(self, target: View, source: View, wait: Sequence[Event] = ()) -> Event:
        check_transfer("copy", target, source)
        return self.submit(
            lambda: self._runtime.copy(self.stream, target.native, source.native), wait, "copy", (target, source)
        )

    def fill(self, target: View, value: float, wait: Sequence[Event] = ()) -> Event:
        bits = as_array(torch.full((1,), value, dtype=target.dtype))[0]
        return self.submit(
            lambda: self._runtime.launch(self.stream, lambda array: array.fill(bits), [target.native]),
            wait,
            "fill",
            target,
        )

    def run(self, call: KernelCall, wait: Sequence[Event] = ()) -> Event:
        kernel = call.kernel
        assert isinstance(kernel, CupyKernel)
        function, operands = kernel.function(call.accumulate), call.arguments()
        return self.submit(
            lambda: self._runtime.launch(self.stream, function, operands), wait, kernel.program.name, (kernel, operands)
        )


class CupyDevice(AccountedDevice[CupyQueue]):
    """An opened CUDA device."""

    def __init__(self, name: str, runtime: CupyRuntime, capacity: int | None) -> None:
        self.runtime = runtime
        compute = dtypes.INTEGERS | {torch.float32}
        description, memory = runtime.description(), runtime.memory_size()
        super().__init__(DeviceInfo(name, description, frozenset(), dtypes.ALL, compute, memory), capacity)

    def make_buffer(self, size: int, what: str) -> Buffer:
        return CupyBuffer(self, size, what)

    def make_queue(self, name: str) -> CupyQueue:
        return CupyQueue(self, name)

    def make_kernel(self, program: Program) -> Kernel:
        check(program, self.info)
        _check_sums_by_index(program, self.info.name)
        return CupyKernel(program, self.runtime)

    def workspace(self, kernel: Kernel) -> int:
        return 2 * kernel.program.workspace  # half precision is computed in float32

    def host(self, capacity: int | None = None, pinned: int | None = None) -> Host:
        self.check_open()
        return Host(capacity, locked=LockedMemory(self.runtime.page_locker(), pinned))

    def end_queues(self) -> None:
        end(self.queues())
        try:
            self.runtime.synchronize()
        except RuntimeError as failure:  # raised where the failed call is waited for
            logger.warning("device %r failed before it was closed: %s", self.info.name, failure)


def _check_sums_by_index(program: Program, device: str) -> None:
    """CuPy adds at indices by CUDA's atomics, which know one signed integer. Raises Unsupported for the others."""
    for node in calls(program.graph):
        name = name_of(node.target)
        adds = name == "aten.scatter_add.default" or (name == "aten.index_put.default" and node.args[3])
        dtype = node.meta["val"].dtype if adds else torch.float32
        if not dtype.is_floating_point and dtype is not torch.int32:
            raise Unsupported(
                f"{program.name!r} adds up {dtype} by index ({name}), which device {device!r} can do for floating "
                "point and int32 alone. Use one of these, or run the layer on another device.",
                op=name,
                dtype=str(dtype),
                device=device,
            )


KNOWN_GAPS = (
    KnownGap(
        "test_memory.py::test_an_index_outside_of_its_operand_is_an_error*",
        "CuPy wraps indices into their operand; a check of their values would stop the stream",
    ),
)


class CupyBackend(Backend):
    """`cupy:N`: NVIDIA's devices."""

    name = "cupy"
    known_gaps = KNOWN_GAPS

    def probe(self) -> list[Probe]:
        reason = cupy_runtime.missing()
        if reason:
            return [Probe("cupy", False, reason)]
        return [self_test(self, f"cupy:{number}") for number in range(cupy_runtime.count())]

    def open(self, selector: str, capacity: int | None = None) -> Device:
        reason = cupy_runtime.missing()
        if reason:
            raise Unavailable(f"There is no device 'cupy' here: {reason}")
        number, there = selector or "0", cupy_runtime.count()
        if not number.isdecimal() or int(number) >= there:
            raise Unavailable(f"There is no device 'cupy:{selector}'. Here are cupy:0 to cupy:{there - 1}.")
        try:
            runtime = CupyRuntime(int(number))
        except RuntimeError as failure:  # a context that an earlier error broke, or memory that others hold
            raise Unavailable(f"Device 'cupy:{number}' cannot be opened: {failure}") from failure
        return CupyDevice(f"cupy:{number}", runtime, capacity)
