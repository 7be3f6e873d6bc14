"""A cache of compiled models, by the batch's shapes, the modules' modes, and guards on the batch's numbers.

It compiles and runs nothing. Invariant: the compiled model that `find` returns is the one that compiling again would
give.
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
"""From this many compiled models for one shape on, there is a warning."""


class ProgramCache:
    """At most `limit` compiled models; the least recently used is dropped first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._groups: OrderedDict[Hashable, list[CompiledModel]] = OrderedDict()
        self._warned = False

    def __len__(self) -> int:
        return sum(len(group) for group in self._groups.values())

    def __iter__(self) -> Iterator[CompiledModel]:
        return itertools.chain.from_iterable(self._groups.values())

    def find(
        self, key: Hashable, tensors: Sequence[torch.Tensor], whole: Sequence[torch.Tensor]
    ) -> CompiledModel | None:
        """The compiled model for the `tensors` of a micro-batch that is cut from `whole`, or None.

        `key` is all that decides it but their numbers.
        """
        group = self._groups.get(key, [])
        for compiled in group:
            partition = compiled.partition
            if all(guard.holds(tensors) for guard in partition.guards) and all(
                guard.holds(whole) for guard in partition.loss_plan.guards
            ):
                self._groups.move_to_end(key)
                group.remove(compiled)
                group.append(compiled)
                return compiled
        return None

    def add(self, key: Hashable, compiled: CompiledModel) -> None:
        """Store a compiled model. Drops the least recently used ones beyond the limit."""
        group = self._groups.setdefault(key, [])
        group.append(compiled)
        self._groups.move_to_end(key)
        if len(group) == MANY and not self._warned:
            self._warned = True
            answers = [guard.answer for guard in compiled.partition.guards]
            logger.warning(
                "The model reads numbers from the batch and computes differently for each (most recently %s): it has "
                "been compiled %d times for one shape. Keep such numbers as tensors where you can.", answers, MANY,
            )  # fmt: skip
        while len(self) > self._limit:
            oldest = next(iter(self._groups))
            self._groups[oldest].pop(0)
            if not self._groups[oldest]:
                del self._groups[oldest]

    def clear(self) -> None:
        """Drop all compiled models."""
        self._groups.clear()
