"""Which stations serve a batch: kept by its shapes, the modes, and what the model decided by looking at it.

It makes no stations and runs nothing. Invariant: what is found is what recording anew would have given.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence

import torch

from relay.runtime.stages import CompiledModel

logger = logging.getLogger("relay")

MANY = 8
"""So many programs for one shape are worth a warning."""


class ProgramCache:
    """At most `limit` stations, the least recently used going first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[Hashable, list[CompiledModel]] = OrderedDict()
        self._warned = False

    def __len__(self) -> int:
        return sum(len(group) for group in self._kept.values())

    def __iter__(self) -> Iterator[CompiledModel]:
        return itertools.chain.from_iterable(self._kept.values())

    def find(self, key: Hashable, tensors: Sequence[torch.Tensor]) -> CompiledModel | None:
        """The stations for a batch's `tensors`, or None. `key` says all of them but what the numbers decide."""
        group = self._kept.get(key, [])
        for compiled in group:
            if all(decision.holds(tensors) for decision in compiled.partition.guards):
                self._kept.move_to_end(key)
                group.remove(compiled)
                group.append(compiled)
                return compiled
        return None

    def add(self, key: Hashable, compiled: CompiledModel) -> None:
        """Keep stations that were made anew."""
        group = self._kept.setdefault(key, [])
        group.append(compiled)
        self._kept.move_to_end(key)
        if len(group) == MANY and not self._warned:
            self._warned = True
            answers = [decision.answer for decision in compiled.partition.guards]
            logger.warning(
                "The model reads numbers off the batch and computes otherwise for each (lately %s): %d programs for "
                "one shape so far, each compiled anew. Keep such numbers as tensors where you can.", answers, MANY,
            )  # fmt: skip
        while len(self) > self._limit:
            oldest = next(iter(self._kept))
            self._kept[oldest].pop(0)
            if not self._kept[oldest]:
                del self._kept[oldest]

    def clear(self) -> None:
        """Let go of all."""
        self._kept.clear()
