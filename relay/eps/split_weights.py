"""The split masters of a store: which parameters are split, their memory, and how they are traced and shown.

A parameter is split where the device takes it in bfloat16 alone: then what crosses the link is one half of its master
(`relay.optim.split_master`). One that the device takes in float32 too (a norm, an embedding) keeps a float32 master.
Allocating and moving are the store's. Invariant: a parameter that is split stays split for as long as the store lives,
and the tensor of the model is its bfloat16 half.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
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
    """The split masters by the model's names."""

    def __init__(self) -> None:
        self._masters: dict[str, SplitMaster] = {}
        self._flats: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._masters

    def __getitem__(self, name: str) -> SplitMaster:
        return self._masters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._masters)

    def __len__(self) -> int:
        return len(self._masters)

    def add(self, name: str, master: SplitMaster, flat: torch.Tensor) -> None:
        """Add a master whose remainder lies in `flat`."""
        self._masters[name] = master
        self._flats[name] = flat

    def regions(self) -> set[int]:
        """The addresses of the regions that hold remainders."""
        return {flat.data_ptr() for flat in self._flats.values()}

    def rename(self, names: Mapping[str, str | None]) -> None:
        """Rename masters, and drop those whose new name is None."""
        renamed = [(names.get(name, name), name) for name in self._masters]
        self._masters = {new: self._masters[name] for new, name in renamed if new is not None}
        self._flats = {new: self._flats[name] for new, name in renamed if new is not None}

    def clear(self) -> None:
        """Drop all masters."""
        self._masters.clear()
        self._flats.clear()


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
