"""Kernels that the host runs for a device: their inputs are read, Python runs them, and their outputs are written back.

Everything is submitted, and ordered by events like a kernel of the device's. The host's copies of inputs and outputs
are in its ledger as long as the kernel lives, and all calls of a kernel use the same ones. Invariant: a call reads and
writes the device memory that a kernel of the device would.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch

from hal.device import NATIVE, DeviceInfo, KernelCall, Queue, View
from hal.event import Event
from hal.host import Host, HostWork
from hal.program import Kernel, Program
from hal.random import RandomKey
from relay.capture import EagerCall

STATE = "values of code that the host runs"
"""The row of the host's ledger."""


def runs_on_host(program: Program, device: DeviceInfo) -> bool:
    """Whether a program is one that Python runs, and the device takes graphs alone."""
    return NATIVE not in device.tags and call_of(program) is not None


def call_of(program: Program) -> EagerCall | None:
    """What a program of one node calls, if it is one that Python runs."""
    for node in program.graph.nodes:
        if isinstance(node.target, EagerCall):
            return node.target
    return None


def bytes_on_host(program: Program) -> int:
    """Bytes of host memory that a kernel of it takes."""
    return sum(port.size for port in (*program.inputs, *program.outputs))


class HostKernel(Kernel):
    """A program that the host runs. Raises OutOfMemory where the host has no room for its inputs and outputs."""

    def __init__(self, program: Program, host: Host) -> None:
        super().__init__(program)
        self.host = host
        ports = (*program.inputs, *program.outputs)
        memory = [host.alloc(math.prod(port.shape), port.dtype, STATE, crosses=True) for port in ports]
        weakref.finalize(self, _free, host, memory)
        views = [flat.view(port.shape) for flat, port in zip(memory, ports, strict=True)]
        self.inputs, self.outputs = views[: len(program.inputs)], views[len(program.inputs) :]

    def compute(self, accumulate: tuple[bool, ...], key: RandomKey | None) -> None:
        """Compute the outputs from the inputs. Those that accumulate are added to what they hold."""
        call = call_of(self.program)
        assert call is not None
        made = call(*self.inputs, key)
        for number, (target, result) in enumerate(zip(self.outputs, made, strict=True)):
            if accumulate and accumulate[number]:
                target.add_(result)
            else:
                target.copy_(result)


class HostCalls(Queue):
    """In the place of a device's queue: a call of a host's kernel reads, computes on the host, and writes."""

    def __init__(self, queue: Queue) -> None:
        self.name = queue.name
        self._queue = queue

    def run(self, call: KernelCall, wait: Sequence[Event] = ()) -> Event:
        kernel = call.kernel
        if not isinstance(kernel, HostKernel):
            return self._queue.run(call, wait)
        sources = list(zip(kernel.inputs, call.inputs, strict=True))
        if call.accumulate:
            added = zip(kernel.outputs, call.outputs, call.accumulate, strict=True)
            sources += [(target, view) for target, view, adds in added if adds]
        # One queue runs its calls in order, so the call before has been written when these are read.
        reads = [self._queue.read(target, view, wait) for target, view in sources]
        accumulate, key = call.accumulate, call.key
        computed = kernel.host.run(
            lambda: kernel.compute(accumulate, key),
            reads or wait,
            kernel.program.name,
            HostWork(bytes_on_host(kernel.program)),
        )
        events = [computed]
        for target, view in zip(kernel.outputs, call.outputs, strict=True):
            events.append(self._queue.write(view, target, [computed]))
        return events[-1]

    def write(self, target: View, source: torch.Tensor, wait: Sequence[Event] = ()) -> Event:
        return self._queue.write(target, source, wait)

    def read(self, target: torch.Tensor, source: View, wait: Sequence[Event] = ()) -> Event:
        return self._queue.read(target, source, wait)

    def copy(self, target: View, source: View, wait: Sequence[Event] = ()) -> Event:
        return self._queue.copy(target, source, wait)

    def fill(self, target: View, value: float, wait: Sequence[Event] = ()) -> Event:
        return self._queue.fill(target, value, wait)


def _free(host: Host, tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        host.free(tensor, STATE)
