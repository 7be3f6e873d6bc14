"""PyTorch's accelerators as one device class: cuda (NVIDIA, and AMD through ROCm), xpu (Intel), mps (Apple).

Each queue is a stream with a thread that submits to it (`hal.kit.streams`). Programs run as they were traced, with
PyTorch's own kernels (flash attention and the like); launches on the same addresses are recorded and replayed where the
family can (`backends.torch_device.cuda_graphs`). Temporaries come from PyTorch's caching allocator, on the stream they
are used on, and are accounted as each kernel's workspace.

The calls of a family are an `Accelerator` (`backends.torch_device.accelerator`); nothing here names a vendor.
Invariant: work is submitted to a queue's own stream, by its own thread, and never to PyTorch's current stream.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from backends.torch_device.accelerator import Accelerator
from backends.torch_device.cuda_graphs import RECORDS, Recordings, reason_against
from backends.torch_device.families import FAMILIES
from backends.torch_device.program import lower
from hal.device import NATIVE, Backend, Buffer, Device, DeviceInfo, KernelCall, Probe, View
from hal.dtypes import check_ports
from hal.errors import Unavailable
from hal.event import Event
from hal.host import Host
from hal.kit.accounted_device import AccountedDevice
from hal.kit.pattern_kernel import PatternKernel
from hal.kit.self_test import self_test
from hal.kit.streams import StreamQueue, allocate, end, lost
from hal.kit.tensor_memory import TensorBuffer, TensorTransfers
from hal.memory import MemoryUse
from hal.page_lock import LockedMemory
from hal.program import Kernel, Program

logger = logging.getLogger(__name__)

PLAIN = "plain"
"""The option of a device string, after a comma, for a device that records no launches."""


class TorchBuffer(TensorBuffer):
    """Memory of the device's, from PyTorch's allocator."""

    def __init__(self, device: TorchDevice, size: int, what: str) -> None:
        super().__init__(device.account, size, what)
        accelerator = device.accelerator

        def get() -> torch.Tensor:
            return torch.empty(size, dtype=torch.uint8, device=accelerator.device)

        try:
            self.memory = allocate(get, accelerator, device.queues)
        except RuntimeError as failure:
            if accelerator.lost(failure):
                device.account.release(size)
                raise lost(failure) from failure
            raise device.account.refused(size, what) from failure


class TorchKernel(PatternKernel[Callable[..., Any]]):
    """A program lowered to Python functions over torch tensors of one device."""

    def __init__(self, program: Program, device: torch.device) -> None:
        super().__init__(program)
        self.recordable = not reason_against(program)
        self._device = device

    def make(self, accumulate: tuple[bool, ...]) -> Callable[..., Any]:
        return lower(self.program, accumulate, self._device)


class TorchQueue(TensorTransfers, StreamQueue):
    """A stream of the accelerator's, and what was recorded on it."""

    def __init__(self, device: TorchDevice, name: str) -> None:
        accelerator = device.accelerator
        super().__init__(name, device.info.name, accelerator, device.memory, device.enter_thread)
        self._accelerator = accelerator
        recorder = accelerator.recorder() if RECORDS in device.info.tags else None
        self.recordings = None if recorder is None else Recordings(recorder, self.stream, device.account, self.settle)

    def fill(self, target: View, value: float, wait: Sequence[Event] = ()) -> Event:
        tensor: torch.Tensor = target.native
        return self._on_stream(lambda: tensor.fill_(value), wait, "fill", tensor)

    def run(self, call: KernelCall, wait: Sequence[Event] = ()) -> Event:
        kernel = call.kernel
        assert isinstance(kernel, TorchKernel)
        program, function, arguments = kernel.program, kernel.function(call.accumulate), call.arguments()
        uses = (kernel, arguments)  # constants of the kernel are on the device
        recordings = self.recordings
        if recordings is not None and kernel.recordable:
            return self._on_stream(lambda: recordings.launch(program, function, arguments), wait, program.name, uses)
        return self._on_stream(lambda: function(*arguments), wait, program.name, uses)

    def submit_copy(self, target: torch.Tensor, source: torch.Tensor, wait: Sequence[Event], label: str) -> Event:
        flat, other = target.view(-1), source.view(-1)
        return self._on_stream(lambda: flat.copy_(other, non_blocking=True), wait, label, (target, source))

    def _on_stream(self, call: Callable[[], Any], wait: Sequence[Event], label: str, uses: Any) -> Event:
        def give() -> None:
            with self._accelerator.use(self.stream):
                call()

        return self.submit(give, wait, label, uses)


class TorchDevice(AccountedDevice[TorchQueue]):
    """An opened accelerator. With `record`, launches are recorded where it can."""

    def __init__(self, name: str, accelerator: Accelerator, capacity: int | None, record: bool = True) -> None:
        self.accelerator = accelerator
        dtypes = accelerator.dtypes()
        super().__init__(
            DeviceInfo(
                name,
                accelerator.description(),
                frozenset({NATIVE, RECORDS} if record and accelerator.recorder() is not None else {NATIVE}),
                dtypes,
                dtypes,
                accelerator.memory_size(),
                traced_for=accelerator.traced_for(),
            ),
            _bounded(capacity, accelerator.free_memory()),
        )

    def memory(self) -> MemoryUse:
        return replace(super().memory(), allocator_peak=self.accelerator.peak_memory())

    def reset_peak(self) -> None:
        super().reset_peak()
        self.accelerator.reset_peak()

    def make_buffer(self, size: int, what: str) -> Buffer:
        return TorchBuffer(self, size, what)

    def make_queue(self, name: str) -> TorchQueue:
        return TorchQueue(self, name)

    def make_kernel(self, program: Program) -> Kernel:
        check_ports(program, self.info)
        return TorchKernel(program, self.accelerator.device)

    def spare(self) -> bool:
        had = False
        for queue in self.queues():
            if queue.recordings is not None:
                had = queue.recordings.forget() or had
        return had

    def host(self, capacity: int | None = None, pinned: int | None = None) -> Host:
        self.check_open()
        locker = self.accelerator.page_locker()
        return Host(capacity, locked=LockedMemory(locker, pinned) if locker is not None else None)

    def enter_thread(self) -> None:
        """What each queue's thread does first."""
        torch.set_grad_enabled(False)  # per thread; programs hold their own backward
        self.accelerator.enter_thread()

    def end_queues(self) -> None:
        end(self.queues())
        try:
            self.accelerator.synchronize()
        except RuntimeError as failure:  # raised where the failed call is waited for
            logger.warning("device %r failed before it was closed: %s", self.info.name, failure)
            return
        for queue in self.queues():
            if queue.recordings is not None:
                queue.recordings.forget()
            self.accelerator.end_stream(queue.stream)


def _bounded(capacity: int | None, free: int | None) -> int | None:
    """The capacity, or what is free as the device is opened, whichever is less."""
    return min((size for size in (capacity, free) if size is not None), default=None)


class TorchBackend(Backend):
    """One family of PyTorch's accelerators."""

    def __init__(self, name: str) -> None:
        self.name = name

    def probe(self) -> list[Probe]:
        family = FAMILIES[self.name]
        reason = family.missing()
        if reason:
            return [Probe(self.name, False, reason)]
        return [self_test(self, f"{self.name}:{number}") for number in range(family.count())]

    def open(self, selector: str, capacity: int | None = None) -> Device:
        family = FAMILIES[self.name]
        reason = family.missing()
        if reason:
            raise Unavailable(f"There is no device {self.name!r} here: {reason}")
        number, _, option = (selector or "0").partition(",")
        if not number.isdecimal() or int(number) >= family.count() or option not in ("", PLAIN):
            last = family.count() - 1
            raise Unavailable(
                f"There is no device '{self.name}:{selector}'. Here are {self.name}:0 to {self.name}:{last}, and with "
                f"',{PLAIN}' the same without recorded launches."
            )
        name = f"{self.name}:{number},{option}" if option else f"{self.name}:{number}"
        try:
            accelerator = family.open(int(number))
        except RuntimeError as failure:  # a context that an earlier error broke, or memory that others hold
            raise Unavailable(f"Device '{self.name}:{number}' cannot be opened: {failure}") from failure
        return TorchDevice(name, accelerator, capacity, record=not option)


def cuda() -> TorchBackend:
    """`cuda:N`: NVIDIA through CUDA, AMD through ROCm."""
    return TorchBackend("cuda")


def xpu() -> TorchBackend:
    """`xpu:N`: Intel GPUs."""
    return TorchBackend("xpu")


def mps() -> TorchBackend:
    """`mps`: Apple's GPU."""
    return TorchBackend("mps")
