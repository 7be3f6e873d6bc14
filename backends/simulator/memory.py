"""The memory of a simulated device: buffers that are charged as its allocator would, and views of them.

Where no numbers are computed a buffer has no bytes. With poison on, memory is filled with NaN when it is allocated and
when it is freed, so that what reads it before a write, or after a free, computes NaN. It models no addresses.
Invariant: what is charged is the same with and without numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backends.simulator.calls import POISON, SimulatedCalls
from backends.simulator.clock import SimulatedEvent
from hal.device import Buffer, View
from hal.errors import HalError
from hal.memory import MemoryAccount


@dataclass(eq=False)
class SimulatedView(View):
    """A view and the buffer that it lies in; None for host memory that was adopted."""

    buffer: SimulatedBuffer | None = None


class SimulatedBuffer(Buffer):
    """Device memory. Its bytes are charged in the allocator's granularity, and exist only where numbers are computed.

    Args:
        account: the account of the device, which is charged.
        calls: the calls of the machine, for the poison that follows the last of them.
        granularity: bytes that the simulated allocator rounds sizes up to.
        size: bytes.
        what: what the memory is for, as errors name it.

    Raises:
        OutOfMemory: the capacity of the device is exceeded, or the host does not have the memory.
    """

    def __init__(self, account: MemoryAccount, calls: SimulatedCalls, granularity: int, size: int, what: str) -> None:
        if size < 0:
            raise ValueError(f"{what} cannot have {size} bytes")
        self._charged = -(-size // granularity) * granularity
        account.charge(self._charged, what)
        self.size = size
        self.users: list[SimulatedEvent] = []
        self._account = account
        self._calls = calls
        self._freed = False
        self._memory: torch.Tensor | None = None
        if calls.options.numerics:
            try:
                self._memory = torch.empty(size, dtype=torch.uint8)
            except RuntimeError as failure:
                raise account.refused(self._charged, what) from failure
            if calls.options.poison:
                self._memory.fill_(POISON)

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> View:
        if self._freed:
            raise HalError("This buffer was freed. Allocate a new one.")
        view = SimulatedView(None, tuple(shape), dtype, self)
        view.check_bounds(offset, self.size)
        if self._memory is not None:
            view.native = self._memory[offset : offset + view.size].view(dtype).view(view.shape)
        return view

    def free(self) -> None:
        if self._freed:
            return
        self._freed = True
        self._account.release(self._charged)
        memory, self._memory = self._memory, None
        if memory is not None and self._calls.options.poison:
            self._calls.poison(memory, [event for event in self.users if not event.ran])
        self.users = []
