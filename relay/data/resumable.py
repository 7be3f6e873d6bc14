"""Batches from any iterable, with a position that can be saved and restored.

No data is loaded here and there are no workers: the batches come from a `torch.utils.data.DataLoader`, a torchdata
`StatefulDataLoader`, a list or any other iterable. Invariant: after `load_state_dict` the next batch is the one that
would have come next, provided that the order within an epoch depends on its number alone (a fixed seed, `set_epoch`,
or a function of the epoch as the source).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from hal import schema
from relay.errors import RelayError


class PositionError(RelayError, ValueError):
    """A saved position that does not fit the data: it is malformed, or beyond the end of the data.

    What to do: use the same data and batch size as when the position was saved.
    """


class _Position(msgspec.Struct, forbid_unknown_fields=True):
    """What `ResumableBatches.state_dict` returns."""

    epoch: Annotated[int, Meta(ge=0, le=2**62)]
    taken: Annotated[int, Meta(ge=0, le=2**62)]
    source: Any


class ResumableBatches:
    """The batches of a source, epoch after epoch, with the position of the next one.

    `source` is an iterable, or a function that returns one for an epoch (0, 1, ...). If the source or its `sampler` has
    `set_epoch`, that is called before each epoch. A source with `state_dict` and `load_state_dict` restores its own
    position; for any other source the batches taken before are skipped. `epochs` is the number of epochs; None means no
    end.

    Example::

        batches = relay.ResumableBatches(DataLoader(data, batch_size=32), epochs=3)
        for batch in batches:
            trainer.step(batch)
        position = batches.state_dict()
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
                raise PositionError(
                    f"The source gave no batches for epoch {self.epoch}. It must give at least one in every epoch."
                )
            self.epoch, self.taken = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was returned. Plain data if the state of the source is."""
        state: dict[str, Any] = {"epoch": self.epoch, "taken": self.taken, "source": None}
        if self._stateful(self._iterable):
            state["source"] = self._iterable.state_dict()
        elif self._inner is not None:
            state["source"] = self._inner
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position, beginning with the next iteration; one that is running does not change.

        Raises PositionError for a malformed position; one that does not fit the data is found when iteration begins.
        """

        def refuse(field: str, message: str) -> PositionError:
            return PositionError(f"The saved position is malformed: {schema.located(field, message)}.")

        position = schema.read(state, _Position, refuse)
        self.epoch, self.taken, self._inner = position.epoch, position.taken, position.source
        self._iterable = None

    def _rest_of_epoch(self) -> Iterator[Any]:
        iterable = self._of_epoch()
        inner, self._inner = self._inner, None
        self._iterable = iterable
        if inner is not None:
            if not self._stateful(iterable):
                raise PositionError(
                    f"The position was saved by a source with state_dict; {type(iterable).__name__} has no "
                    "load_state_dict. Use the same kind of source."
                )
            iterable.load_state_dict(inner)
            restored: Iterator[Any] = iter(iterable)
            return restored
        rest: Iterator[Any] = iter(iterable)
        if self.taken:
            skipped = sum(1 for _ in islice(rest, self.taken))
            if skipped < self.taken:
                raise PositionError(
                    f"The position is after batch {self.taken} of epoch {self.epoch}, and the data has only {skipped} "
                    "batches. Use the same data and batch size as when it was saved."
                )
        return rest

    def _of_epoch(self) -> Any:
        if callable(self._source):
            return self._source(self.epoch)
        owners: tuple[Any, ...] = (self._source, getattr(self._source, "sampler", None))
        for owner in owners:
            if callable(getattr(owner, "set_epoch", None)):
                owner.set_epoch(self.epoch)
        return self._source

    @staticmethod
    def _stateful(source: Any) -> bool:
        return all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))


class ShuffleSampler(torch.utils.data.Sampler[int]):
    """A sampler for `DataLoader(sampler=...)`: each index below `size` once, in an order set by seed and epoch.

    Of `count` processes that train together, the one with number `rank` gets every `count`-th index of that order. All
    get equally many: up to `count` - 1 at the end of an epoch are left out. Raises ValueError if `size` is below
    `count` or `seed` is not from 0 to 2**63 - 1.
    """

    def __init__(self, size: int, seed: int = 0, rank: int = 0, count: int = 1) -> None:
        if not 0 <= rank < count:
            raise ValueError(f"rank must be from 0 to count - 1; received rank={rank} and count={count}")
        if size < count or not 0 <= seed < 2**63:
            raise ValueError(f"size must be at least {count} and seed from 0 to 2**63 - 1; received {size} and {seed}")
        self._rank = rank
        self._count = count
        self._size = size
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._size // self._count

    def __iter__(self) -> Iterator[int]:
        # Both are multiplied by large odd numbers, so that neighbouring seeds and epochs have unrelated orders.
        generator = torch.Generator().manual_seed(
            (self._seed * 0x9E3779B97F4A7C15 + self._epoch * 0xD1342543DE82EF95) % 2**63
        )
        order = torch.randperm(self._size, generator=generator)
        yield from order[self._rank : self._size - self._size % self._count : self._count].tolist()
