"""Host memory for the messages of one segment: gradients that go out and come in, and weights that are gathered.

There are two sets for gradients, used in turn, so that the gradients of a segment can arrive while those of the one
before are summed and applied; and one for weights. Everything is in the host's ledger. Invariant: a message lies at
the same place for the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hal.event import Event
from hal.host import Host
from relay.distributed.messages import Layout
from relay.eps.gradient_plan import GradientPlan

TRANSIT = "gradients and weights between ranks"


class ExchangeMemory:
    """Memory for messages between this rank and the others."""

    def __init__(self, host: Host, rank: int, count: int) -> None:
        self._host = host
        self._rank = rank
        self._count = count
        self._flats = [host.alloc(0, torch.uint8, TRANSIT) for _ in range(3)]
        self._turn = 0
        self._turns: dict[GradientPlan, int] = {}
        self._readers: list[list[Event]] = [[], []]
        self._waits: dict[GradientPlan, list[Event]] = {}

    def allocate(self, gradients: Sequence[Sequence[Layout]], weights: Sequence[Sequence[Layout]]) -> None:
        """Make room for the messages of every segment. Nothing may be running."""
        largest = max((self._sent(layouts) + self._received(layouts) for layouts in gradients), default=0)
        gathered = max((self._sent(layouts) for layouts in weights), default=0)
        for number, size in enumerate((largest, largest, gathered)):
            if self._flats[number].numel() < size:
                self._host.free(self._flats[number], TRANSIT)
                self._flats[number] = self._host.alloc(size, torch.uint8, TRANSIT)

    def _sent(self, layouts: Sequence[Layout]) -> int:
        return sum(layout.size for layout in layouts)

    def _received(self, layouts: Sequence[Layout]) -> int:
        return (self._count - 1) * layouts[self._rank].size

    def place(self, plan: GradientPlan) -> None:
        """Give a segment's gradients a place, from its next arrival on."""
        self._turn = 1 - self._turn
        self._turns[plan] = self._turn
        self._waits[plan], self._readers[self._turn] = self._readers[self._turn], []

    def read_by(self, plan: GradientPlan, reader: Event) -> None:
        """Note what reads the messages at a segment's place."""
        self._readers[self._turns[plan]].append(reader)

    def wait_for(self, plan: GradientPlan) -> None:
        """Wait until a segment's place may be written."""
        for event in self._waits.pop(plan, []):
            event.wait()

    def outgoing(self, plan: GradientPlan, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        """The message of gradients to each owner, this rank included."""
        return _cut(self._flats[self._turns[plan]], [layout.size for layout in layouts])

    def incoming(self, plan: GradientPlan, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        """The message of gradients from each rank; that of this rank is the outgoing one."""
        own = layouts[self._rank].size
        rest = self._flats[self._turns[plan]][self._sent(layouts) :]
        found = _cut(rest, [0 if rank == self._rank else own for rank in range(self._count)])
        found[self._rank] = self.outgoing(plan, layouts)[self._rank]
        return found

    def weights(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        """The message of weights from each owner."""
        return _cut(self._flats[2], [layout.size for layout in layouts])

    def settle(self) -> None:
        """Forget all events. Everything submitted must have ended."""
        self._readers = [[], []]
        self._waits.clear()
        self._turns.clear()


def _cut(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    found, start = [], 0
    for size in sizes:
        found.append(flat[start : start + size])
        start += size
    return found
