"""A stand-in for `torch.cuda` that works on the CPU and is loud: whatever a real device would do wrong, raises.

A stream is a thread-safe list of what it was given; an event must be recorded before anybody waits for it; work
given outside of `use` is an error. It checks the logic of `backends.torch_device.device` where there is no GPU.

Run as a script with a selection of tests, it runs these of the conformance suite on the device over this stand-in.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from backends.torch_device.accelerator import Accelerator
from backends.torch_device.cuda_graphs import Recorder
from backends.torch_device.device import TorchBackend, TorchDevice
from hal.device import Device, Probe
from hal.kit.self_test import self_test
from hal.page_lock import PageLocker
from tests.support.stubs import unregistered


class StubEvent:
    def __init__(self) -> None:
        self.time: float | None = None
        self.stream: StubStream | None = None


class StubStream:
    def __init__(self) -> None:
        self.waits: list[StubEvent] = []
        self.given = 0


class StubLocker:
    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def lock(self, address: int, size: int) -> str:
        self.locked[address] = size
        return ""

    def unlock(self, address: int, size: int) -> None:
        assert self.locked.pop(address) == size


class StubAccelerator(Accelerator):
    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.entered = threading.local()
        self.locker = StubLocker()
        self.streams: list[StubStream] = []
        self.behind = False  # no mark is reached by itself
        self.broken = False
        self.recorded = 0
        self.refuses = ""  # the reason for which recordings are refused
        self.free = 1 << 30
        self.pools = 0  # of recordings, given back

    @property
    def current(self) -> StubStream | None:
        """The current stream, of which each thread has one."""
        return getattr(self.entered, "stream", None)

    def description(self) -> str:
        return "a stub"

    def memory_size(self) -> int:
        return 1 << 30

    def free_memory(self) -> int:
        return self.free

    def peak_memory(self) -> int:
        return 12345

    def reset_peak(self) -> None:
        """It counts none."""

    def end_stream(self, stream: Any) -> None:
        self.streams.remove(stream)

    def traced_for(self) -> str:
        return "fpga"  # PyTorch has the name, and nothing behind it

    def dtypes(self) -> frozenset[torch.dtype]:
        integers = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
        return frozenset({torch.float32, torch.bfloat16, torch.float16} | integers)

    def enter_thread(self) -> None:
        self.entered.device = True

    def new_stream(self) -> StubStream:
        stream = StubStream()
        self.streams.append(stream)
        return stream

    @contextlib.contextmanager
    def use(self, stream: Any) -> Iterator[None]:  # type: ignore[override]
        assert getattr(self.entered, "device", False), "work submitted from a thread that did not enter the device"
        stream.given += 1
        self.entered.stream = stream
        yield
        self.entered.stream = None

    def recorder(self) -> Recorder:
        return StubRecorder(self)

    def check(self) -> None:
        if self.broken:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def record(self, stream: Any) -> StubEvent:
        self.check()
        event = StubEvent()
        event.stream, event.time = stream, time.perf_counter()
        return event

    def order(self, stream: Any, mark: Any) -> None:
        assert mark.time is not None, "a stream waits for an event that nobody recorded"
        stream.waits.append(mark)

    def reached(self, mark: Any) -> bool:
        self.check()
        return mark.time is not None and not self.behind

    def wait(self, mark: Any) -> None:
        self.check()
        assert mark.time is not None, "the host waits for an event that nobody recorded"

    def seconds(self, mark: Any) -> float:
        return float(mark.time)

    def between(self, start: Any, end: Any) -> float:
        return float(end.time - start.time)

    def page_locker(self) -> PageLocker | None:
        return self.locker

    def synchronize(self) -> None:
        self.check()


class StubRecorder(Recorder):
    """Records without running, and is loud about what a real one would refuse."""

    def __init__(self, accelerator: StubAccelerator) -> None:
        self.accelerator = accelerator

    def record(self, stream: Any, call: Callable[[], Any]) -> Callable[[], Any]:
        assert self.accelerator.current is stream, "recorded on another stream than the queue's"
        self.accelerator.recorded += 1
        if self.accelerator.refuses:
            raise RuntimeError(self.accelerator.refuses)
        assert isinstance(call, functools.partial)
        module = getattr(call.func, "__self__", None)
        # A recording holds kernels, not the function that launched them.
        function = copy.copy(module).forward if isinstance(module, torch.fx.GraphModule) else call.func
        arguments = call.args

        def replay() -> None:
            assert self.accelerator.current is stream, "replayed on another stream than the queue's"
            function(*arguments)

        return replay

    def forget(self) -> None:
        self.accelerator.pools += 1


class StubBackend(TorchBackend):
    def __init__(self) -> None:
        super().__init__("cuda")
        self.name = "stubtorch"

    def probe(self) -> list[Probe]:
        return [self_test(self, "stubtorch")]

    def open(self, selector: str, capacity: int | None = None) -> Device:
        return TorchDevice("stubtorch", StubAccelerator(), capacity) if not selector else super().open("none")


if __name__ == "__main__":
    unregistered.register("stubtorch", f"{__name__}:StubBackend")
    unregistered.print_conformance("stubtorch", only=sys.argv[1])
