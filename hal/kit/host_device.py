"""What devices that live in host memory share: buffers that are counted, queues that are threads, the device itself.

A backend that runs its kernels on the host's cores (PyTorch's, numpy's) says only how a program becomes a kernel and
how a kernel is called; everything about memory, queues, events and accounting is here. It computes nothing.

Each queue is a thread. Every byte of `alloc` and of kernel workspace is accounted against `capacity`; on a unified
device slots are accounted too, though nothing is copied into them, because that is the device memory an accelerator
would need. A view's `native` is a torch tensor over the memory.
"""

from __future__ import annotations

import abc
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hal.device import Backend, Buffer, KernelCall, Probe, View
from hal.event import Event
from hal.host import Host
from hal.kit.accounted_device import AccountedDevice
from hal.kit.program_builder import GraphBuilder, for_device
from hal.kit.tensor_memory import TensorBuffer, TensorTransfers
from hal.memory import MemoryAccount
from hal.page_lock import LockedMemory, Mlock
from hal.worker import Worker

COMPUTE = "compute"
"""The queue that kernels run on, and the host's tasks with them."""


class HostBuffer(TensorBuffer):
    """Host memory, charged to the device's account."""

    def __init__(self, account: MemoryAccount, size: int, what: str) -> None:
        super().__init__(account, size, what)
        try:
            self.memory = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as failure:
            raise account.refused(size, what) from failure


class HostQueue(TensorTransfers):
    """A worker thread. See `hal.device.Queue` for the contracts; how a kernel is called is the backend's."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.worker = Worker(name, on_start=_enter_thread)
        self._threads = 0

    def fill(self, target: View, value: float, wait: Sequence[Event] = ()) -> Event:
        tensor: torch.Tensor = target.native
        return self.worker.submit(lambda: tensor.fill_(value), wait, "fill")  # type: ignore[arg-type]

    def run(self, call: KernelCall, wait: Sequence[Event] = ()) -> Event:
        return self.worker.submit(self.prepare(call), wait, call.kernel.program.name)

    @abc.abstractmethod
    def prepare(self, call: KernelCall) -> Callable[[], None]:
        """A function that runs a kernel call when it is called, on the queue's thread."""

    def as_its_caller(self, call: Callable[[], None]) -> Callable[[], None]:
        """`call` on as many threads as torch has where this is called.

        As if the caller ran the ops: other numbers cut sums differently, and results would differ in the last bit.
        """
        threads = torch.get_num_threads()

        def with_threads() -> None:
            if threads != self._threads:
                torch.set_num_threads(threads)
                self._threads = threads
            call()

        return with_threads

    def submit_copy(self, target: torch.Tensor, source: torch.Tensor, wait: Sequence[Event], label: str) -> Event:
        if target.data_ptr() == source.data_ptr():
            return self.worker.submit(_nothing, wait, label)
        flat, other = target.view(-1), source.view(-1)
        return self.worker.submit(lambda: flat.copy_(other), wait, label)  # type: ignore[arg-type]


class HostDevice(AccountedDevice[HostQueue]):
    """An opened device in host memory. A backend gives `make_queue`, `make_kernel`, and perhaps `workspace`."""

    def make_buffer(self, size: int, what: str) -> Buffer:
        return HostBuffer(self.account, size, what)

    def host(self, capacity: int | None = None, pinned: int | None = None) -> Host:
        self.check_open()
        if self.info.unified:
            return Host(capacity, worker=self.queue(COMPUTE).worker)
        return Host(capacity, locked=LockedMemory(Mlock(), pinned))

    def adopt(self, tensor: torch.Tensor) -> View:
        self.check_unified()
        if not tensor.is_contiguous():
            raise ValueError(f"only contiguous memory can be adopted, got strides {tensor.stride()}")
        return View(tensor, tuple(tensor.shape), tensor.dtype)

    def host_tensor(self, view: View) -> torch.Tensor:
        self.check_unified()
        tensor: torch.Tensor = view.native
        return tensor

    def end_queues(self) -> None:
        for queue in self.queues():
            queue.worker.close()


def self_test(backend: Backend, name: str) -> Probe:
    """Open the device of that name, write, fill, run a small kernel, and read what it made (contract 10)."""
    try:
        device = backend.open(name.partition(":")[2])
        try:
            builder = GraphBuilder("self-test")
            x = builder.input((256,))
            tripled = builder.call("aten.add.Tensor", x, builder.call("aten.mul.Scalar", x, 2.0))
            kernel = device.compile(for_device(builder.program([tripled]), device))
            queue = device.queue(COMPUTE)
            buffer = device.alloc(2048, "self-test")
            numbers, back = torch.arange(256, dtype=torch.float32), torch.empty(256)
            source, target = (buffer.view(offset, (256,), torch.float32) for offset in (0, 1024))
            written = queue.write(source, numbers)
            filled = queue.fill(buffer.view(0, (1,), torch.float32), 7.0, [written])
            ran = queue.run(KernelCall(kernel, [source], [target]), [filled])
            queue.read(back, target, [ran]).wait()
            numbers[0] = 7.0
            if not torch.equal(back, numbers * 3):
                return Probe(name, False, "its self-test, three times some numbers in a kernel, gave other numbers")
        finally:
            device.close()
    except Exception as failure:  # contract 10: the reason is kept, not raised
        return Probe(name, False, f"{type(failure).__name__}: {failure}")
    info = device.info
    return Probe(name, True, "", info.description, info.memory, info.tags, info.notes)


def _nothing() -> None:
    """A transfer between two names of the same memory."""


def _enter_thread() -> None:
    torch.set_grad_enabled(False)  # per thread; programs hold their own backward


def describe_processor() -> str:
    """The processor's name and its cores."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
    except OSError:
        pass
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def memory_size() -> int | None:
    """Bytes of the host's memory, where the system says."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
