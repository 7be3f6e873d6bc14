"""The CPU as a device: programs run with torch on the host's cores, in host memory.

`cpu` is a unified device: weights, gradients and stash are used where they lie, and a transfer is an event without
a copy. `cpu:discrete` is the same device behind a wall: everything crosses by real copies on real queues, as it
would to an accelerator. It is slower, gives the same bits, and is there to test and to learn with.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from backends.torch_device.program import lower
from hal import dtypes
from hal.device import HOST_CORES, NATIVE, UNIFIED, Backend, Device, DeviceInfo, KernelCall, Probe
from hal.errors import Unavailable
from hal.kit.host_device import HostDevice, HostQueue, describe_processor, memory_size
from hal.kit.pattern_kernel import PatternKernel
from hal.kit.self_test import self_test
from hal.program import Kernel, Program
from hal.spec.units import format_size

NUMA_NODES = Path("/sys/devices/system/node")
"""Where Linux lists them."""


class CpuKernel(PatternKernel[Callable[..., Any]]):
    """A program lowered to Python functions over torch tensors."""

    def make(self, accumulate: tuple[bool, ...]) -> Callable[..., Any]:
        return lower(self.program, accumulate)


class CpuQueue(HostQueue):
    """A worker thread that runs torch."""

    def prepare(self, call: KernelCall) -> Callable[[], None]:
        assert isinstance(call.kernel, CpuKernel)
        function = call.kernel.function(call.accumulate)
        arguments = call.arguments()
        return self.as_its_caller(lambda: function(*arguments))


class CpuDevice(HostDevice):
    """The opened CPU."""

    def __init__(self, name: str, unified: bool, capacity: int | None) -> None:
        tags = {NATIVE, HOST_CORES, UNIFIED} if unified else {NATIVE}
        info = DeviceInfo(name, describe_processor(), frozenset(tags), dtypes.ALL, dtypes.ALL, memory_size())
        super().__init__(info, capacity)

    def make_queue(self, name: str) -> HostQueue:
        return CpuQueue(name)

    def make_kernel(self, program: Program) -> Kernel:
        return CpuKernel(program)


class CpuBackend(Backend):
    """`cpu` and `cpu:discrete`."""

    name = "cpu"

    def probe(self) -> list[Probe]:
        tested = [self_test(self, "cpu"), self_test(self, "cpu:discrete")]
        return [replace(probe, notes=_notes()) if probe.available else probe for probe in tested]

    def open(self, selector: str, capacity: int | None = None) -> Device:
        if selector not in ("", "discrete"):
            raise Unavailable(f"There is no device 'cpu:{selector}'. The CPU is 'cpu' or 'cpu:discrete'.")
        return CpuDevice("cpu:discrete" if selector else "cpu", not selector, capacity)


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
