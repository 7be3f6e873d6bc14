"""Batches in pieces, and their outputs together again: of pairs, as trl's collators make them, and of rows.

A batch of pairs has the better texts, then the worse ones, row by row. Its micro-batches have pairs, not rows.
Nothing is computed here. Invariant: the pieces of a batch hold every pair once, and joined outputs have its order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from relay.hf.loss_module import widened


def cut_pairs(batch: Mapping[str, Any], count: int) -> tuple[list[dict[str, Any]], list[float]]:
    """A batch in at most `count` pieces, and the share of the pairs that each has.

    Tensors with a row for each text are cut in both halves, tensors with a row for each pair once.
    """
    pairs = len(batch["input_ids"]) // 2
    size = -(-pairs // min(count, pairs))
    pieces, shares = [], []
    for start in range(0, pairs, size):
        end = min(start + size, pairs)
        pieces.append({name: _part(one, pairs, start, end) for name, one in batch.items()})
        shares.append((end - start) / pairs)
    return pieces, shares


def _part(value: Any, pairs: int, start: int, end: int) -> Any:
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    if len(value) == 2 * pairs:
        return torch.cat([value[start:end], value[pairs + start : pairs + end]])
    return value[start:end] if len(value) == pairs else value


def join_pairs(outputs: Sequence[Mapping[str, Any]], shares: Sequence[float]) -> dict[str, Any]:
    """The outputs of the pieces as those of the batch; of numbers, such as a loss, the mean over the pairs."""
    if len(outputs) == 1:
        return dict(outputs[0])
    joined: dict[str, Any] = {}
    for name, first in outputs[0].items():
        found = [output[name] for output in outputs]
        if not first.dim():
            joined[name] = torch.stack([one * share for one, share in zip(found, shares, strict=True)]).sum()
        else:
            halves = [one.chunk(2) for one in found]
            joined[name] = torch.cat([*(better for better, _ in halves), *(worse for _, worse in halves)])
    return joined


def join_rows(outputs: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """The outputs of the micro-batches of one batch as those of the batch; of numbers the mean."""
    given = [found for found in outputs if found is not None]
    if not given:
        return {}
    return {
        name: torch.cat([found[name] for found in given]) if one.dim() else torch.stack([x[name] for x in given]).mean()
        for name, one in given[0].items()
    }


def on_host(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs of a step in host memory, half precision as float32."""
    return {name: widened(one.cpu()) if isinstance(one, torch.Tensor) else one for name, one in outputs.items()}
