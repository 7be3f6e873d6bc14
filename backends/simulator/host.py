"""The described host beside a simulated device: the ledger is real, tasks take virtual time.

With numerics on, memory is there and tasks run; with numerics off memory is only counted. Invariant: the accounts are
the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from backends.simulator.calls import POISON, SimulatedCalls
from backends.simulator.clock import HOST, SimulatedEvent
from backends.simulator.cost import CostModel
from hal.event import Event
from hal.host import Host, HostWork
from hal.spec import Machine

PAGE = 4096
"""Bytes of a page of host memory."""


class SimulatedHost(Host):
    """The described host: tasks take the time that their work takes there. Without numerics memory is only counted."""

    def __init__(self, machine: Machine, calls: SimulatedCalls, costs: CostModel, capacity: int | None) -> None:
        memory = int(machine.host["memory"])
        super().__init__(memory if capacity is None else capacity)
        self._calls = calls
        self._costs = costs
        self._unified = machine.device.unified
        self._last: SimulatedEvent | None = None
        self._page_locked = 0
        self._locked_pages: Any = WeakIdKeyDictionary()

    def alloc(self, count: int, dtype: torch.dtype, state: str, crosses: bool = False) -> torch.Tensor:
        size = count * dtype.itemsize
        if self._calls.options.numerics:
            tensor = super().alloc(count, dtype, state, crosses)
            if self._calls.options.poison:
                tensor.view(torch.uint8).fill_(POISON)
        else:
            self._account.charge(size, f"{state} ({str(dtype).removeprefix('torch.')})")
            self.ledger.add(state, dtype, size)
            tensor = torch.empty(count, dtype=dtype, device="meta")
        if crosses and not self._unified:
            self._locked_pages[tensor] = self._pages(size)
            self._page_locked += self._pages(size)
        return tensor

    def run(
        self,
        task: Callable[[], None],
        wait: Sequence[Event] = (),
        label: str = "host task",
        work: HostWork | None = None,
    ) -> Event:
        call = task if self._calls.options.numerics else None
        cost = self._costs.host_task(work)
        with self._calls.lock:
            self._last = self._calls.submit(HOST, label, cost, wait, call, self._last)
            return self._last

    def free(self, tensor: torch.Tensor, state: str) -> None:
        super().free(tensor, state)
        self._page_locked -= self._locked_pages.pop(tensor, 0)

    @property
    def page_locked(self) -> int:
        return self._page_locked

    def follow(self, other: Host) -> None:
        assert isinstance(other, SimulatedHost)
        self._calls, self._costs, self._last = other._calls, other._costs, other._last

    def close(self) -> None:
        if self._last is not None:
            self._calls.demand(self._last)

    @staticmethod
    def _pages(size: int) -> int:
        """Page-locked memory is mapped piece by piece, in whole pages."""
        return -(-size // PAGE) * PAGE
