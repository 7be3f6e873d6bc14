"""Queues that are streams of an accelerator, each with a thread that submits to it, and the events of both.

The thread is what lets a call wait for the host (an update that must end before a layer is sent) without the caller
waiting too; calls that wait for other streams of the same device are ordered there, by marks, and the thread goes on.
A queue holds on to everything that it gave the device until the mark after it is reached: host memory that a transfer
reads, and device memory, which lets a freed buffer outlive its work.

What a stream and a mark are is the runtime's (`Streams`): PyTorch's accelerators and CuPy share all else. Invariant: a
call is with the device before anything that waits for it is.
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
    """What queues need of a runtime. Marks are its own objects; times are seconds."""

    @abc.abstractmethod
    def memory_size(self) -> int:
        """Bytes of device memory."""

    @abc.abstractmethod
    def new_stream(self) -> Any:
        """A stream that lives as long as its queue, and waits for no other."""

    @abc.abstractmethod
    def record(self, stream: Any) -> Any:
        """A mark on the stream, after what it was given so far."""

    @abc.abstractmethod
    def order(self, stream: Any, mark: Any) -> None:
        """What the stream is given from now on waits for the mark."""

    @abc.abstractmethod
    def reached(self, mark: Any) -> bool:
        """Whether the device is past the mark. Raises RuntimeError where the device failed."""

    @abc.abstractmethod
    def wait(self, mark: Any) -> None:
        """Block until it is. Raises RuntimeError where the device failed."""

    @abc.abstractmethod
    def seconds(self, mark: Any) -> float:
        """When the device passed the mark, from when it was opened."""

    @abc.abstractmethod
    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to a later one, with the clock's own resolution."""

    @abc.abstractmethod
    def lost(self, failure: BaseException) -> bool:
        """Whether the device answers nothing any more after this error of its runtime."""

    @abc.abstractmethod
    def out_of_memory(self, failure: BaseException) -> bool:
        """Whether the runtime refused memory."""


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
        except RuntimeError:  # a device that failed reaches nothing any more; `wait` says so
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
    """A stream and the thread that submits to it. See `hal.device.Queue` for the contracts."""

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
        """Hand `call` to the stream, after the events of `wait`; it `uses` memory until it has ended there."""
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
        """Drop what the device no longer uses."""
        with self._letting_go:
            while self._given and self._streams.reached(self._given[0][0]):
                self._given.popleft()

    def settle(self) -> None:
        """Block until the device has ended what it was given so far, and let go of it."""
        with self._letting_go:
            last = self._given[-1][0] if self._given else None
        if last is None:
            return
        try:
            self._streams.wait(last)
            self._let_go()
        except RuntimeError:  # it uses nothing any more; whoever waited for the call that failed knows
            with self._letting_go:
                self._given.clear()


def end(queues: Sequence[StreamQueue]) -> None:
    """Run what is queued, on the device too, and end the threads: all of them first, as one may wait for another."""
    for queue in queues:
        queue.worker.close()
    for queue in queues:
        queue.settle()


def allocate(get: Callable[[], Any], streams: Streams, queues: Callable[[], Sequence[StreamQueue]]) -> Any:
    """Device memory by `get`; where it is refused, once more when the queues have let go of what was freed."""
    try:
        return get()
    except Exception as failure:
        if not streams.out_of_memory(failure):
            raise
    for queue in queues():
        queue.settle()
    return get()


def lost(failure: BaseException) -> DeviceLost:
    """The error of a device that answers nothing any more."""
    return DeviceLost(
        f"The device failed: {failure}. What lives on the host is intact; open the device again, in a new process if "
        "it still fails."
    )
