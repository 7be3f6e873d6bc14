"""What guards a step: waiting for it, its errors, interrupts and stalls, and what is undone if it fails.

It allocates nothing and submits no work of its own (`relay.runtime.session` and `relay.runtime.schedule` do).
Invariant: after a pass has failed, either nothing of it was applied and the buffers are as before, or `broken` is set.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch

from hal.errors import DeviceLost, OutOfMemory
from hal.event import Event
from hal.host import Host
from relay.eps.server import ParameterServer
from relay.eps.step_record import SubmittedStep
from relay.eps.store import LayerStore
from relay.errors import RelayError
from relay.runtime.memory_plan import with_advice
from relay.runtime.schedule import PreparedStep
from relay.runtime.watchdog import Watchdog, waited_for

PATIENCE = 2
"""At this many Ctrl-C the step is no longer waited for, and the state cannot be trusted any more."""


class StepGuard:
    """Guards the passes of one trainer.

    Attributes:
        broken: the error that left some layers updated and others not; None while the state can be trusted.
        transfers: the stash's transfers of the latest pass.
        defer_updates: whether updates that wait for the gradient norm may still run when a pass has ended.
        stall_timeout: seconds after which a pass that has not ended is described in the log; None for never.
    """

    def __init__(self, host: Host, store: LayerStore, server: ParameterServer) -> None:
        self.broken: BaseException | None = None
        self._pending: list[Event] = []  # it grows while deferred updates are submitted
        self.transfers: list[Event] = []
        self.defer_updates = False
        self.stall_timeout: float | None = None
        self._host = host
        self._store = store
        self._server = server
        self._interrupts: list[DeferredInterrupt] = []

    @property
    def pending(self) -> list[Event]:
        """The deferred updates of the latest step, which may still run. Those not submitted yet are submitted now."""
        self._server.updater.submit_deferred()
        return self._pending

    @contextmanager
    def running(self, prepared: PreparedStep, first: Sequence[Event]) -> Iterator[SubmittedStep]:
        """A context in which a pass is submitted; on exit it waits for the pass and raises its first error.

        `first` are events that the caller submits before the pass. If the step fails or is skipped, the buffers that it
        changes are restored. If a failed step had begun to update parameters, or deferred updates of the step before
        have failed, `broken` is set. Ctrl-C is held back until `deliver_interrupts`.
        """
        submitted = SubmittedStep()
        error: BaseException | None = None
        stash, slots = prepared.stash, [lane.slots for lane in prepared.lanes if lane.slots is not None]
        for name, saved in prepared.saved_buffers.items():
            saved.copy_(self._store[name])
        # Updates and the user may have changed the weights since the last pass, so what slots hold may be old.
        self._store.version += 1
        with (
            DeferredInterrupt() as interrupt,
            Watchdog(self.stall_timeout, lambda: waited_for(submitted, stash, self._pending, prepared.lanes)),
        ):
            updater = self._server.updater
            try:
                try:
                    yield submitted
                    if not self._outlive:
                        updater.submit_deferred()
                except KeyboardInterrupt:
                    raise
                except BaseException as failure:
                    error = failure
                updates = updater.ended if self._outlive else submitted.updates
                error = error or wait_all([*first, *submitted.required(), *stash.transfers, *updates])
                if error is not None:
                    # If submitting failed, some of what was submitted may be noted nowhere.
                    self._drain_queues(prepared)
                error = self._server.end_step(error, submitted)
                if error is not None:
                    wait_all(submitted.updates)
            except KeyboardInterrupt as given_up:  # Ctrl-C twice: the pass is abandoned while it runs
                self.broken = given_up
                raise
        if interrupt.count:
            self._interrupts.append(interrupt)
        for each in slots:
            each.settle()
        self._server.settle()
        self.transfers = list(stash.transfers)
        stash.settle()
        if error is not None or submitted.result.skipped:
            for name, saved in prepared.saved_buffers.items():
                self._store[name].copy_(saved)
            self._store.changed(prepared.saved_buffers)
        if error is not None:
            for each in slots:
                each.forget()
            updater.fail(submitted)
            # Updates of the step before may still have been running, and may be what failed.
            earlier = self._end_pending(isinstance(error, DeviceLost))
            for each in slots:
                each.settle()
            if earlier is not None or submitted.result.updating:
                self.broken = earlier or error
        if error is not None or not self._outlive:
            # All updates have ended; one that failed must not fail the next step too.
            self._store.updated.clear()
        if error is not None:
            if isinstance(error, OutOfMemory):
                raise with_advice(error, prepared.advice) from error
            # A host task's error is wrapped by its queue. The relay's own errors say what to do and are unwrapped.
            raise error.__cause__ if isinstance(error.__cause__, RelayError) else error

    def note_updates(self, submitted: SubmittedStep) -> None:
        """After a training step: deferred updates become pending, and those of the step before have ended."""
        if self._outlive:
            submitted.ended_updates, self._pending = self._pending, submitted.updates
        else:
            submitted.ended_updates = submitted.updates

    @property
    def _outlive(self) -> bool:
        """Whether updates may still run when their step has returned."""
        return self.defer_updates and self._server.deferred

    def deliver_interrupts(self) -> None:
        """Deliver a Ctrl-C that came during the last pass. Call it when the caller's own state is complete."""
        interrupts, self._interrupts = self._interrupts, []
        for interrupt in interrupts:
            interrupt.deliver()

    def synchronize(self) -> None:
        """Wait for deferred updates that still run. Raises their first error."""
        error = self._end_pending()
        if error is not None:
            self.broken = error
            raise error

    def end_on_host(self) -> None:
        """Do without the device what is left of deferred updates. `broken` is set where one fails."""
        self.broken = self._end_pending(lost=True) or self.broken

    def reset(self) -> None:
        """Wait for deferred updates, ignore their errors, and trust the state again: it is about to be replaced."""
        self._end_pending()
        self._server.updater.forget_deferred()
        self._store.updated.clear()
        self.broken = None

    def _end_pending(self, lost: bool = False) -> BaseException | None:
        """Wait for the deferred updates of the latest step; their first error.

        If the device is `lost`, the host ends them.
        """
        try:
            pending = [self._server.updater.finish_on_host()] if lost else self.pending
        except Exception as failure:
            return failure
        finally:
            earlier, self._pending = self._pending, []
        if lost:
            wait_all(earlier)
        error = wait_all(pending)
        self._server.settle()
        return error

    def _drain_queues(self, prepared: PreparedStep) -> None:
        """Wait for everything that any queue was given; calls on a queue run in order."""
        for lane, memory in zip(prepared.lanes, prepared.scalars.memory, strict=True):
            byte = memory.view(0, (1,), torch.uint8)
            for queue in lane.queues():
                try:
                    queue.fill(byte, 0.0).wait()
                except Exception:
                    continue  # a device that is lost has nothing left to wait for
        wait_all([self._host.run(_nothing, (), "end of a failed step")])


def wait_all(events: Sequence[Event]) -> BaseException | None:
    """Wait for all events; the first error, or None."""
    error: BaseException | None = None
    for event in events:
        try:
            event.wait()
        except Exception as failure:
            error = error or failure
    return error


def _nothing() -> None:
    """A host task that ends when all tasks before it have ended."""


class DeferredInterrupt:
    """A context that defers Ctrl-C until the step has ended. `count` is how many came.

    A step that is interrupted while it is submitted would leave some layers updated and others not. Outside the main
    thread, or where SIGINT is ignored or handled outside Python, nothing is deferred. The previous handler is restored
    afterwards, and an interrupt is never lost.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: Any = None

    def __enter__(self) -> DeferredInterrupt:
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._before = handler
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count >= PATIENCE:
            self._before(number, frame)

    def deliver(self) -> None:
        """Call the previous handler for an interrupt that was deferred."""
        if self.count and self._before is not None:
            self.count = 0
            self._before(signal.SIGINT, None)
