"""Queues that are streams of an accelerator, each with a thread that submits to it, and the events of both.

The thread lets a call wait for the host (an update that must end before a layer is sent) while the caller goes on.
Calls that wait for other streams of the same device are ordered on the device, by marks, and the thread does not wait.
A queue has a reference to everything that a call uses until the mark after the call is reached: host memory that a
transfer reads, and device memory, so that a freed buffer outlives its work.

Streams and marks are the runtime's (`Streams`); PyTorch's accelerators and CuPy share all else. Invariant: a call is
submitted to the device before any call that waits for it.
"""

from __future__ import annotations

import abc
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hal.device import Queue
from hal.errors import DeviceLost, OutOfMemory
from hal.event import Event
from hal.memory import MemoryUse
from hal.worker import Worker, WorkerEvent


class Streams(abc.ABC):
    """The runtime of an accelerator, as queues use it: streams, and marks recorded on them. Times are in seconds."""

    @abc.abstractmethod
    def memory_size(self) -> int:
        """Bytes of device memory."""

    @abc.abstractmethod
    def new_stream(self) -> Any:
        """A stream that lives as long as its queue, and waits for no other."""

    @abc.abstractmethod
    def record(self, stream: Any) -> Any:
        """Record a mark on the stream, after all work submitted to it so far."""

    @abc.abstractmethod
    def order(self, stream: Any, mark: Any) -> None:
        """Make all work submitted to the stream from now on wait for the mark."""

    @abc.abstractmethod
    def reached(self, mark: Any) -> bool:
        """Whether the device has reached the mark. Raises RuntimeError if the device failed."""

    @abc.abstractmethod
    def wait(self, mark: Any) -> None:
        """Block until the device has reached the mark. Raises RuntimeError if the device failed."""

    @abc.abstractmethod
    def seconds(self, mark: Any) -> float:
        """Seconds from the opening of the device to the mark."""

    @abc.abstractmethod
    def between(self, start: Any, end: Any) -> float:
        """Seconds from the mark `start` to the later mark `end`, with the resolution of the device's clock."""

    @abc.abstractmethod
    def lost(self, failure: BaseException) -> bool:
        """Whether the device is unusable after this error of its runtime."""

    @abc.abstractmethod
    def out_of_memory(self, failure: BaseException) -> bool:
        """Whether this error is the runtime's refusal to allocate memory."""


class StreamEvent(Event):
    """The completion of a call on a stream: first handed to the device, then done there."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._submitted: WorkerEvent | None = None
        self._marks: tuple[Any, Any] | None = None

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
        if self._marks is None:
            return True
        try:
            return self.streams.reached(self._marks[1])
        except RuntimeError:  # a device that failed reaches no mark; `wait` raises the error
            return True

    def wait(self) -> None:
        error, mark = self.on_device()
        if error is not None:
            raise error
        try:
            self.streams.wait(mark)
        except RuntimeError as failure:
            raise lost(failure) from failure

    def span(self) -> tuple[float, float]:
        if self._marks is None:
            return 0.0, 0.0
        start, end = self._marks
        began = self.streams.seconds(start)
        return began, began + self.streams.between(start, end)


class StreamQueue(Queue):
    """A stream and the thread that submits to it. A backend adds the five calls of `hal.device.Queue`.

    Args:
        name: the name of the queue.
        owner: the device string, for the name of the thread.
        streams: the runtime.
        memory: gives the memory use of the device, for errors.
        on_start: called first on the thread.
    """

    def __init__(
        self,
        name: str,
        owner: str,
        streams: Streams,
        memory: Callable[[], MemoryUse],
        on_start: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.stream = streams.new_stream()
        self.worker = Worker(f"{owner} {name}", on_start)
        self._streams = streams
        self._memory = memory
        self._given: deque[tuple[Any, Any]] = deque()  # (the mark after a call, what the call uses)
        self._letting_go = threading.Lock()

    def submit(self, call: Callable[[], Any], wait: Sequence[Event], label: str, uses: Any) -> Event:
        """Submit `call` to the stream after the events of `wait`.

        Args:
            call: a function that gives the stream its work. It is called on the queue's thread.
            wait: events of any device or host.
            label: the name of the call, for errors.
            uses: objects whose memory the call uses; they are referenced until the call has ended on the device.
        """
        event = StreamEvent(self._streams)
        wait = tuple(wait)

        def hand_over() -> None:
            try:
                self._give(event, call, wait, label, uses)
            except RuntimeError as failure:
                if not self._streams.lost(failure):
                    raise
                raise lost(failure) from failure

        event.bind(self.worker.submit(hand_over, (), label))
        return event

    def _give(self, event: StreamEvent, call: Callable[[], Any], wait: Sequence[Event], label: str, uses: Any) -> None:
        streams = self._streams
        self._let_go()
        for other in wait:  # one after another, so that the first error is the first of the list
            if isinstance(other, StreamEvent) and other.streams is streams:
                error, mark = other.on_device()
                if error is not None:
                    raise error
                streams.order(self.stream, mark)
            else:
                other.wait()
        start = streams.record(self.stream)
        try:
            call()
        except Exception as failure:
            if not streams.out_of_memory(failure):
                raise
            use = self._memory()
            capacity = use.capacity or streams.memory_size()
            raise OutOfMemory(label, 0, use.in_use, capacity, str(failure).splitlines()[0]) from failure
        finally:
            # Even a call that failed half-way may have given the device something.
            end = streams.record(self.stream)
            self._given.append((end, uses))
        event.recorded(start, end)

    def _let_go(self) -> None:
        """Drop the references to memory that the device no longer uses."""
        with self._letting_go:
            while self._given and self._streams.reached(self._given[0][0]):
                self._given.popleft()

    def settle(self) -> None:
        """Block until the device has ended all work submitted so far, and drop the references to its memory."""
        with self._letting_go:
            last = self._given[-1][0] if self._given else None
        if last is None:
            return
        try:
            self._streams.wait(last)
            self._let_go()
        except RuntimeError:  # a failed device uses no memory; the error is raised where the call is waited for
            with self._letting_go:
                self._given.clear()


def end(queues: Sequence[StreamQueue]) -> None:
    """Run all queued calls to their end on the device, and end the threads of the queues."""
    for queue in queues:
        queue.worker.close()
    for queue in queues:
        queue.settle()


def allocate(get: Callable[[], Any], streams: Streams, queues: Callable[[], Sequence[StreamQueue]]) -> Any:
    """Allocate device memory by `get`. If it is refused, try again after the queues have dropped freed memory."""
    try:
        return get()
    except Exception as failure:
        if not streams.out_of_memory(failure):
            raise
    for queue in queues():
        queue.settle()
    return get()


def lost(failure: BaseException) -> DeviceLost:
    """The error of a device that is unusable."""
    return DeviceLost(
        f"The device failed: {failure}. The memory of the host is intact. Open the device again, in a new process if "
        "it still fails."
    )
