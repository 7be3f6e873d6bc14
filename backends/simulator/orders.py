"""The order in which submitted calls compute their numbers: at submission, or as late or as random as is allowed.

All three orders keep the contracts (a call runs after the events it waits for and after the calls before it on its
queue) and nothing else, so a schedule with other results in one of them lacks a wait. What a call waits for may
have been submitted elsewhere, to another device or to a thread of the host's:

  eager    each call runs when it is submitted, unless it waits for something elsewhere that has not ended
  late     a call runs only when it is waited for, or a call that needs it is. A missing wait before a read is
           wrong every time
  random   after each submission some of the calls that may run do, drawn by a seed. A missing wait before an
           overwrite shows in some seeds

Time is not modelled here but in `backends.simulator.clock`.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod

import torch

from backends.simulator.clock import SimulatedEvent
from hal.errors import HalError


class Order(ABC):
    """Decides when calls run. A call may run when all that it must wait for has: its `parents`, and `before`."""

    def __init__(self) -> None:
        self._may_run: dict[int, SimulatedEvent] = {}

    def submitted(self, event: SimulatedEvent) -> None:
        """A call has been submitted."""
        waiting = {other.number: other for other in event.awaited() if not other.ran}
        event.unrun = len(waiting)
        for other in waiting.values():
            other.dependents.append(event)
        if not waiting:
            self._may_run[event.number] = event
        self.advance()

    def arrived(self, event: SimulatedEvent) -> None:
        """An event of another device or thread, which calls here wait for, has ended."""
        self._run(event)
        self.advance()

    @abstractmethod
    def advance(self) -> None:
        """Run what runs without being waited for."""

    @abstractmethod
    def demand(self, event: SimulatedEvent) -> None:
        """Run a call that is waited for. All events of other devices that it needs have ended."""

    def finish(self) -> None:
        """Run everything that may run."""
        while self._may_run:
            self._run(next(iter(self._may_run.values())))

    def _run(self, event: SimulatedEvent) -> None:
        self._may_run.pop(event.number, None)
        run(event)
        dependents, event.dependents = event.dependents, []
        for dependent in dependents:
            dependent.unrun -= 1
            if dependent.unrun == 0:
                self._may_run[dependent.number] = dependent


class Eager(Order):
    """Run at submission, or as soon as what was submitted elsewhere has ended."""

    def advance(self) -> None:
        self.finish()

    def demand(self, event: SimulatedEvent) -> None:
        self.finish()


class Late(Order):
    """Run when waited for, and then only what that needs, in the order of submission."""

    def advance(self) -> None:
        """Nothing runs before it is waited for."""

    def demand(self, event: SimulatedEvent) -> None:
        needed = {other.number: other for other in event.needed()}
        for number in sorted(needed):
            self._run(needed[number])


FALLS = 0.05
"""The probability that a queue falls to the end of the ranks after one of its calls."""


class Random(Order):
    """Run what may run, drawn by a seed: none, one or two calls after each submission.

    Even seeds draw evenly. Odd ones give each queue a rank, and a call runs only where no queue of a higher rank has
    one; now and then the queue that ran falls to the end. So a queue starves for long stretches, which even draws
    hardly ever do to it (probabilistic concurrency testing: Burckhardt et al., ASPLOS 2010).
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._ranked = seed % 2 == 1
        self._ranks: dict[int, float] = {}

    def advance(self) -> None:
        for _ in range(self._random.randrange(3)):
            self._run_next()

    def demand(self, event: SimulatedEvent) -> None:
        while not event.ran:
            self._run_next()

    def _run_next(self) -> None:
        if self._may_run:
            calls = list(self._may_run.values())
            self._run(self._of_the_highest_rank(calls) if self._ranked else self._random.choice(calls))

    def _of_the_highest_rank(self, calls: list[SimulatedEvent]) -> SimulatedEvent:
        for event in calls:
            if event.queue not in self._ranks:
                self._ranks[event.queue] = self._random.random()
        chosen = max(calls, key=lambda event: self._ranks[event.queue])
        if self._random.random() < FALLS:
            self._ranks[chosen.queue] = min(self._ranks.values()) - 1.0
        return chosen


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
    error = next((parent.error for parent in event.parents if parent.error is not None), None)
    if error is None and event.call is not None:
        try:
            with torch.no_grad():
                event.call()
        except HalError as failure:
            error = failure
        except Exception as failure:
            error = HalError(f"{event.label} failed in the simulator: {type(failure).__name__}: {failure}")
            error.__cause__ = failure
        except BaseException as failure:  # raised where the call is waited for
            error = failure
    event.error = error
    event.ran = True
    event.call = None
    event.parents = ()
    event.before = None
