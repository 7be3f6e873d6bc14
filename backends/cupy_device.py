"""CUDA through CuPy: core programs run op by op by the shared op table, matrix products by cuBLAS.

Each queue is a stream with a thread that submits to it: the thread waits for the host's events, so that no caller does,
and orders the stream after other streams' events on the device. CuPy has no way to tell its memory pool that a stream
still uses a piece of memory, so a queue holds on to everything that it gave the device until the event after it, which
is what lets a freed buffer outlive its work. All calls of CuPy are in `backends.cupy_runtime`.

Invariant: an event is with the device before anything that waits for it is.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from backends import cupy_runtime
from backends.array_ops import stored_dtype
from backends.array_program import lower
from backends.cupy_runtime import CupyRuntime
from backends.host_memory import self_test
from backends.numpy_device import as_array, numpy_arrays
from hal.device import Backend, Buffer, Device, DeviceInfo, Probe, Queue, View
from hal.errors import DeviceLost, HalError, OutOfMemory, Unavailable, Unsupported
from hal.event import Event
from hal.host import Host
from hal.kernel import Kernel, Program
from hal.memory import MemoryAccount, MemoryUse
from hal.ops import calls, check, name_of
from hal.pages import LockedMemory
from hal.random import RandomKey
from hal.worker import Worker, WorkerEvent

_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
_STORAGE = _INTEGERS | {torch.float32, torch.float64, torch.float16, torch.bfloat16}


class StreamEvent(Event):
    """The completion of a call on a stream: first handed to the device, then done there."""

    def __init__(self, runtime: CupyRuntime) -> None:
        self._runtime = runtime
        self._submitted: WorkerEvent | None = None
        self._marks: tuple[Any, Any] | None = None

    def bind(self, submitted: WorkerEvent) -> None:
        """The hand-over, as the queue's thread runs it."""
        self._submitted = submitted

    def recorded(self, start: Any, end: Any) -> None:
        """The marks on the stream around the call."""
        self._marks = (start, end)

    def on_device(self) -> tuple[BaseException | None, Any]:
        """Wait until the call is with the device; its error, or the mark that ends it."""
        assert self._submitted is not None
        self._submitted.settle()
        if self._submitted.error is not None:
            return self._submitted.error, None
        assert self._marks is not None
        return None, self._marks[1]

    def done(self) -> bool:
        if self._submitted is None or not self._submitted.done():
            return False
        return self._marks is None or self._runtime.reached(self._marks[1])

    def wait(self) -> None:
        error, mark = self.on_device()
        if error is not None:
            raise error
        try:
            self._runtime.wait(mark)
        except RuntimeError as failure:
            raise _lost(failure) from failure

    def span(self) -> tuple[float, float]:
        if self._marks is None:
            return 0.0, 0.0
        return self._runtime.seconds(self._marks[0]), self._runtime.seconds(self._marks[1])


class CupyBuffer(Buffer):
    """Device memory from CuPy's pool. It returns there with the last reference: a view's, or a queue's."""

    def __init__(self, runtime: CupyRuntime, account: MemoryAccount, size: int, what: str) -> None:
        account.charge(size, what)
        self.size = size
        self._runtime = runtime
        self._account = account
        try:
            self._memory: Any = runtime.allocate(size)
        except MemoryError as failure:
            raise account.refused(size, what) from failure

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> View:
        if self._memory is None:
            raise HalError("this buffer was freed; allocate a new one")
        view = View(None, tuple(shape), dtype)
        view.check_place(offset, self.size)
        view.native = self._runtime.array(self._memory, offset, view.shape, stored_dtype(dtype))
        return view

    def free(self) -> None:
        if self._memory is not None:
            self._memory = None
            self._account.release(self.size)


class CupyKernel(Kernel):
    """A program as Python over CuPy's arrays, once for each pattern of accumulation."""

    def __init__(self, program: Program, runtime: CupyRuntime) -> None:
        super().__init__(program)
        arrays, on_host = runtime.arrays(), numpy_arrays(np.float32)
        # Widened on the host: work on the device would be on no queue's stream.
        constants = {
            name: runtime.constant(on_host.load(as_array(tensor.detach().contiguous()), tensor.dtype))
            for name, tensor in program.constants.items()
        }
        self.function = functools.cache(lambda accumulate: lower(program, arrays, constants, accumulate))


class CupyQueue(Queue):
    """A stream and the thread that submits to it. See `hal.device.Queue` for the contracts."""

    def __init__(self, device: CupyDevice, name: str) -> None:
        self.name = name
        self.stream = device.runtime.new_stream()
        self.worker = Worker(f"{device.info.name} {name}")
        self._runtime = device.runtime
        self._memory = device.memory
        self._given: deque[tuple[Any, Any]] = deque()  # (the mark after a call, what the call uses)

    def write(self, target: View, source: torch.Tensor, wait: Sequence[Event] = ()) -> Event:
        _check_sides("write", source, target)
        return self._submit(
            lambda: self._runtime.upload(self.stream, target.native, source), wait, "write", (target, source)
        )

    def read(self, target: torch.Tensor, source: View, wait: Sequence[Event] = ()) -> Event:
        _check_sides("read", target, source)
        return self._submit(
            lambda: self._runtime.download(self.stream, target, source.native), wait, "read", (target, source)
        )

    def copy(self, target: View, source: View, wait: Sequence[Event] = ()) -> Event:
        if target.dtype != source.dtype or target.size != source.size:
            raise ValueError(f"copy needs two sides alike; got {target.size} bytes from {source.size}")
        return self._submit(
            lambda: self._runtime.copy(self.stream, target.native, source.native), wait, "copy", (target, source)
        )

    def fill(self, target: View, value: float, wait: Sequence[Event] = ()) -> Event:
        bits = as_array(torch.full((1,), value, dtype=target.dtype))[0]
        return self._submit(
            lambda: self._runtime.launch(self.stream, lambda array: array.fill(bits), [target.native]),
            wait,
            "fill",
            target,
        )

    def run(
        self,
        kernel: Kernel,
        inputs: Sequence[View],
        outputs: Sequence[View],
        accumulate: tuple[bool, ...] = (),
        key: RandomKey | None = None,
        wait: Sequence[Event] = (),
    ) -> Event:
        program = kernel.program
        program.check_binding(len(inputs), len(outputs), accumulate, key)
        assert isinstance(kernel, CupyKernel)
        function = kernel.function(tuple(accumulate))
        operands = [view.native for view in inputs]
        operands += [key] if program.draws else []
        operands += [view.native for view in outputs]
        return self._submit(
            lambda: self._runtime.launch(self.stream, function, operands), wait, program.name, (kernel, operands)
        )

    def _submit(self, call: Callable[[], Any], wait: Sequence[Event], label: str, uses: Any) -> Event:
        runtime = self._runtime
        event = StreamEvent(runtime)
        wait = tuple(wait)

        def hand_over() -> None:
            try:
                give()
            except RuntimeError as failure:
                if not runtime.lost(failure):
                    raise
                raise _lost(failure) from failure

        def give() -> None:
            self._let_go()
            for other in wait:  # one after another, so that the first error is the first of the list
                if isinstance(other, StreamEvent) and other._runtime is runtime:
                    error, mark = other.on_device()
                    if error is not None:
                        raise error
                    runtime.order(self.stream, mark)
                else:
                    other.wait()
            start = runtime.record(self.stream)
            try:
                call()
            except MemoryError as failure:
                use = self._memory()
                raise OutOfMemory(
                    label, 0, use.in_use, use.capacity or runtime.memory_size(), str(failure).splitlines()[0]
                ) from failure
            finally:
                # Even a call that failed half-way may have given the device something.
                end = runtime.record(self.stream)
                self._given.append((end, uses))
            event.recorded(start, end)

        event.bind(self.worker.submit(hand_over, (), label))
        return event

    def _let_go(self) -> None:
        """Drop what the device no longer uses. Only the queue's own thread calls it."""
        while self._given and self._runtime.reached(self._given[0][0]):
            self._given.popleft()

    def close(self) -> None:
        """Run what is queued, on the device too, and let go of all of it."""
        self.worker.close()
        if self._given:
            self._runtime.wait(self._given[-1][0])
        self._given.clear()


class CupyDevice(Device):
    """An opened CUDA device."""

    def __init__(self, name: str, runtime: CupyRuntime, capacity: int | None) -> None:
        self.runtime = runtime
        self.info = DeviceInfo(
            name,
            runtime.description(),
            frozenset(),
            _STORAGE,
            _INTEGERS | {torch.float32},
            runtime.memory_size(),
        )
        self._account = MemoryAccount(f"device {name!r}", capacity)
        self._queues: dict[str, CupyQueue] = {}
        self._kernels: dict[str, CupyKernel] = {}
        self._workspace = 0
        self._closed = False
        self._lock = threading.RLock()  # queues and kernels are made once, whoever asks first

    def alloc(self, size: int, what: str = "buffer") -> Buffer:
        self._check_open()
        return CupyBuffer(self.runtime, self._account, size, what)

    def queue(self, name: str) -> CupyQueue:
        with self._lock:
            self._check_open()
            if name not in self._queues:
                self._queues[name] = CupyQueue(self, name)
            return self._queues[name]

    def compile(self, program: Program) -> Kernel:
        with self._lock:
            self._check_open()
            kernel = self._kernels.get(program.fingerprint)
            if kernel is None:
                check(program, self.info.name)
                _check_sums_by_index(program, self.info.name)
                needed = 2 * program.workspace  # halves are held as float32 inside
                if needed > self._workspace:
                    self._account.charge(needed - self._workspace, f"workspace of {program.name}")
                    self._workspace = needed
                kernel = self._kernels[program.fingerprint] = CupyKernel(program, self.runtime)
            return kernel

    def host(self, capacity: int | None = None, pinned: int | None = None) -> Host:
        self._check_open()
        return Host(capacity, locked=LockedMemory(self.runtime.page_locker(), pinned))

    def memory(self) -> MemoryUse:
        return self._account.use()

    def reset_peak(self) -> None:
        self._account.reset_peak()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for queue in self._queues.values():
            queue.worker.close()  # all of them first: one may wait for another
        for queue in self._queues.values():
            queue.close()
        self.runtime.synchronize()
        self._queues.clear()
        self._kernels.clear()
        self._account.release(self._account.use().in_use)

    def _check_open(self) -> None:
        if self._closed:
            raise HalError(f"device {self.info.name!r} is closed. Open it again.")


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


def _lost(failure: BaseException) -> DeviceLost:
    return DeviceLost(f"The device failed: {failure}. What lives on the host is intact; open the device again.")


def _check_sides(label: str, tensor: torch.Tensor, view: View) -> None:
    if tensor.dtype != view.dtype or tensor.numel() * tensor.element_size() != view.size:
        raise ValueError(
            f"{label} needs two sides alike; got {tuple(tensor.shape)} of {tensor.dtype} on the host and "
            f"{view.shape} of {view.dtype} on the device"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{label} needs contiguous host memory, got strides {tensor.stride()}")


class CupyBackend(Backend):
    """`cupy:N`: NVIDIA's devices."""

    name = "cupy"

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
        if not number.isdigit() or int(number) >= there:
            raise Unavailable(f"There is no device 'cupy:{selector}'. Here are cupy:0 to cupy:{there - 1}.")
        return CupyDevice(f"cupy:{number}", CupyRuntime(int(number)), capacity)
