"""In which order submitted calls run their numbers: honestly, or as an adversary would.

All three orders keep the contracts (a call runs after the events it waits for and after the calls before it on its
queue) and nothing else, so whoever gets other results in one of them has forgotten a wait:

  eager    each call runs when it is submitted
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


class Order(ABC):
    """Decides when calls run. `pending` counts those submitted and not run."""

    @abstractmethod
    def submitted(self, event: SimulatedEvent) -> None:
        """A call has been submitted: its `parents` are all it must wait for."""

    @abstractmethod
    def demand(self, event: SimulatedEvent) -> None:
        """Somebody waits for a call: see that it has run."""

    @abstractmethod
    def finish(self) -> None:
        """Run everything that is left."""


class Eager(Order):
    """Run at submission."""

    def submitted(self, event: SimulatedEvent) -> None:
        run(event)

    def demand(self, event: SimulatedEvent) -> None:
        """It has run."""

    def finish(self) -> None:
        """Everything has run."""


class Late(Order):
    """Run when waited for, and then only what that needs, in the order of submission."""

    def __init__(self) -> None:
        self._waiting: dict[int, SimulatedEvent] = {}

    def submitted(self, event: SimulatedEvent) -> None:
        self._waiting[event.number] = event

    def demand(self, event: SimulatedEvent) -> None:
        if event.ran:
            return
        needed: dict[int, SimulatedEvent] = {}
        stack = [event]
        while stack:
            one = stack.pop()
            if not one.ran and one.number not in needed:
                needed[one.number] = one
                stack.extend(one.parents)
        for number in sorted(needed):
            run(needed[number])
            self._waiting.pop(number, None)

    def finish(self) -> None:
        for event in list(self._waiting.values()):
            self.demand(event)


class Random(Order):
    """Run what may run, drawn by a seed: none, one or two calls after each submission."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._may_run: list[SimulatedEvent] = []

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
            self._run_one()

    def finish(self) -> None:
        while self._may_run:
            self._run_one()

    def _run_one(self) -> None:
        if not self._may_run:
            return
        event = self._may_run.pop(self._random.randrange(len(self._may_run)))
        run(event)
        for heir in event.heirs:
            heir.unrun -= 1
            if heir.unrun == 0:
                self._may_run.append(heir)
        event.heirs = []


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
        except BaseException as failure:  # it belongs to whoever waits
            error = failure
    event.error = error
    event.ran = True
    event.call = None
    event.parents = ()
