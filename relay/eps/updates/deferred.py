"""Deferred updates that a device has a part in: submitted in order, each when its parameters are about to be read.

The kernels of an update would hold up the next forward if they were all submitted before it. So they wait here until a
layer is loaded. The first half of an update is submitted before the second half of the one before, so that the host,
the link and the device work at once. Nothing is computed here. Invariant: updates are submitted in the order in which
they were added, each once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from hal.slot.device_slot import GradientRegion


@dataclass(eq=False)
class DeferredUpdate:
    """The update of one segment: `begin` and `end` submit its halves, `finish_on_host` does what is left of it."""

    names: frozenset[str]
    region: GradientRegion
    begin: Callable[[], None]
    end: Callable[[], None]
    finish_on_host: Callable[[], None]
    begun: bool = False


class DeferredUpdates:
    """The deferred updates of the latest step, and those of the step before until it is known to be good."""

    def __init__(self) -> None:
        self._waiting: deque[DeferredUpdate] = deque()
        self._names: set[str] = set()
        self._latest: Sequence[DeferredUpdate] = ()
        self._before: Sequence[DeferredUpdate] = ()
        self._step: object = None

    def add(self, updates: Sequence[DeferredUpdate], step: object) -> None:
        """Take the updates of a step. Those of the step before are submitted first."""
        self.submit()
        self._before, self._latest, self._step = self._latest, updates, step
        self._waiting.extend(updates)
        self._names.update(name for update in updates for name in update.names)

    def submit(self, names: Collection[str] | None = None) -> None:
        """Submit the updates of these parameters, and those before them; of all parameters for None."""
        while self._waiting and (names is None or not self._names.isdisjoint(names)):
            self._advance()

    def _advance(self) -> None:
        first = self._waiting[0]
        self._begin(first)
        if len(self._waiting) > 1 and self._waiting[1].region is not first.region:
            self._begin(self._waiting[1])
        first.end()
        self._waiting.popleft()
        self._names -= first.names

    def finish_on_host(self) -> None:
        """Do what is left of all updates, without the device. A task of the host calls it, after its earlier tasks."""
        updates, self._latest = self._latest, ()
        for update in updates:
            update.finish_on_host()

    def fail(self, step: object) -> None:
        """Forget the updates of a step that failed. Those of the step before are the latest again."""
        if self._step is step:
            self.drop()
            self._latest, self._before, self._step = self._before, (), None

    def drop(self) -> None:
        """Forget the updates that are not submitted."""
        self._waiting.clear()
        self._names.clear()

    def clear(self) -> None:
        """Forget all updates: they have ended."""
        self.drop()
        self._latest, self._before, self._step = (), (), None

    @staticmethod
    def _begin(update: DeferredUpdate) -> None:
        if not update.begun:
            update.begun = True
            update.begin()
