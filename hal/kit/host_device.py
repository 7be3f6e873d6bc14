"""Devices that live in host memory: accounted buffers, queues that are threads, the device.

A backend that runs its kernels on the host's cores (PyTorch's, numpy's) defines only how a program becomes a kernel
(`make_kernel`) and how a kernel is called (`HostQueue.prepare`). Nothing is computed here.

Each queue is a thread. Every byte of `alloc` and of kernel workspace is charged against `capacity`; on a unified device
slots are charged too, though nothing is copied into them, because an accelerator would need that device memory.
Invariant: a view's `native` is a torch tensor over its memory.
"""

from __future__ import annotations

import abc
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hal.device import Buffer, KernelCall, View
from hal.event import Event
from hal.host import Host
from hal.kit.accounted_device import AccountedDevice
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
    """A queue that is a worker thread. A backend defines `prepare`."""

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
        """A function that runs `call` with the number of torch threads that the calling thread has now.

        Sums are split by the number of threads, so with another number results would differ in the last bit.
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
    """An opened device in host memory. A backend defines `make_queue`, `make_kernel`, and `workspace` if needed."""

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
            raise ValueError(f"Only a contiguous tensor can be adopted; received strides {tensor.stride()}.")
        return View(tensor, tuple(tensor.shape), tensor.dtype)

    def host_tensor(self, view: View) -> torch.Tensor:
        self.check_unified()
        tensor: torch.Tensor = view.native
        return tensor

    def end_queues(self) -> None:
        for queue in self.queues():
            queue.worker.close()


def _nothing() -> None:
    """The call of a transfer whose two sides are the same memory."""


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
    """Bytes of the host's memory; None if the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
