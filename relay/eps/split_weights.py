"""The split masters of a store: which parameters are split, their memory, and how they are traced and shown.

A parameter is split where the device takes it in bfloat16 alone: then what crosses the link is one half of its master
(`relay.optim.split_master`). One that the device takes in float32 too (a norm, an embedding) keeps a float32 master.
Allocating and moving are the store's. Invariant: a parameter that is split stays split for as long as the store lives,
and the tensor of the model is its bfloat16 half.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from relay.optim.split_master import SplitMaster, sizes

REMAINDERS = "weight remainders"


def to_be_split(
    tensors: Mapping[str, torch.Tensor],
    groups: Sequence[Sequence[tuple[str, torch.dtype]]],
    unfit: Collection[str],
) -> set[str]:
    """The float32 parameters that every segment takes in bfloat16, but for those in `unfit`."""
    taken: dict[str, set[torch.dtype]] = {}
    for name, dtype in (item for group in groups for item in group):
        taken.setdefault(name, set()).add(dtype)
    return {
        name
        for name, dtypes in taken.items()
        if dtypes == {torch.bfloat16}
        and name not in unfit
        and isinstance(tensors[name], nn.Parameter)
        and tensors[name].dtype is torch.float32
    }


def remainder_bytes(elements: Sequence[int]) -> int:
    """The bytes of the remainders of tensors of these sizes."""
    return sum(2 * count + sum(sizes(count)) for count in elements)


def in_halves(flat: torch.Tensor, highs: Sequence[torch.Tensor]) -> list[SplitMaster]:
    """The split masters with these bfloat16 halves and their remainders in `flat`, memory of `remainder_bytes`.

    All lower halves come first, then all flags, then all bitmaps: so memory that no tie touches is never used.
    """
    counts = [high.numel() for high in highs]
    of_flags, of_ties = zip(*map(sizes, counts), strict=True)
    lengths = [*(2 * count for count in counts), *of_flags, *of_ties]
    parts = torch.split(flat, lengths)
    masters = zip(highs, parts, parts[len(highs) :], parts[2 * len(highs) :], strict=False)
    return [SplitMaster(high, low.view(torch.int16), flags.zero_(), ties) for high, low, flags, ties in masters]


class SplitWeights:
    """The split masters by the model's names.

    `part` gives the elements of a parameter (from the first to behind the last one) whose remainders are here; None for
    all. Then the bfloat16 halves are whole, and a master is that of the part; a part that is the whole has its shape.

    Attributes:
        join: makes a whole float32 parameter of this shape of the parts of several processes; None where they cannot be
            had.
    """

    def __init__(self, part: Callable[[str], tuple[int, int]] | None = None) -> None:
        self._masters: dict[str, SplitMaster] = {}
        self._flats: dict[str, torch.Tensor] = {}
        self._homes: dict[str, torch.Tensor] = {}
        self._part = part
        self.join: Callable[[str, torch.Size], torch.Tensor] | None = None

    def _own(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of a parameter whose remainders are here."""
        start, stop = (0, tensor.numel()) if self._part is None else self._part(name)
        return tensor if stop - start == tensor.numel() else tensor.reshape(-1)[start:stop]

    def take(
        self, names: Sequence[str], homes: Sequence[torch.Tensor], allocate: Callable[[int], torch.Tensor]
    ) -> torch.Tensor:
        """Add masters whose bfloat16 halves are `homes`, and return the memory that their remainders are given."""
        highs = [self._own(name, home) for name, home in zip(names, homes, strict=True)]
        flat = allocate(remainder_bytes([high.numel() for high in highs]))
        for name, home, master in zip(names, homes, in_halves(flat, highs), strict=True):
            self._masters[name], self._flats[name], self._homes[name] = master, flat, home
        return flat

    def assign(self, name: str, values: torch.Tensor) -> None:
        """Set a parameter to these values, of which the remainders of the part are kept."""
        own = self._own(name, values)
        if own is not values:
            self._homes[name].copy_(values)
        if own.numel():
            self._masters[name].assign(own)

    def whole(self, name: str) -> torch.Tensor:
        """A parameter in float32. Where parts cannot be joined it is what its bfloat16 shows."""
        if self._part is None:
            return self._masters[name].to_float()
        home = self._homes[name]
        return home.float() if self.join is None else self.join(name, home.shape)

    def __contains__(self, name: str) -> bool:
        return name in self._masters

    def __getitem__(self, name: str) -> SplitMaster:
        return self._masters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._masters)

    def __len__(self) -> int:
        return len(self._masters)

    def regions(self) -> set[int]:
        """The addresses of the regions that hold remainders."""
        return {flat.data_ptr() for flat in self._flats.values()}

    def rename(self, names: Mapping[str, str | None]) -> None:
        """Rename masters, and drop those whose new name is None."""
        renamed = [(names.get(name, name), name) for name in self._masters]
        self._masters = {new: self._masters[name] for new, name in renamed if new is not None}
        self._flats = {new: self._flats[name] for new, name in renamed if new is not None}
        self._homes = {new: self._homes[name] for new, name in renamed if new is not None}

    def clear(self) -> None:
        """Drop all masters."""
        self._masters.clear()
        self._flats.clear()
        self._homes.clear()


@contextmanager
def shown_as_float32(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """While open, these parameters are float32 of zeros, as which a model with split masters is traced.

    The zeros are memory that the system gives out only when it is written, so they take none.
    """
    own = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = torch.from_numpy(np.zeros(tuple(tensor.shape), np.float32))
        yield
    finally:
        for tensor, data in zip(tensors, own, strict=True):
            tensor.data = data
