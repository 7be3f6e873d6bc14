"""Queues and events: one in-order OpenCL queue and one thread each.

The thread submits and does not wait for completion. It is there because a call may wait for the host's tasks, which
OpenCL knows nothing of; for calls of this device's queues it only waits until they are submitted, and gives OpenCL
their events, except for those of kernels that check indices, which may fail after they have run. Errors of either
kind, at submission or in the run, are raised at the waiters as the first of them (contract 3), however the driver
reports a failed dependency.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from backends.opencl.errors import failed_status, translated
from backends.opencl.kernels import Fault, Memory, OpenClKernel
from hal.device import KernelCall, Queue, View, check_transfer
from hal.errors import IndexOutOfDomain
from hal.event import Event
from hal.worker import Worker, WorkerEvent, first_error

Submission = Callable[[list[Any]], tuple[Any, Any]]
"""Queues OpenCL commands after the given events; returns the first command's event and the last's."""


class OpenClEvent(Event):
    """A call on an OpenCL queue: first it is submitted, then it runs."""

    def __init__(self, queue: OpenClQueue, label: str, after: Sequence[Event], fault: Fault | None) -> None:
        self.queue = queue
        self.submitted: WorkerEvent
        self.fault = fault
        """The outcome of a run's checks, read after the run. Calls that wait for the run are submitted after that."""
        self._label = label
        self._after: tuple[Event, ...] = tuple(after)
        self._native: tuple[Any, Any] | None = None
        self._error: BaseException | None = None
        self._ended = False
        self._span = (0.0, 0.0)
        self._lock = threading.Lock()

    def begin(self, native: tuple[Any, Any]) -> None:
        """Called by the queue's thread when OpenCL has the call."""
        self._native = native
        # Events form chains: references to events that have ended are dropped.
        self._after = tuple(event for event in self._after if not event.done() or _failed(event))

    @property
    def native(self) -> Any:
        """The last command's event, once submitted."""
        return self._native[1] if self._native is not None else None

    def done(self) -> bool:
        if self._ended:
            return True
        if not self.submitted.done():
            return False
        if self._native is None or self._native[1].command_execution_status <= 0:
            self._end()
            return True
        return False

    def wait(self) -> None:
        if not self._ended:
            self.submitted.settle()
            self._end()
        if self._error is not None:
            raise self._error

    def span(self) -> tuple[float, float]:
        if not self._ended:
            self.done()
        return self._span

    def _end(self) -> None:
        """Wait for the command, and store its error or its times."""
        with self._lock:
            if self._ended:
                return
            error = self.submitted.error
            if self._native is not None:
                first, last = self._native
                try:
                    last.wait()
                    status = min(int(last.command_execution_status), int(first.command_execution_status))
                    if status < 0:
                        error = failed_status(status, self._label, self.queue.device_name)
                    else:
                        self._span = self.queue.clock.span(first, last)
                        error = self.fault.error() if self.fault is not None else None
                except Exception as failure:
                    error = translated(failure, self._label, self.queue.device_name)
                if error is not None and not isinstance(error, IndexOutOfDomain):
                    error = first_error(self._after) or error
            self._error = error
            self._after = ()
            self._native = None
            self._ended = True


def _failed(event: Event) -> bool:
    return first_error((event,)) is not None


class Clock:
    """OpenCL's profiling times as seconds of the host's clock."""

    def __init__(self) -> None:
        self._offset = 0.0

    def set_by(self, event: Any) -> None:
        """Take an event that has just ended for now."""
        self._offset = perf_counter() - event.profile.end * 1e-9

    def span(self, first: Any, last: Any) -> tuple[float, float]:
        """Start of the first and end of the last."""
        return first.profile.start * 1e-9 + self._offset, last.profile.end * 1e-9 + self._offset


class OpenClQueue(Queue):
    """An in-order OpenCL queue and its thread."""

    def __init__(
        self, name: str, native: Any, clock: Clock, device_name: str, context: Any, workspace: Callable[[int], Any]
    ) -> None:
        self.name = name
        self.native = native
        self.clock = clock
        self.device_name = device_name
        self.context = context
        self._workspace_of = workspace
        self._workspace: Any = None
        self._worker = Worker(name)

    def write(self, target: View, source: torch.Tensor, wait: Sequence[Event] = ()) -> Event:
        check_transfer("write", target, source)
        memory, start = target.native
        data = _bytes(source)

        def submission(after: list[Any]) -> tuple[Any, Any]:
            import pyopencl

            if not data.nbytes:
                return self._marker(after)
            event = pyopencl.enqueue_copy(
                self.native, memory, data, dst_offset=start, wait_for=after, is_blocking=False
            )
            return event, event

        return self._submit(submission, wait, "write")

    def read(self, target: torch.Tensor, source: View, wait: Sequence[Event] = ()) -> Event:
        check_transfer("read", target, source)
        memory, start = source.native
        data = _bytes(target)

        def submission(after: list[Any]) -> tuple[Any, Any]:
            import pyopencl

            if not data.nbytes:
                return self._marker(after)
            event = pyopencl.enqueue_copy(
                self.native, data, memory, src_offset=start, wait_for=after, is_blocking=False
            )
            return event, event

        return self._submit(submission, wait, "read")

    def copy(self, target: View, source: View, wait: Sequence[Event] = ()) -> Event:
        check_transfer("copy", target, source)
        (memory, start), (other, begin) = target.native, source.native

        def submission(after: list[Any]) -> tuple[Any, Any]:
            import pyopencl

            if not target.size or (memory is other and start == begin):
                return self._marker(after)
            event = pyopencl.enqueue_copy(
                self.native, memory, other, byte_count=target.size, src_offset=begin, dst_offset=start, wait_for=after
            )
            return event, event

        return self._submit(submission, wait, "copy")

    def fill(self, target: View, value: float, wait: Sequence[Event] = ()) -> Event:
        pattern = torch.tensor([value], dtype=target.dtype).view(torch.uint8).numpy().copy()
        memory, start = target.native

        def submission(after: list[Any]) -> tuple[Any, Any]:
            import pyopencl

            if not target.size:
                return self._marker(after)
            event = pyopencl.enqueue_fill_buffer(self.native, memory, pattern, start, target.size, wait_for=after)
            return event, event

        return self._submit(submission, wait, "fill")

    def run(self, call: KernelCall, wait: Sequence[Event] = ()) -> Event:
        kernel = call.kernel
        assert isinstance(kernel, OpenClKernel)
        workspace = self._workspace_for(kernel.workspace)
        given: list[Memory] = [view.native for view in call.inputs]
        results: list[Memory] = [view.native for view in call.outputs]

        fault = kernel.new_fault()

        def submission(after: list[Any]) -> tuple[Any, Any]:
            return kernel.enqueue(self.native, workspace, given, results, call.accumulate, call.key, after, fault)

        return self._submit(submission, wait, kernel.program.name, fault)

    def close(self) -> None:
        """Run what is queued, then end."""
        self._worker.close()
        self.native.finish()
        self._workspace = None

    def _workspace_for(self, size: int) -> Any:
        if size and (self._workspace is None or self._workspace.size < size):
            self._workspace = self._workspace_of(size)  # queued runs have a reference to the old workspace
        return self._workspace

    def _marker(self, after: list[Any]) -> tuple[Any, Any]:
        import pyopencl

        event = pyopencl.enqueue_marker(self.native, wait_for=after or None)
        return event, event

    def _submit(self, submission: Submission, wait: Sequence[Event], label: str, fault: Fault | None = None) -> Event:
        event = OpenClEvent(self, label, wait, fault)
        own = [other for other in wait if isinstance(other, OpenClEvent) and self._orders(other)]
        known = {id(other) for other in own}

        def call() -> None:
            after = [native for other in own if other.queue is not self and (native := other.native) is not None]
            try:
                begun = submission(after)
                self.native.flush()
            except Exception as failure:
                raise translated(failure, label, self.device_name) from failure
            event.begin(begun)

        waits: list[Event] = [other.submitted if id(other) in known else other for other in wait]  # type: ignore[attr-defined]
        event.submitted = self._worker.submit(call, waits, label)
        return event

    def _orders(self, event: OpenClEvent) -> bool:
        """Whether OpenCL orders a call after an event's. Elsewhere the thread waits for the event."""
        return event.queue.context is self.context and event.fault is None


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
