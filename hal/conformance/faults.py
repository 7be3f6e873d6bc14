"""Injected faults: any device, wrapped so that a chosen call fails, is slow, or gives a wrong value.

Tests use it to find out what the relay does about a fault. It belongs to no backend: it passes every call on to the
device that it wraps, and it is not registered. Invariant: without a fault, results, events and accounts are the wrapped
device's own; calls are counted in the order of submission, which a schedule repeats exactly.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hal.device import Buffer, Device, KernelCall, Queue, View
from hal.errors import DeviceLost, HalError, OutOfMemory
from hal.event import Event
from hal.host import Host, HostWork
from hal.memory import MemoryUse
from hal.program import Kernel, Program
from hal.worker import Worker


class InjectedFault(HalError):
    """The error of an injected fault."""


@dataclass
class Faults:
    """The faults to inject, by the number of the call (0 is the next call; `restart` counts anew).

    Args:
        fail_at: the number of the call that fails.
        how: how it fails: `skip` (it does not run), `after` (it runs, and then reports an error), `submit` (its
            submission raises), `lost` (from this call on, all calls of the device's queues raise DeviceLost; the host's
            tasks run).
        poison_at: the number of the call whose output is overwritten.
        poison: the number that it is overwritten with.
        slow: seconds that every call on a queue is delayed, by the queue's name; `host` for the host's tasks.
        capacity: a new limit in bytes for further allocations.
        calls: the calls submitted so far.
    """

    fail_at: int | None = None
    how: str = "skip"
    poison_at: int | None = None
    poison: float = float("nan")
    slow: dict[str, float] = field(default_factory=dict)
    capacity: int | None = None
    calls: list[str] = field(default_factory=list)

    def restart(self, fail_at: int | None = None, how: str = "skip", poison_at: int | None = None) -> None:
        """Count from 0 again, with these faults."""
        self.fail_at, self.how, self.poison_at = fail_at, how, poison_at
        self.calls.clear()

    def submit(
        self, queue: str, label: str, wait: Sequence[Event], call: Callable[[Sequence[Event]], Event]
    ) -> tuple[Event, bool]:
        """Submit `call` with its fault, if it has one. Returns its event, and whether to poison its output."""
        number = len(self.calls)
        self.calls.append(f"{queue}: {label}")
        if queue in self.slow:
            wait = [*wait, _Delay(self.slow[queue])]
        if self.how == "lost" and self.fail_at is not None and number >= self.fail_at and queue != "host":
            return _Failed(wait, DeviceLost(f"The device is lost, by an injected fault at call {self.fail_at}.")), False
        if number == self.fail_at and self.how != "lost":
            fault = InjectedFault(f"Call {number}, {label} on {queue}, failed by an injected fault.")
            if self.how == "submit":
                raise fault
            return _Failed([call(wait)] if self.how == "after" else wait, fault), False
        return call(wait), number == self.poison_at


class WrappedDevice(Device):
    """A device that passes all calls on to another device, and wraps its queues by `wrapped`."""

    def __init__(self, device: Device) -> None:
        self.info = device.info
        self._device = device
        self._queues: dict[str, Queue] = {}

    @abc.abstractmethod
    def wrapped(self, queue: Queue) -> Queue:
        """The queue that replaces a queue of the wrapped device."""

    def alloc(self, size: int, what: str = "buffer") -> Buffer:
        return self._device.alloc(size, what)

    def queue(self, name: str) -> Queue:
        if name not in self._queues:
            self._queues[name] = self.wrapped(self._device.queue(name))
        return self._queues[name]

    def compile(self, program: Program) -> Kernel:
        return self._device.compile(program)

    def host(self, capacity: int | None = None, pinned: int | None = None) -> Host:
        return self._device.host(capacity, pinned)

    def memory(self) -> MemoryUse:
        return self._device.memory()

    def reset_peak(self) -> None:
        self._device.reset_peak()

    def adopt(self, tensor: torch.Tensor) -> View:
        return self._device.adopt(tensor)

    def host_tensor(self, view: View) -> torch.Tensor:
        return self._device.host_tensor(view)

    def close(self) -> None:
        self._device.close()


class FaultyDevice(WrappedDevice):
    """A device with faults."""

    def __init__(self, device: Device, faults: Faults) -> None:
        super().__init__(device)
        self.faults = faults

    def wrapped(self, queue: Queue) -> Queue:
        return FaultyQueue(queue, self.faults)

    def alloc(self, size: int, what: str = "buffer") -> Buffer:
        capacity, in_use = self.faults.capacity, self.memory().in_use
        if capacity is not None and in_use + size > capacity:
            raise OutOfMemory(what, size, in_use, capacity)
        return super().alloc(size, what)

    def host(self, capacity: int | None = None, pinned: int | None = None) -> Host:
        return FaultyHost(super().host(capacity, pinned), self.faults)


class WrappedQueue(Queue):
    """A queue that passes its calls on to another queue, by `submitted`."""

    def __init__(self, queue: Queue) -> None:
        self.name = queue.name
        self._queue = queue

    @abc.abstractmethod
    def submitted(
        self, label: str, outputs: Sequence[View], wait: Sequence[Event], call: Callable[[Sequence[Event]], Event]
    ) -> Event:
        """Pass on a `call`, which takes the events to wait for. `outputs` is the first view that it writes, if any."""

    def write(self, target: View, source: torch.Tensor, wait: Sequence[Event] = ()) -> Event:
        return self.submitted("write", [target], wait, lambda waits: self._queue.write(target, source, waits))

    def read(self, target: torch.Tensor, source: View, wait: Sequence[Event] = ()) -> Event:
        return self.submitted("read", [], wait, lambda waits: self._queue.read(target, source, waits))

    def copy(self, target: View, source: View, wait: Sequence[Event] = ()) -> Event:
        return self.submitted("copy", [target], wait, lambda waits: self._queue.copy(target, source, waits))

    def fill(self, target: View, value: float, wait: Sequence[Event] = ()) -> Event:
        return self.submitted("fill", [target], wait, lambda waits: self._queue.fill(target, value, waits))

    def run(self, call: KernelCall, wait: Sequence[Event] = ()) -> Event:
        name = call.kernel.program.name
        return self.submitted(name, call.outputs[:1], wait, lambda waits: self._queue.run(call, waits))


class FaultyQueue(WrappedQueue):
    """A queue with faults."""

    def __init__(self, queue: Queue, faults: Faults) -> None:
        super().__init__(queue)
        self._faults = faults

    def submitted(
        self, label: str, outputs: Sequence[View], wait: Sequence[Event], call: Callable[[Sequence[Event]], Event]
    ) -> Event:
        event, poisoned = self._faults.submit(self.name, label, wait, call)
        for view in outputs if poisoned else ():
            event = self._queue.fill(view, self._faults.poison, [event])
        return event


class FaultyHost(Host):
    """A host with faults in its tasks. Memory and ledger are the wrapped host's."""

    def __init__(self, host: Host, faults: Faults) -> None:
        self.ledger = host.ledger
        self._host = host
        self._faults = faults

    def alloc(self, count: int, dtype: torch.dtype, state: str, crosses: bool = False) -> torch.Tensor:
        return self._host.alloc(count, dtype, state, crosses)

    def require(self, size: int, what: str) -> None:
        self._host.require(size, what)

    def free(self, tensor: torch.Tensor, state: str) -> None:
        self._host.free(tensor, state)

    def run(
        self,
        task: Callable[[], None],
        wait: Sequence[Event] = (),
        label: str = "host task",
        work: HostWork | None = None,
    ) -> Event:
        return self._faults.submit("host", label, wait, lambda waits: self._host.run(task, waits, label, work))[0]

    def follow(self, other: Host) -> None:
        self._host.follow(other._host if isinstance(other, FaultyHost) else other)

    @property
    def worker(self) -> Worker:
        return self._host.worker

    def memory(self) -> MemoryUse:
        return self._host.memory()

    @property
    def page_locked(self) -> int:
        return self._host.page_locked

    def close(self) -> None:
        self._host.close()


class _Failed(Event):
    """The event of a failed call: ends when the events that it waits for have, with their first error or its own.

    On a lost device such events wait for each other along many paths, so each one waits only once.
    """

    def __init__(self, wait: Sequence[Event], error: HalError) -> None:
        self._wait: Sequence[Event] = list(wait)
        self._error: BaseException = error
        self._ended = False
        self._waited = False

    def done(self) -> bool:
        self._ended = self._ended or all(event.done() for event in self._wait)
        return self._ended

    def wait(self) -> None:
        if not self._waited:
            first: BaseException | None = None
            for event in self._wait:
                try:
                    event.wait()
                except Exception as failure:
                    first = first or failure
            self._error = first or self._error
            self._ended = self._waited = True
        raise self._error

    def span(self) -> tuple[float, float]:
        return 0.0, 0.0


class _Delay(Event):
    """An event that ends when it is first waited for, after a number of seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._over = False

    def done(self) -> bool:
        return self._over

    def wait(self) -> None:
        if not self._over:
            time.sleep(self._seconds)
            self._over = True

    def span(self) -> tuple[float, float]:
        return 0.0, 0.0


def faulty(open_device: Callable[..., Device], faults: Faults) -> Callable[..., Any]:
    """A function to replace `hal.registry.open` in a test: it opens devices with these faults.

    A device that was lost works again when it is opened anew.
    """

    def open_faulty(name: str, capacity: int | None = None) -> FaultyDevice:
        if faults.how == "lost":
            faults.fail_at = None
        return FaultyDevice(open_device(name, capacity), faults)

    return open_faulty
