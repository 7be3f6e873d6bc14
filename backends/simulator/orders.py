"""In which order submitted calls run their numbers: honestly, or as an adversary would.

All three orders keep the contracts (a call runs after the events it waits for and after the calls before it on its
queue) and nothing else, so whoever gets other results in one of them has forgotten a wait:

  eager    each call runs when it is submitted (one that waits for another device, when that is done)
  late     a call runs only when somebody waits for it, or for one that needs it. A missing wait before a read is
           wrong every time
  random   after each submission some of the calls that may run do, drawn by a seed. A missing wait before an
           overwrite shows in some seeds

Time has no part in this; the clock is another file.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod

import torch

from backends.simulator.clock import SimulatedEvent
from hal.errors import HalError


FALLS = 0.05
"""How often a queue falls to the end of the ranks after a call of its."""


class Order(ABC):
    """Decides when calls run."""

    @abstractmethod
    def submitted(self, event: SimulatedEvent) -> None:
        """A call has been submitted: its `parents` are all it must wait for. Never blocks."""

    @abstractmethod
    def demand(self, event: SimulatedEvent) -> None:
        """Somebody waits for a call: see that it has run."""

    @abstractmethod
    def finish(self) -> None:
        """Run everything that is left."""


class Late(Order):
    """Run when waited for, and then only what that needs, in the order of submission."""

    def __init__(self) -> None:
        self._waiting: dict[int, SimulatedEvent] = {}

    def submitted(self, event: SimulatedEvent) -> None:
        self._waiting[event.number] = event

    def demand(self, event: SimulatedEvent) -> None:
        for one in needed(event):
            if not one.ran:  # a call may wait for others itself
                run(one)
            self._waiting.pop(one.number, None)

    def finish(self) -> None:
        for event in list(self._waiting.values()):
            self.demand(event)


class Eager(Late):
    """Run at submission, but for what waits for an event from elsewhere that has not ended: that is run late."""

    def submitted(self, event: SimulatedEvent) -> None:
        if event.may_run() and all(parent.ran for parent in event.parents):
            run(event)
        else:
            super().submitted(event)


class Random(Order):
    """Run what may run, drawn by a seed: none, one or two calls after each submission.

    Even seeds draw evenly. Odd ones give each queue a rank, and a call runs only where no queue of a higher rank has
    one; now and then the queue that ran falls to the end. A queue so starves for long stretches, which even draws hardly
    ever do to it (probabilistic concurrency testing: Burckhardt et al., ASPLOS 2010).
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._may_run: list[SimulatedEvent] = []
        self._ranks: dict[int, float] | None = {} if seed % 2 else None

    def submitted(self, event: SimulatedEvent) -> None:
        waiting = {id(parent): parent for parent in event.parents if not parent.ran}
        event.unrun = len(waiting)
        for parent in waiting.values():
            parent.heirs.append(event)
        if not waiting:
            self._may_run.append(event)
        for _ in range(self._random.randrange(3)):
            self._run_one()

    def demand(self, event: SimulatedEvent) -> None:
        while not event.ran:
            if not self._run_one():
                # All that could run waits for events from elsewhere: wait for one that this call needs.
                self._run(next(one for one in needed(event) if one.unrun == 0))

    def finish(self) -> None:
        while self._may_run:
            self.demand(self._may_run[0])

    def _run_one(self) -> bool:
        """Run one of those that need not wait; False where there is none."""
        ready = [event for event in self._may_run if event.may_run()]
        if not ready:
            return False
        self._run(self._drawn(ready))
        return True

    def _drawn(self, ready: list[SimulatedEvent]) -> SimulatedEvent:
        if self._ranks is None:
            return ready[self._random.randrange(len(ready))]
        for event in ready:
            if event.queue not in self._ranks:
                self._ranks[event.queue] = self._random.random()
        chosen = max(ready, key=lambda event: self._ranks[event.queue])
        if self._random.random() < FALLS:
            self._ranks[chosen.queue] = min(self._ranks.values()) - 1.0
        return chosen

    def _run(self, event: SimulatedEvent) -> None:
        self._may_run.remove(event)
        run(event)
        for heir in event.heirs:
            heir.unrun -= 1
            if heir.unrun == 0:
                self._may_run.append(heir)
        event.heirs = []


def needed(event: SimulatedEvent) -> list[SimulatedEvent]:
    """What has to run for a call to have run, in the order of submission."""
    found: dict[int, SimulatedEvent] = {}
    stack = [event]
    while stack:
        one = stack.pop()
        if not one.ran and one.number not in found:
            found[one.number] = one
            stack.extend(one.parents)
    return [found[number] for number in sorted(found)]


def make_order(name: str, seed: int) -> Order:
    """The order of that name. ValueError for another."""
    if name == "eager":
        return Eager()
    if name == "late":
        return Late()
    if name == "random":
        return Random(seed)
    raise ValueError(f"order={name!r} is not one of eager, late, random")


def run(event: SimulatedEvent) -> None:
    """Run a call, unless one that it waits for has failed: then it fails with the first error (contract 3)."""
    error = next((one.error for one in event.awaited if one.error is not None), None)
    if error is None and event.call is not None:
        try:
            with torch.no_grad():
                event.call()
        except HalError as failure:
            error = failure
        except Exception as failure:
            error = HalError(f"{event.label} failed in the simulator: {type(failure).__name__}: {failure}")
            error.__cause__ = failure
        except BaseException as failure:  # it belongs to whoever waits
            error = failure
    event.error = error
    event.ran = True
    event.call = None
    event.awaited = event.parents = ()
