"""Where a run is in its data: batches from any iterable, with a position that can be saved.

It loads nothing itself and has no workers: a `torch.utils.data.DataLoader`, torchdata's `StatefulDataLoader` or a
list is what it hands batches on from. Invariant: after `load_state_dict` the next batch is the one that would have
come next, provided that an epoch's order is a function of its number (a fixed seed, `set_epoch`, or a function of
the epoch given as the source).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from relay.errors import RelayError

_LARGEST = 2**62


class PositionError(RelayError, ValueError):
    """A saved position that does not fit the data: malformed, or beyond its end.

    What to do: give the same data and batch size as when it was saved.
    """


class ResumableBatches:
    """The batches of a source, epoch after epoch, and how many of them have been taken.

    `source` is an iterable, or a function of the epoch (0, 1, ...) that gives one. A source (or its `sampler`) with
    `set_epoch` is told the epoch before each. A source with `state_dict` and `load_state_dict` keeps its own
    position; of any other, the batches that were taken are skipped. `epochs` is how many there are (None: no end).
    """

    def __init__(self, source: Iterable[Any] | Callable[[int], Iterable[Any]], epochs: int | None = None) -> None:
        self._source = source
        self._epochs = epochs
        self.epoch = 0
        self.taken = 0
        """Batches taken in this epoch."""
        self._inner: Any = None
        self._iterable: Any = None

    def __iter__(self) -> Iterator[Any]:
        while self._epochs is None or self.epoch < self._epochs:
            found = self.taken > 0
            for batch in self._rest_of_epoch():
                found = True
                self.taken += 1
                yield batch
            if not found:
                raise PositionError(f"The data of epoch {self.epoch} is empty: there is nothing to train on.")
            self.epoch, self.taken = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The position: after the last batch that was handed out. Plain data if the source's own state is."""
        state: dict[str, Any] = {"epoch": self.epoch, "taken": self.taken, "source": None}
        if self._stateful(self._iterable):
            state["source"] = self._iterable.state_dict()
        elif self._inner is not None:
            state["source"] = self._inner
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position. It counts from the next iteration; one that is under way does not change."""
        if not isinstance(state, Mapping) or set(state) != {"epoch", "taken", "source"}:
            raise PositionError(f"A position has epoch, taken and source; received {state!r:.200}.")
        for key in ("epoch", "taken"):
            if type(state[key]) is not int or not 0 <= state[key] <= _LARGEST:
                raise PositionError(
                    f"The position's {key} should be a whole number from 0; received {state[key]!r:.40}."
                )
        self.epoch, self.taken = state["epoch"], state["taken"]
        self._inner = state["source"]
        self._iterable = None

    def _rest_of_epoch(self) -> Iterator[Any]:
        iterable = self._of_epoch()
        inner, self._inner = self._inner, None
        self._iterable = iterable
        if inner is not None:
            if not self._stateful(iterable):
                raise PositionError(
                    f"The position was saved by a source that keeps its own; {type(iterable).__name__} has no "
                    "load_state_dict. Give the same kind of source."
                )
            iterable.load_state_dict(inner)
            return iter(iterable)
        rest = iter(iterable)
        if self.taken:
            skipped = sum(1 for _ in islice(rest, self.taken))
            if skipped < self.taken:
                raise PositionError(
                    f"The position is after batch {self.taken} of epoch {self.epoch}, and the data has only {skipped} "
                    "batches. Give the same data and batch size as when it was saved."
                )
        return rest

    def _of_epoch(self) -> Any:
        if callable(self._source):
            return self._source(self.epoch)
        for one in (self._source, getattr(self._source, "sampler", None)):
            if callable(getattr(one, "set_epoch", None)):
                one.set_epoch(self.epoch)
        return self._source

    @staticmethod
    def _stateful(source: Any) -> bool:
        return all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))


class ShuffleSampler(torch.utils.data.Sampler[int]):
    """Every number below `size` once, in an order that depends on (seed, epoch) alone. `DataLoader(sampler=...)`."""

    def __init__(self, size: int, seed: int = 0) -> None:
        if size < 1 or not 0 <= seed < 2**63:
            raise ValueError(f"size must be at least 1 and seed from 0 to 2**63 - 1; received {size} and {seed}")
        self._size = size
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next iteration is of."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        # Two words mixed into one seed: neighbouring seeds and epochs must not share their order.
        generator = torch.Generator().manual_seed(
            (self._seed * 0x9E3779B97F4A7C15 + self._epoch * 0xD1342543DE82EF95) % 2**63
        )
        yield from torch.randperm(self._size, generator=generator).tolist()
