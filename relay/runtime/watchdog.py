"""The stall watchdog: it logs what a step waits for when the step takes longer than a given time.

It ends nothing, since a slow disk or a debugger is no reason to lose a run. Invariant: it changes nothing that the step
uses, and without a time there is no thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from types import TracebackType

from hal.event import Event
from relay.eps.step_record import SubmittedStep
from relay.runtime.lanes.lane import Lane
from relay.runtime.stash.memory import Stash

logger = logging.getLogger("relay")


class Watchdog:
    """A context: every `seconds` it logs the text of `describe` as an error. With None it does nothing."""

    def __init__(self, seconds: float | None, describe: Callable[[], str]) -> None:
        self._seconds = seconds
        self._describe = describe
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if self._seconds is not None:
            self._thread = threading.Thread(target=self._watch, name="relay-watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        start = monotonic()
        while not self._ended.wait(self._seconds):
            logger.error("A step has been waited for for %.0f s.\n%s", monotonic() - start, self._describe())


def waited_for(
    submitted: SubmittedStep, stash: Stash, pending: Sequence[Event], lanes: Sequence[Lane]
) -> str:
    """Text on what a step still waits for. `pending` are deferred updates of the step before."""
    kinds: dict[str, Sequence[Event]] = {
        "loads": submitted.loads,
        "kernels": submitted.compute,
        "drains of gradients": submitted.drains,
        "reads": submitted.reads,
        "stash transfers": stash.transfers,
        "arrivals on the host": submitted.arrivals,
        "updates": submitted.updates,
        "updates of the step before": pending,
    }
    lines = []
    for kind, events in kinds.items():
        if waiting := [number for number, event in enumerate(list(events)) if not event.done()]:
            lines.append(f"{kind}: {len(waiting)} of {len(events)} have not ended, number {waiting[0]} first")
    for lane in lanes:
        for slot in lane.slots.all if lane.slots is not None else ():
            content = slot.content.name if slot.content is not None else "nothing"
            lines.append(f"{slot.what}: {slot.state.value}, holds {content}")
        use = lane.device.memory()
        lines.append(f"device {lane.device.info.name}: {use.in_use:,} bytes in use of {use.capacity or 'no limit'}")
    return "\n".join(lines)
