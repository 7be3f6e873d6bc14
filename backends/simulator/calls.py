"""Calls submitted to simulated devices on one host, by their queues and by the host: each is timed, ordered and run.

The clock decides when a call starts and ends in virtual time (`backends.simulator.clock`), the order when its numbers
are computed (`backends.simulator.orders`). Memory and kernels are not here. Invariant: a call has a number, which grows
with each submission, and its end on the clock and its numbers depend on nothing but the calls submitted before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from backends.simulator.clock import COMPUTE, HOST, NOTHING, Clock, Cost, Owner, SimulatedEvent
from backends.simulator.foreign_events import Arrivals, await_foreign_events, stand_in
from backends.simulator.orders import make_order
from backends.simulator.retiming import Tape
from backends.simulator.sharing import SharedRates
from hal.errors import HalError
from hal.event import Event
from hal.spec import Machine
from hal.spec.timeline import LANES

POISON = 0xFF
"""Every byte of poisoned memory: NaN in all floating-point formats, -1 in the integers."""


@dataclass(frozen=True)
class Options:
    """How a machine is simulated.

    Args:
        numerics: whether numbers are computed. If not, no memory is taken on the device or the host.
        order: in which order calls compute their numbers: `eager`, `late` or `random` (`backends.simulator.orders`).
        seed: the seed of the order `random`.
        poison: whether memory is filled with NaN when it is allocated and when it is freed.
    """

    numerics: bool = True
    order: str = "eager"
    seed: int = 0
    poison: bool = False


class SimulatedCalls(Owner):
    """The calls of one or several devices on one host. `lock` is held while a call computes its numbers.

    Several `machines` are devices on the host of the first one; with `one_link` they are behind its link.
    """

    def __init__(self, names: Sequence[str], machines: Sequence[Machine], options: Options, one_link: bool) -> None:
        self.options = options
        self.lock = threading.RLock()
        self.clock = Clock(SharedRates(machines, one_link), machines[0].device.host_cores)
        self._names = list(names)
        self._closed: set[int] = set()
        self._order = make_order(options.order, options.seed)
        self._number = 0
        self.tape: Tape | None = None
        self._arrivals = Arrivals(self._order)
        self._foreign = False

    def submit(
        self,
        lane: int,
        label: str,
        cost: Cost,
        wait: Sequence[Event],
        call: Callable[[], Any] | None,
        after: SimulatedEvent | None,
    ) -> SimulatedEvent:
        """Submit a call.

        Args:
            lane: the lane of the clock that it takes.
            label: its name in timelines and errors.
            cost: what it takes of the clock's rates.
            wait: the events that it waits for, of this machine or of others.
            call: what computes its numbers; None where there are none.
            after: the call before it on its queue.

        Raises:
            HalError: the device is closed.
        """
        with self.lock:
            device = lane // len(LANES)
            if device in self._closed and (lane != HOST or len(self._closed) == len(self._names)):
                raise HalError(f"device {self._names[device]!r} is closed. Open it again.")
            self._arrivals.take_in()
            event = SimulatedEvent(self, self._numbered(), lane, label, cost)
            if after is not None and after.wait_list and after.wait_list == list(wait):
                # The call before it waits for the same events, so its end comes after all of theirs. The chunks of a
                # layer are many such calls, each with many waits.
                parents, pending = after.wait_list, [after]
                awaited = [*parents, after]
                enough = pending
            else:
                parents = [
                    other if isinstance(other, SimulatedEvent) and other.owner is self else self._stand_in(other)
                    for other in wait
                ]
                awaited = enough = parents if after is None else [*parents, after]
                pending = [other for other in awaited if not other.finished]
            event.parents = parents
            if after is not None:
                event.before, event.queue = after, after.queue
            if pending:
                event.wait_list = parents
            if self.tape is not None:
                self.tape.keep(event, enough)
            self.clock.submit(event, awaited, pending)
            # Without numbers a call has run at once, unless it waits for something that may still fail.
            unsure = self._foreign and any(not other.ran or other.error is not None for other in awaited)
            if self.options.numerics or unsure:
                event.call = call
                self._order.submitted(event)
            else:
                event.ran = True
                event.parents = ()
                event.before = None
            return event

    def poison(self, memory: torch.Tensor, users: Sequence[SimulatedEvent]) -> None:
        """Fill freed memory with POISON once the calls that use it have run."""
        if not self._closed:
            self.submit(COMPUTE, "poison of freed memory", NOTHING, users, lambda: memory.fill_(POISON), None)

    def demand(self, event: SimulatedEvent) -> None:
        if not event.ran:
            with self.lock:
                needed = event.needed()
            await_foreign_events(needed)
        with self.lock:
            self._arrivals.take_in()
            if not event.ran:
                self._order.demand(event)
            if not event.finished:
                if self.tape is not None:
                    self.tape.awaited(event)
                self.clock.run_until(event)

    def close(self, device: int) -> None:
        """Run all calls to their end, and take no more of that device. Closing twice is harmless."""
        self._arrivals.await_all()
        with self.lock:
            self._arrivals.take_in()
            self._order.finish()
            self.clock.run_out()
            self._closed.add(device)

    def _numbered(self) -> int:
        self._number += 1
        return self._number

    def _stand_in(self, event: Event) -> SimulatedEvent:
        """An event of this machine that ends when an event of another device or thread does."""
        self._foreign = True
        substitute = stand_in(event, self, self._numbered(), self.clock.now)
        self._arrivals.expect(substitute)
        return substitute
