"""The CPU as a device: programs run with torch on the host's cores, in host memory.

`cpu` is a unified device: weights, gradients and stash are used where they lie, and a transfer is an event without
a copy. `cpu:discrete` is the same device behind a wall: everything crosses by real copies on real queues, as it
would to an accelerator. It is slower, gives the same bits, and is there to test and to learn with.

Each queue is a thread. Every byte of `alloc` and of kernel workspace is accounted against `capacity`; on the
unified device slots are accounted too, though nothing is copied into them, because that is the device memory an
accelerator would need.
"""

from __future__ import annotations

import os
import platform
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from backends.torch_program import lower
from hal.device import HOST_CORES, NATIVE, UNIFIED, Backend, Buffer, Device, DeviceInfo, Probe, Queue, View
from hal.errors import HalError, Unavailable, Unsupported
from hal.event import Event
from hal.host import Host
from hal.kernel import Kernel, Program
from hal.memory import MemoryAccount, MemoryUse, format_size
from hal.pages import LockedMemory, Mlock
from hal.random import RandomKey
from hal.worker import Worker

COMPUTE = "compute"
"""The queue that kernels run on, and the host's tasks with them."""

NUMA_NODES = Path("/sys/devices/system/node")
"""Where Linux lists them."""

_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16}
    | {torch.int8, torch.uint8, torch.bool}
)


class CpuBuffer(Buffer):
    """A flat tensor of bytes, charged to the device's account."""

    def __init__(self, account: MemoryAccount, size: int, what: str) -> None:
        account.charge(size, what)
        self.size = size
        self._account = account
        try:
            self._memory: torch.Tensor | None = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as failure:
            raise account.refused(size, what) from failure

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> View:
        if self._memory is None:
            raise HalError("this buffer was freed; allocate a new one")
        view = View(None, tuple(shape), dtype)
        if offset < 0 or offset + view.size > self.size or offset % dtype.itemsize:
            raise ValueError(
                f"a view of {view.size} bytes ({tuple(shape)} of {dtype}) at offset {offset} does not lie, aligned,"
                f" in a buffer of {self.size} bytes"
            )
        view.native = self._memory[offset : offset + view.size].view(dtype).view(view.shape)
        return view

    def free(self) -> None:
        if self._memory is not None:
            self._memory = None  # queued calls hold their own views of it
            self._account.release(self.size)


class CpuKernel(Kernel):
    """A program lowered to Python over torch, once for each pattern of accumulation."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._functions: dict[tuple[bool, ...], Callable[..., Any]] = {}

    def function(self, accumulate: tuple[bool, ...]) -> Callable[..., Any]:
        function = self._functions.get(accumulate)
        if function is None:
            function = self._functions[accumulate] = lower(self.program, accumulate)
        return function


class CpuQueue(Queue):
    """A worker thread. See `hal.device.Queue` for the contracts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.worker = Worker(name, on_start=_enter_thread)
        self._threads = 0

    def write(self, target: View, source: torch.Tensor, wait: Sequence[Event] = ()) -> Event:
        return self._transfer(target.native, source, wait, "write")

    def read(self, target: torch.Tensor, source: View, wait: Sequence[Event] = ()) -> Event:
        return self._transfer(target, source.native, wait, "read")

    def copy(self, target: View, source: View, wait: Sequence[Event] = ()) -> Event:
        return self._transfer(target.native, source.native, wait, "copy")

    def fill(self, target: View, value: float, wait: Sequence[Event] = ()) -> Event:
        tensor: torch.Tensor = target.native
        return self.worker.submit(lambda: tensor.fill_(value), wait, "fill")  # type: ignore[arg-type,return-value]

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
        if len(inputs) != len(program.inputs) or len(outputs) != len(program.outputs):
            raise ValueError(
                f"{program.name} takes {len(program.inputs)} inputs and {len(program.outputs)} outputs, "
                f"got {len(inputs)} and {len(outputs)}"
            )
        if accumulate and len(accumulate) != len(outputs):
            raise ValueError(f"{program.name} has {len(outputs)} outputs, and accumulate speaks of {len(accumulate)}")
        if program.draws and key is None:
            raise ValueError(f"{program.name} draws random numbers and was run without a key")
        assert isinstance(kernel, CpuKernel)
        function = kernel.function(accumulate)
        arguments = [view.native for view in inputs]
        if program.draws:
            arguments.append(key)
        arguments += [view.native for view in outputs]
        # The caller's number of threads decides, as it would had the caller run the ops: other numbers cut sums
        # differently, and results would differ in the last bit.
        threads = torch.get_num_threads()

        def call() -> None:
            if threads != self._threads:
                torch.set_num_threads(threads)
                self._threads = threads
            function(*arguments)

        return self.worker.submit(call, wait, program.name)

    def _transfer(self, target: torch.Tensor, source: torch.Tensor, wait: Sequence[Event], label: str) -> Event:
        if target.dtype != source.dtype or target.numel() != source.numel():
            raise ValueError(
                f"{label} needs two sides alike; got {tuple(target.shape)} of {target.dtype} from "
                f"{tuple(source.shape)} of {source.dtype}"
            )
        if not target.is_contiguous() or not source.is_contiguous():
            raise ValueError(f"{label} needs contiguous memory on both sides")
        if target.data_ptr() == source.data_ptr():
            return self.worker.submit(_nothing, wait, label)
        flat, other = target.view(-1), source.view(-1)
        return self.worker.submit(lambda: flat.copy_(other), wait, label)  # type: ignore[arg-type,return-value]


class CpuDevice(Device):
    """The opened CPU."""

    def __init__(self, name: str, unified: bool, capacity: int | None) -> None:
        tags = {NATIVE, HOST_CORES, UNIFIED} if unified else {NATIVE}
        self.info = DeviceInfo(name, _describe(), frozenset(tags), _DTYPES, _DTYPES, _memory_size())
        self._account = MemoryAccount(f"device {name!r}", capacity)
        self._queues: dict[str, CpuQueue] = {}
        # Whoever asked for a kernel keeps it; one that nobody keeps any more is compiled anew if it is asked for.
        self._kernels: weakref.WeakValueDictionary[str, CpuKernel] = weakref.WeakValueDictionary()
        self._buffers: weakref.WeakSet[CpuBuffer] = weakref.WeakSet()
        self._workspace = 0
        self._lock = threading.RLock()  # queues and kernels are made once, whoever asks first
        self._closed = False

    def alloc(self, size: int, what: str = "buffer") -> Buffer:
        with self._lock:
            self._check_open()
            buffer = CpuBuffer(self._account, size, what)
            self._buffers.add(buffer)
        return buffer

    def queue(self, name: str) -> CpuQueue:
        with self._lock:
            self._check_open()
            if name not in self._queues:
                self._queues[name] = CpuQueue(name)
            return self._queues[name]

    def compile(self, program: Program) -> Kernel:
        with self._lock:
            self._check_open()
            kernel = self._kernels.get(program.fingerprint)
            if kernel is None:
                # One kernel runs at a time, so the largest workspace serves all.
                growth = program.workspace - self._workspace
                if growth > 0:
                    self._account.charge(growth, f"workspace of {program.name}")
                    self._workspace = program.workspace
                kernel = self._kernels[program.fingerprint] = CpuKernel(program)
            return kernel

    def host(self, capacity: int | None = None, pinned: int | None = None) -> Host:
        self._check_open()
        if self.info.unified:
            return Host(capacity, worker=self.queue(COMPUTE).worker)
        return Host(capacity, locked=LockedMemory(Mlock(), pinned))

    def memory(self) -> MemoryUse:
        return self._account.use()

    def reset_peak(self) -> None:
        self._account.reset_peak()

    def adopt(self, tensor: torch.Tensor) -> View:
        self._check_unified()
        if not tensor.is_contiguous():
            raise ValueError(f"only contiguous memory can be adopted, got strides {tensor.stride()}")
        return View(tensor, tuple(tensor.shape), tensor.dtype)

    def host_tensor(self, view: View) -> torch.Tensor:
        self._check_unified()
        tensor: torch.Tensor = view.native
        return tensor

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for queue in self._queues.values():
            queue.worker.close()
        self._queues.clear()
        self._kernels.clear()
        for buffer in list(self._buffers):
            buffer.free()
        # The workspace, and buffers that were dropped without being freed.
        self._account.release(self._account.use().in_use)
        self._workspace = 0

    def _check_open(self) -> None:
        if self._closed:
            raise HalError(f"device {self.info.name!r} is closed. Open it again.")

    def _check_unified(self) -> None:
        if not self.info.unified:
            raise Unsupported(f"device {self.info.name!r} has memory of its own: write and read instead of aliasing")


class CpuBackend(Backend):
    """`cpu` and `cpu:discrete`."""

    name = "cpu"

    def probe(self) -> list[Probe]:
        return [self._self_test("cpu"), self._self_test("cpu:discrete")]

    def open(self, selector: str, capacity: int | None = None) -> Device:
        if selector not in ("", "discrete"):
            raise Unavailable(f"There is no device 'cpu:{selector}'. The CPU is 'cpu' or 'cpu:discrete'.")
        return CpuDevice("cpu:discrete" if selector else "cpu", not selector, capacity)

    def _self_test(self, name: str) -> Probe:
        try:
            device = self.open(name.partition(":")[2])
            try:
                queue = device.queue(COMPUTE)
                buffer = device.alloc(1024)
                numbers = torch.arange(256, dtype=torch.float32)
                view = buffer.view(0, (256,), torch.float32)
                back = torch.empty(256)
                written = queue.write(view, numbers)
                filled = queue.fill(buffer.view(0, (1,), torch.float32), 7.0, [written])
                queue.read(back, view, [filled]).wait()
                numbers[0] = 7.0
                if not torch.equal(back, numbers):
                    return Probe(name, False, "its self-test read back other numbers than it wrote")
            finally:
                device.close()
        except Exception as failure:  # contract 10: the reason is kept, not raised
            return Probe(name, False, f"{type(failure).__name__}: {failure}")
        return Probe(name, True, "", device.info.description, device.info.memory, device.info.tags, _notes())


def _nothing() -> None:
    """A transfer between two names of the same memory."""


def _enter_thread() -> None:
    torch.set_grad_enabled(False)  # per thread; programs hold their own backward


def _describe() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
    except OSError:
        pass
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _notes() -> tuple[str, ...]:
    """Threads, NUMA nodes where there are several, and how much memory may be page-locked: with what to do."""
    threads = torch.get_num_threads()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    notes = [f"{threads} threads on {usable} usable cores"]
    if threads > usable:
        notes[0] += f": more than cores, which is slow; set OMP_NUM_THREADS={usable}"
    nodes = list(NUMA_NODES.glob("node[0-9]*"))
    if len(nodes) > 1:
        notes.append(
            f"{len(nodes)} NUMA nodes: spread the model's memory with `numactl --interleave=all`, or stay on one node "
            "with `numactl --cpunodebind=0 --membind=0`"
        )
    limit = _lock_limit()
    if limit is not None:
        notes.append(f"page-locked memory: {limit} (`ulimit -l`)")
    return tuple(notes)


def _lock_limit() -> str | None:
    """How much a process may page-lock, as text; None on systems that do not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "no limit" if soft == resource.RLIM_INFINITY else f"at most {format_size(soft)}"


def _memory_size() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
