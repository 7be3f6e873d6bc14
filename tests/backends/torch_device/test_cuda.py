"""What CUDA alone has, over stand-ins for PyTorch's graph and allocator and for the driver's streams."""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import pytest
import torch

from backends.torch_device import cuda
from backends.torch_device.device import TorchDevice
from hal.errors import OutOfMemory
from tests.support.stubs.stub_accelerator import StubAccelerator


class LoudGraph:
    """`torch.cuda.CUDAGraph` and what it does to the allocator, as in PyTorch's source `CUDAGraph.cpp`.

    `capture_end` raises before its last lines where the recording became invalid: it then leaves the allocator in use
    of the pool, and the graph does not give up its share of the pool when it is dropped.
    """

    made: ClassVar[list[LoudGraph]] = []
    fails: ClassVar[str] = ""
    recording: ClassVar[list[object]] = []  # the pools that the allocator takes memory from
    shares: ClassVar[int] = 0  # of the pool

    def __init__(self) -> None:
        self.said: list[object] = []
        self.ended = False
        self.made.append(self)

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert not gc.isenabled(), "a collection while a stream records"
        self.said += ["begin", pool, capture_error_mode]
        LoudGraph.shares += 1
        self.recording.append(pool)
        if self.fails == "to begin":
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def capture_end(self) -> None:
        assert self.said[0] == "begin"
        self.said.append("end")
        if self.fails in ("to begin", "in the recording"):
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        end_allocating(0, self.recording[-1])
        if self.fails == "without a graph":
            raise RuntimeError("Invalid capture.")
        self.ended = True

    def pool(self) -> object:
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.said[1]

    def replay(self) -> None:
        assert self.said[-1] != "begin"
        self.said.append("replay")


def end_allocating(device: int, pool: object) -> None:
    if pool not in LoudGraph.recording:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
    LoudGraph.recording.remove(pool)


def release_pool(device: int, pool: object) -> None:
    assert LoudGraph.shares > 0, "a pool is given up that nobody has"
    LoudGraph.shares -= 1


@pytest.mark.parametrize("fails", ["", "to begin", "in Python", "in the recording", "without a graph"])
def test_after_a_recording_the_allocator_is_as_before_whatever_happened_in_it(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"made": [], "recording": [], "shares": 0, "fails": fails}.items():
        monkeypatch.setattr(LoudGraph, name, value)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", LoudGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocating, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release_pool, raising=False)
    recorder = cuda.CudaGraphs(torch.device("cuda", 0))
    ran: list[int] = []

    def call() -> None:
        ran.append(1)
        if fails == "in Python":
            raise ArithmeticError("in the middle")

    if fails:
        with pytest.raises(ArithmeticError if fails == "in Python" else RuntimeError):
            recorder.record(None, call)
    else:
        recorder.record(None, call)()
    (graph,) = LoudGraph.made
    assert graph.said[:3] == ["begin", "pool", "thread_local"]
    assert graph.said[3:] == {"": ["end", "replay"], "to begin": []}.get(fails, ["end"])
    assert LoudGraph.recording == []
    assert LoudGraph.shares == (1 if graph.ended else 0), "one that ended gives up its share as it is dropped"
    assert ran == ([] if fails == "to begin" else [1])
    assert gc.isenabled()
    if not graph.ended:
        reference = weakref.ref(graph)
        del graph
        LoudGraph.made.clear()
        assert reference() is not None, "the allocator of pinned memory still has its address"


class Driver:
    """cuStreamCreate and cuStreamDestroy."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.flags, self.alive = code, [], set[int]()  # type: ignore[var-annotated]

    def create(self, address: Any, flags: Any) -> int:
        self.flags.append(flags.value)
        address._obj.value = 0x1000 + len(self.flags) if not self.code else None
        self.alive |= {address._obj.value} - {None}
        return self.code

    def destroy(self, address: Any) -> int:
        self.alive.remove(address.value)
        return 0


def test_queues_have_streams_of_their_own_that_wait_for_no_other_and_end(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver()
    streams = cuda.OwnStreams((driver.create, driver.destroy))
    made = [streams.new() for _ in range(40)]
    assert len(set(made)) == 40, "PyTorch's pool would give 32"
    assert set(driver.flags) == {1}
    for address in made:
        assert address is not None
        streams.end(address)
        streams.end(address)
    assert driver.alive == set()
    assert cuda.OwnStreams(None).new() is None
    refusing = Driver(code=2)
    assert cuda.OwnStreams((refusing.create, refusing.destroy)).new() is None
    assert "error 2" in caplog.text


def test_a_device_that_others_use_has_the_memory_that_is_free() -> None:
    stub = StubAccelerator()
    stub.free = 1000
    for capacity, limit in ((None, 1000), (1 << 30, 1000), (600, 600)):
        device = TorchDevice("stub:0", stub, capacity)
        assert device.memory().capacity == limit
        assert device.memory().allocator_peak == stub.peak_memory()
        with pytest.raises(OutOfMemory):
            device.alloc(limit + 1)
        device.close()
    assert stub.streams == [], "the streams of closed devices are given back"
