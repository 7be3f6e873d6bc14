"""PyTorch's accelerators as devices: cuda (NVIDIA, and AMD through ROCm), xpu (Intel), mps (Apple). One class.

Each queue is a stream with a thread that submits to it. The thread is what lets a call wait for the host (an
update that must end before a layer is sent) without the caller waiting too; calls that wait for other streams are
ordered on the device, by events, and the thread goes on. Programs run as they were traced, with PyTorch's own
kernels (flash attention and the like); allocation of temporaries is PyTorch's caching allocator, on the compute
stream, and what it takes is accounted as each kernel's workspace.

What a family can do is an `Accelerator` (`backends.torch_accelerator`); nothing here names a vendor. Invariant: an
event is known to the device before anything that waits for it is submitted there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from backends.host_memory import self_test
from backends.torch_accelerator import FAMILIES, Accelerator
from backends.torch_program import lower
from hal.device import NATIVE, Backend, Buffer, Device, DeviceInfo, Probe, Queue, View
from hal.errors import DeviceLost, HalError, OutOfMemory, Unavailable, Unsupported
from hal.event import Event
from hal.host import Host
from hal.kernel import Kernel, Program
from hal.memory import MemoryAccount, MemoryUse
from hal.pages import LockedMemory
from hal.random import RandomKey
from hal.worker import Worker, WorkerEvent


class StreamEvent(Event):
    """The completion of a call on a stream: first handed to the device, then done there."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._submitted: WorkerEvent | None = None
        self._marks: tuple[Any, Any] | None = None
        self.keeps: Any = None  # host memory and views that the device may still be using

    def bind(self, submitted: WorkerEvent) -> None:
        """The hand-over to the device, as the queue's thread runs it."""
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
        return self._submitted.error is not None or self._accelerator.reached(self._marks[1])  # type: ignore[index]

    def wait(self) -> None:
        error, mark = self.on_device()
        if error is not None:
            raise error
        try:
            self._accelerator.wait(mark)
        except RuntimeError as failure:
            raise DeviceLost(
                f"The device failed while it ran what was submitted: {failure}. What lives on the host is intact; open "
                "the device again."
            ) from failure
        self.keeps = None

    def span(self) -> tuple[float, float]:
        if self._marks is None:
            return 0.0, 0.0
        return self._accelerator.seconds(self._marks[0]), self._accelerator.seconds(self._marks[1])


class TorchBuffer(Buffer):
    """A flat tensor of bytes on the device."""

    def __init__(self, device: TorchDevice, size: int, what: str) -> None:
        self.size = size
        self._device = device
        device.account.charge(size, what)
        try:
            self._memory: torch.Tensor | None = torch.empty(size, dtype=torch.uint8, device=device.torch_device)
        except RuntimeError as failure:
            device.account.release(size)
            use = device.account.use()
            raise OutOfMemory(
                what, size, use.in_use, use.capacity or device.accelerator.memory_size(), str(failure).splitlines()[0]
            ) from failure

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> View:
        if self._memory is None:
            raise HalError("this buffer was freed; allocate a new one")
        view = View(None, tuple(shape), dtype)
        view.check_place(offset, self.size)
        view.native = self._memory[offset : offset + view.size].view(dtype).view(view.shape)
        return view

    def free(self) -> None:
        if self._memory is not None:
            # The allocator must not hand the memory out again before the streams that use it are past it.
            self._device.accelerator.outlive(self._memory, self._device.streams())
            self._memory = None
            self._device.account.release(self.size)


class TorchKernel(Kernel):
    """A program lowered to Python over torch, once for each pattern of accumulation."""

    def __init__(self, program: Program, device: torch.device) -> None:
        super().__init__(program)
        self._device = device
        self._functions: dict[tuple[bool, ...], Callable[..., Any]] = {}
        self._lock = threading.Lock()

    def function(self, accumulate: tuple[bool, ...]) -> Callable[..., Any]:
        with self._lock:
            function = self._functions.get(accumulate)
            if function is None:
                function = self._functions[accumulate] = lower(self.program, accumulate, self._device)
            return function


class TorchQueue(Queue):
    """A stream and the thread that submits to it. See `hal.device.Queue` for the contracts."""

    def __init__(self, device: TorchDevice, name: str) -> None:
        self.name = name
        self.stream = device.accelerator.new_stream()
        self.worker = Worker(f"{device.info.name} {name}", on_start=device.enter_thread)
        self._device = device

    def write(self, target: View, source: torch.Tensor, wait: Sequence[Event] = ()) -> Event:
        return self._transfer(target.native, source, wait, "write")

    def read(self, target: torch.Tensor, source: View, wait: Sequence[Event] = ()) -> Event:
        return self._transfer(target, source.native, wait, "read")

    def copy(self, target: View, source: View, wait: Sequence[Event] = ()) -> Event:
        return self._transfer(target.native, source.native, wait, "copy")

    def fill(self, target: View, value: float, wait: Sequence[Event] = ()) -> Event:
        tensor: torch.Tensor = target.native
        return self._submit(lambda: tensor.fill_(value), wait, "fill", tensor)

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
        assert isinstance(kernel, TorchKernel)
        function = kernel.function(accumulate)
        arguments = [view.native for view in inputs]
        if program.draws:
            arguments.append(key)
        arguments += [view.native for view in outputs]
        return self._submit(lambda: function(*arguments), wait, program.name, arguments)

    def _transfer(self, target: torch.Tensor, source: torch.Tensor, wait: Sequence[Event], label: str) -> Event:
        if target.dtype != source.dtype or target.numel() != source.numel():
            raise ValueError(
                f"{label} needs two sides alike; got {tuple(target.shape)} of {target.dtype} from "
                f"{tuple(source.shape)} of {source.dtype}"
            )
        if not target.is_contiguous() or not source.is_contiguous():
            raise ValueError(f"{label} needs contiguous memory on both sides")
        flat, other = target.view(-1), source.view(-1)
        return self._submit(lambda: flat.copy_(other, non_blocking=True), wait, label, (target, source))

    def _submit(self, call: Callable[[], Any], wait: Sequence[Event], label: str, keeps: Any) -> Event:
        accelerator = self._device.accelerator
        event = StreamEvent(accelerator)
        event.keeps = keeps
        on_stream = [other for other in wait if isinstance(other, StreamEvent)]
        on_host = [other for other in wait if not isinstance(other, StreamEvent)]

        def hand_over() -> None:
            for other in on_stream:
                error, mark = other.on_device()
                if error is not None:
                    raise error
                accelerator.order(self.stream, mark)
            with accelerator.use(self.stream):
                start = accelerator.record(self.stream)
                try:
                    call()
                except torch.OutOfMemoryError as failure:
                    use = self._device.memory()
                    raise OutOfMemory(
                        label, 0, use.in_use, use.capacity or accelerator.memory_size(), str(failure).splitlines()[0]
                    ) from failure
                event.recorded(start, accelerator.record(self.stream))

        event.bind(self.worker.submit(hand_over, on_host, label))
        return event


class TorchDevice(Device):
    """An opened accelerator."""

    def __init__(self, name: str, accelerator: Accelerator, capacity: int | None) -> None:
        self.accelerator = accelerator
        self.torch_device = accelerator.device
        self.info = DeviceInfo(
            name,
            accelerator.description(),
            frozenset({NATIVE}),
            accelerator.dtypes(),
            accelerator.dtypes(),
            accelerator.memory_size(),
            traced_for=accelerator.traced_for(),
        )
        self.account = MemoryAccount(f"device {name!r}", capacity)
        self._queues: dict[str, TorchQueue] = {}
        self._kernels: dict[str, TorchKernel] = {}
        self._workspace = 0
        self._closed = False
        self._lock = threading.Lock()

    def alloc(self, size: int, what: str = "buffer") -> Buffer:
        self._check_open()
        return TorchBuffer(self, size, what)

    def queue(self, name: str) -> TorchQueue:
        self._check_open()
        with self._lock:
            if name not in self._queues:
                self._queues[name] = TorchQueue(self, name)
            return self._queues[name]

    def compile(self, program: Program) -> Kernel:
        self._check_open()
        with self._lock:
            kernel = self._kernels.get(program.fingerprint)
            if kernel is None:
                for port in (*program.inputs, *program.outputs):
                    if port.dtype not in self.info.storage:
                        raise Unsupported(
                            f"{program.name} needs {port.dtype}, which device {self.info.name!r} does not have",
                            dtype=str(port.dtype),
                            device=self.info.name,
                        )
                growth = program.workspace - self._workspace
                if growth > 0:
                    self.account.charge(growth, f"workspace of {program.name}")
                    self._workspace = program.workspace
                kernel = self._kernels[program.fingerprint] = TorchKernel(program, self.torch_device)
            return kernel

    def host(self, capacity: int | None = None, pinned: int | None = None) -> Host:
        self._check_open()
        locker = self.accelerator.page_locker()
        return Host(capacity, locked=LockedMemory(locker, pinned) if locker is not None else None)

    def memory(self) -> MemoryUse:
        return self.account.use()

    def reset_peak(self) -> None:
        self.account.reset_peak()

    def adopt(self, tensor: torch.Tensor) -> View:
        raise Unsupported(f"device {self.info.name!r} has memory of its own: write and read instead of aliasing")

    def host_tensor(self, view: View) -> torch.Tensor:
        raise Unsupported(f"device {self.info.name!r} has memory of its own: write and read instead of aliasing")

    def streams(self) -> list[Any]:
        """The streams in use."""
        return [queue.stream for queue in self._queues.values()]

    def enter_thread(self) -> None:
        """What each queue's thread does first."""
        torch.set_grad_enabled(False)  # per thread; programs hold their own backward
        self.accelerator.enter_thread()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for queue in self._queues.values():
                queue.worker.close()
            self.accelerator.synchronize()
            self._queues.clear()
            self._kernels.clear()
            self.account.release(self.account.use().in_use)

    def _check_open(self) -> None:
        if self._closed:
            raise HalError(f"device {self.info.name!r} is closed. Open it again.")


class TorchBackend(Backend):
    """One family of PyTorch's accelerators."""

    def __init__(self, name: str) -> None:
        self.name = name

    def probe(self) -> list[Probe]:
        family = FAMILIES[self.name]
        reason = family.missing()
        if reason:
            return [Probe(self.name, False, reason)]
        tested = [self_test(self, f"{self.name}:{number}") for number in range(family.count())]
        return [replace(probe, notes=()) for probe in tested]  # how many threads the host has says nothing of a GPU

    def open(self, selector: str, capacity: int | None = None) -> Device:
        family = FAMILIES[self.name]
        reason = family.missing()
        if reason:
            raise Unavailable(f"There is no device {self.name!r} here: {reason}")
        number = selector or "0"
        if not number.isdigit() or int(number) >= family.count():
            last = family.count() - 1
            raise Unavailable(
                f"There is no device '{self.name}:{selector}'. Here are {self.name}:0 to {self.name}:{last}."
            )
        return TorchDevice(f"{self.name}:{number}", family.open(int(number)), capacity)


def cuda() -> TorchBackend:
    """`cuda:N`: NVIDIA through CUDA, AMD through ROCm."""
    return TorchBackend("cuda")


def xpu() -> TorchBackend:
    """`xpu:N`: Intel GPUs."""
    return TorchBackend("xpu")


def mps() -> TorchBackend:
    """`mps`: Apple's GPU."""
    return TorchBackend("mps")
