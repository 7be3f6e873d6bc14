"""The whole batch of a step, joined from the shares of all ranks, for losses that take a value of the whole batch.

Such values (the number of targets that count, the length of the batch in a number) do not add up over shares, so each
rank computes them from all samples. Every rank sends its samples to all others. Invariant: all ranks join the same
batch, samples in rank order, or all raise the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from relay.data.microbatches import Piece
from relay.distributed.ranks import Ranks
from relay.errors import BatchError
from relay.runtime.compiling.prepared_batch import PreparedBatch


def join_shares(ranks: Ranks, given: PreparedBatch | None, is_empty: bool) -> Piece | None:
    """The batch of which every rank has a share, called on all ranks. None where this rank prepares no batch.

    Args:
        ranks: the processes that train together.
        given: this rank's share. None for a rank that takes part without one.
        is_empty: whether the share has no samples, and `given` is a stand-in for it.

    Raises BatchError on all ranks if the shares make no batch.
    """
    own = None if given is None else given.whole
    cuts = [] if given is None or own is None else _cuts(given, own)
    sends = own is not None and not is_empty
    record = _describe(own, cuts) if own is not None and sends else None
    records = ranks.control.gather_now(record)
    problem = _difference(records, [ranks.name(rank) for rank in range(ranks.count)])
    if problem is not None:
        ranks.control.hear_out()
        raise BatchError(problem)
    cut = [tensor for tensor, is_cut in zip(own.tensors, cuts, strict=True) if is_cut] if own is not None else []
    mine = _as_bytes(cut) if sends else torch.empty(0, dtype=torch.uint8)
    received = [torch.empty(0 if one is None else _size(one), dtype=torch.uint8) for one in records]
    ranks.bulk.exchange_now([mine] * ranks.count, received)
    received[ranks.rank] = mine
    if own is None:
        return None
    parts = [_tensors(one, data) for one, data in zip(records, received, strict=True) if one is not None]
    columns = iter(zip(*parts, strict=True))
    tensors = [torch.cat(next(columns)) if is_cut else tensor for tensor, is_cut in zip(own.tensors, cuts, strict=True)]
    return replace(own, tensors=tensors, size=sum(one["size"] for one in records if one is not None), sources={})


def _cuts(given: PreparedBatch, own: Piece) -> list[bool]:
    """Which tensors of a batch have one entry along dimension 0 for each sample."""
    if len(given.pieces.pieces) == 1:
        return [bool(tensor.dim()) and len(tensor) == own.size for tensor in own.tensors]
    first = given.pieces.pieces[0]
    pairs = zip(first.tensors, own.tensors, strict=True)
    return [bool(tensor.dim()) and len(part) != len(tensor) for part, tensor in pairs]


def _describe(own: Piece, cuts: Sequence[bool]) -> dict[str, Any]:
    return {
        "size": own.size,
        "tensors": [
            [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for tensor, is_cut in zip(own.tensors, cuts, strict=True)
            if is_cut
        ],
    }


def _difference(records: Sequence[dict[str, Any] | None], names: Sequence[str]) -> str | None:
    """Why these shares make no batch, or None."""
    known = [(rank, one) for rank, one in enumerate(records) if one is not None]
    for rank, one in known[1:]:
        first_rank, first = known[0]
        kinds, others = ([[dtype, shape[1:]] for dtype, shape in each["tensors"]] for each in (first, one))
        if kinds != others:
            return (
                "The loss takes a value of the whole batch, such as the number of its targets, so the shares of all "
                f"ranks are joined, and they have other shapes: {_show(first)} on {names[first_rank]}, {_show(one)} "
                f"on {names[rank]}. Pad all shares to one length, or give loss_weight=, a function of a micro-batch."
            )
    return None


def _show(record: dict[str, Any]) -> str:
    return ", ".join(f"{dtype}{shape}" for dtype, shape in record["tensors"])


def _as_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    flat = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def _size(record: dict[str, Any]) -> int:
    return sum(_bytes_of(dtype, shape) for dtype, shape in record["tensors"])


def _bytes_of(dtype: str, shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel()) * getattr(torch, dtype).itemsize


def _tensors(record: dict[str, Any], data: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a share, from its bytes."""
    found, start = [], 0
    for dtype, shape in record["tensors"]:
        part = data[start : start + _bytes_of(dtype, shape)]
        start += len(part)
        found.append(part.clone().view(getattr(torch, dtype)).view(shape))  # a copy is aligned for its dtype
    return found
