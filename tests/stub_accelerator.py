"""A stand-in for `torch.cuda` that works on the CPU and is loud: whatever a real device would do wrong, raises.

A stream is a thread-safe list of what it was given; an event must be recorded before anybody waits for it; work
given outside of `use` is an error. It checks the logic of `backends.torch_device` where there is no GPU.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from backends.torch_accelerator import Accelerator
from hal.pages import PageLocker


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
        self.outlived: list[int] = []
        self.streams: list[StubStream] = []

    def description(self) -> str:
        return "a stub"

    def memory_size(self) -> int:
        return 1 << 30

    def traced_for(self) -> str:
        return "fpga"  # PyTorch has the name, and nothing behind it

    def dtypes(self) -> frozenset[torch.dtype]:
        return frozenset({torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool})

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
        yield

    def record(self, stream: Any) -> StubEvent:
        event = StubEvent()
        event.stream, event.time = stream, time.perf_counter()
        return event

    def order(self, stream: Any, mark: Any) -> None:
        assert mark.time is not None, "a stream waits for an event that nobody recorded"
        stream.waits.append(mark)

    def reached(self, mark: Any) -> bool:
        return mark.time is not None

    def wait(self, mark: Any) -> None:
        assert mark.time is not None, "the host waits for an event that nobody recorded"

    def seconds(self, mark: Any) -> float:
        return float(mark.time)

    def outlive(self, tensor: torch.Tensor, streams: Sequence[Any]) -> None:
        self.outlived.append(len(streams))

    def page_locker(self) -> PageLocker | None:
        return self.locker

    def synchronize(self) -> None:
        """Everything is done when it is given."""
