"""A stand-in for CuPy's calls, over numpy, late and loud: what a GPU would do wrong now and then, it always does.

A stream runs nothing until somebody waits for a mark on it, and then no more than it must; memory that nobody holds any
more is overwritten at once. A missing order, or a missing reference, is wrong every time.

Run as a script, it runs the conformance suite on the CuPy device over this stand-in.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from backends.cupy_device.device import CupyBackend, CupyDevice
from backends.cupy_device.runtime import CupyRuntime
from hal.device import Device, Probe
from hal.kit.arrays import random
from hal.kit.arrays.dtypes import Arrays
from hal.kit.arrays.numpy_arrays import as_array, numpy_arrays
from hal.kit.self_test import self_test
from tests.support.stubs import unregistered


class StubMark:
    def __init__(self, stream: StubStream, position: int) -> None:
        self.stream, self.position = stream, position


class StubStream:
    """Calls that wait for somebody to need them."""

    def __init__(self) -> None:
        self.calls: deque[Callable[[], None]] = deque()
        self.given = self.ran = 0
        self.ordered_after: list[StubMark] = []

    def give(self, call: Callable[[], None]) -> None:
        self.calls.append(call)
        self.given += 1

    def run_to(self, position: int) -> None:
        while self.ran < position:
            call = self.calls.popleft()
            self.ran += 1
            call()


class StubMemory:
    """Bytes that are overwritten when the last reference to them goes."""

    def __init__(self, size: int) -> None:
        self.bytes = np.empty(size, np.uint8)
        weakref.finalize(self, self.bytes.fill, 0xAA)


class StubArray:
    """An array as CuPy's: it keeps its memory. The device keeps nothing."""

    def __init__(self, memory: StubMemory, array: Any) -> None:
        self.memory, self.array = memory, array


class StubLocker:
    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def lock(self, address: int, size: int) -> str:
        self.locked[address] = size
        return ""

    def unlock(self, address: int, size: int) -> None:
        assert self.locked.pop(address) == size


class StubRuntime(CupyRuntime):
    def __init__(self) -> None:
        self.lock = threading.RLock()  # the device is one, whoever waits for it
        self.streams: list[StubStream] = []
        self.locker = StubLocker()
        self.broken = False

    def description(self) -> str:
        return "a stub"

    def memory_size(self) -> int:
        return 1 << 40

    def arrays(self) -> Arrays:
        plain = numpy_arrays(np.float32)
        return Arrays(np, plain.erf, random.draws(np), plain.real, plain.total)

    def constant(self, array: Any) -> Any:
        return array.copy()

    def allocate(self, size: int) -> StubMemory:
        return StubMemory(size)

    def array(self, memory: Any, offset: int, shape: Sequence[int], dtype: np.dtype[Any]) -> StubArray:
        size = int(np.prod(tuple(shape), dtype=np.int64)) * dtype.itemsize
        return StubArray(memory, memory.bytes[offset : offset + size].view(dtype).reshape(tuple(shape)))

    def new_stream(self) -> StubStream:
        self.streams.append(StubStream())
        return self.streams[-1]

    def launch(self, stream: Any, function: Callable[..., Any], operands: Sequence[Any]) -> None:
        bare = [item.array if isinstance(item, StubArray) else item for item in operands]

        def call() -> None:
            with np.errstate(all="ignore"):
                function(*bare)

        stream.give(call)

    def upload(self, stream: Any, target: Any, source: torch.Tensor) -> None:
        array, host = target.array, as_array(source)
        stream.give(lambda: np.copyto(array.reshape(-1), host.reshape(-1)))

    def download(self, stream: Any, target: torch.Tensor, source: Any) -> None:
        array, host = source.array, as_array(target)
        stream.give(lambda: np.copyto(host.reshape(-1), array.reshape(-1)))

    def copy(self, stream: Any, target: Any, source: Any) -> None:
        to, of = target.array, source.array
        stream.give(lambda: np.copyto(to.reshape(-1), of.reshape(-1)))

    def check(self) -> None:
        if self.broken:
            raise RuntimeError("an illegal memory access was encountered")

    def lost(self, failure: BaseException) -> bool:
        return "illegal memory access" in str(failure)

    def record(self, stream: Any) -> StubMark:
        self.check()
        return StubMark(stream, stream.given)

    def order(self, stream: Any, mark: Any) -> None:
        assert isinstance(mark, StubMark), "a stream waits for what nobody recorded"
        stream.ordered_after.append(mark)
        stream.give(lambda: mark.stream.run_to(mark.position))

    def reached(self, mark: Any) -> bool:
        return bool(mark.stream.ran >= mark.position)

    def wait(self, mark: Any) -> None:
        self.check()
        with self.lock:
            mark.stream.run_to(mark.position)

    def seconds(self, mark: Any) -> float:
        return 0.0

    def between(self, start: Any, end: Any) -> float:
        return 0.0

    def synchronize(self) -> None:
        for stream in self.streams:
            assert not stream.calls, "closed while work was pending"

    def page_locker(self) -> StubLocker:
        return self.locker


class StubBackend(CupyBackend):
    name = "stubcupy"

    def probe(self) -> list[Probe]:
        return [self_test(self, "stubcupy")]

    def open(self, selector: str, capacity: int | None = None) -> Device:
        return CupyDevice("stubcupy", StubRuntime(), capacity) if not selector else super().open("none")


if __name__ == "__main__":
    unregistered.register("stubcupy", f"{__name__}:StubBackend")
    # The array code has all samples on numpy.
    unregistered.print_conformance("stubcupy", sys.argv[1] or None, samples=1)
