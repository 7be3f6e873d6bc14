"""Which rank owns which part of each parameter's master weight and optimizer state.

Ownership follows from the names, shapes and order of the model's parameters and the number of ranks alone. An optimizer
that works element by element has flat shares: each rank owns one range of every parameter, empty where a parameter has
fewer blocks than there are ranks. Other optimizers (LAMB, Muon, Adafactor, those of torch.optim, narrow states) have
whole parameters, each with one owner. Invariant: every element has exactly one owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from relay.distributed.block_norms import block_of
from relay.eps.split_weights import SplitWeights
from relay.eps.store import LayerStore
from relay.optim import optimizers
from relay.optim.split_master import SplitMaster

BY_ELEMENT = (optimizers.AdamW, optimizers.Adam, optimizers.SGD, optimizers.Lion)
"""The optimizers that change each element by itself."""

Range = tuple[int, int]
"""From the first element to behind the last one, of a flattened parameter."""


def works_by_element(optimizer: Any, state_dtype: str) -> bool:
    """Whether an optimizer's update of an element depends on that element alone, so that parameters may be cut."""
    return type(optimizer) in BY_ELEMENT and state_dtype == "fp32"


class Ownership:
    """The ranges of each parameter that the ranks own.

    Args:
        sizes: the elements of each parameter, in the model's order.
        rank, count: this process, and how many there are.
        whole: whether each parameter has one owner.
    """

    def __init__(self, sizes: Mapping[str, int], rank: int, count: int, whole: bool) -> None:
        self.rank = rank
        self.count = count
        self.whole = whole
        self._ranges: dict[str, list[Range]] = {}
        turn = 0
        owned = [0] * count
        for name, size in sizes.items():
            if whole:
                owner = owned.index(min(owned))
                owned[owner] += size
                self._ranges[name] = [(0, size) if rank == owner else (0, 0) for rank in range(count)]
                continue
            block = block_of(size)
            each, extra = divmod(-(-size // block), count)
            start, ranges = 0, []
            for rank in range(count):
                stop = min(start + block * (each + ((rank - turn) % count < extra)), size)
                ranges.append((start, stop))
                start = stop
            turn = (turn + extra) % count
            self._ranges[name] = ranges

    def ranges(self, name: str) -> list[Range]:
        """The range of each rank, in rank order; empty ones have equal ends."""
        return self._ranges[name]

    def own(self, name: str) -> Range:
        """The range of this rank."""
        return self._ranges[name][self.rank]

    def owns(self, name: str) -> bool:
        """Whether this rank owns any element of a parameter."""
        start, stop = self.own(name)
        return stop > start

    def owned_names(self, names: Sequence[str]) -> list[str]:
        """Those of which this rank owns something."""
        return [name for name in names if self.owns(name)]


class OwnedWeights:
    """What an optimizer sees of a store: of each parameter the elements that this rank owns, flat.

    It is memory of the store itself. See `relay.eps.optimizer_state.MasterWeights`.
    """

    def __init__(self, store: LayerStore, ownership: Ownership) -> None:
        self._store = store
        self._ownership = ownership

    @property
    def split(self) -> SplitWeights:
        return self._store.split

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._cut(name, self._store[name])

    def master(self, name: str) -> torch.Tensor | SplitMaster:
        return self._store.split[name] if name in self._store.split else self[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._store.dtype(name)

    def read(self, name: str) -> torch.Tensor:
        master = self.master(name)
        return master.to_float() if isinstance(master, SplitMaster) else master

    def rounded(self, name: str) -> list[torch.Tensor]:
        return [self._cut(name, copy) for copy in self._store.rounded(name)]

    def updated_from(self, name: str, updated: torch.Tensor) -> None:
        master = self.master(name)
        if isinstance(master, SplitMaster):
            master.assign(updated)
        self.round(name)

    def round(self, name: str) -> None:
        for copy in self.rounded(name):
            copy.copy_(self.read(name))

    def _cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        start, stop = self._ownership.own(name)
        return tensor.view(-1)[start:stop]
