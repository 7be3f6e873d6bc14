"""The described host beside a simulated device: the ledger is real, tasks take virtual time.

With numerics on, memory is there and tasks run; with numerics off memory is only counted. Invariant: the accounts are
the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from backends.simulator.clock import HOST, SimulatedEvent
from hal.event import Event
from hal.host import Host, HostWork

if TYPE_CHECKING:
    from backends.simulator.device import SimulatedDevice

PAGE = 4096

POISON = 0xFF
"""Every byte of poisoned memory: NaN in all floating-point formats, -1 in the integers."""


class SimulatedHost(Host):
    """The described host: tasks take the time that their work takes there. Without numerics memory is only counted."""

    def __init__(self, device: SimulatedDevice, capacity: int | None) -> None:
        memory = int(device.machine.host["memory"])
        super().__init__(memory if capacity is None else capacity)
        self._device = device
        self._last: SimulatedEvent | None = None
        self._page_locked = 0
        self._locked_pages: Any = WeakIdKeyDictionary()

    def alloc(self, count: int, dtype: torch.dtype, state: str, crosses: bool = False) -> torch.Tensor:
        size = count * dtype.itemsize
        if self._device.options.numerics:
            tensor = super().alloc(count, dtype, state, crosses)
            if self._device.options.poison:
                tensor.view(torch.uint8).fill_(POISON)
        else:
            self._account.charge(size, f"{state} ({str(dtype).removeprefix('torch.')})")
            self.ledger.add(state, dtype, size)
            tensor = torch.empty(count, dtype=dtype, device="meta")
        if crosses and not self._device.info.unified:
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
        call = task if self._device.options.numerics else None
        cost = self._device.host_cost(work)
        with self._device.lock:
            self._last = self._device.submit(HOST, label, cost, wait, call, self._last)
            return self._last

    def free(self, tensor: torch.Tensor, state: str) -> None:
        super().free(tensor, state)
        self._page_locked -= self._locked_pages.pop(tensor, 0)

    @property
    def page_locked(self) -> int:
        return self._page_locked

    def follow(self, other: Host) -> None:
        assert isinstance(other, SimulatedHost)
        self._device, self._last = other._device, other._last

    def close(self) -> None:
        if self._last is not None:
            self._device.demand(self._last)

    @staticmethod
    def _pages(size: int) -> int:
        """Page-locked memory is mapped piece by piece, in whole pages."""
        return -(-size // PAGE) * PAGE
