"""Padding batches to a few sequence lengths, since each new length has to be captured.

Padding leaves the loss unchanged only if the labels are padded with the index that the loss ignores, and attention is
causal or masked. Only the user knows that, so the tensors to pad are named, with their fill values, and no others are
padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from relay.errors import BatchError


@dataclass(frozen=True)
class Buckets:
    """Pads dimension 1 of the named tensors of a batch to the smallest of `lengths` that is long enough.

    `fill` maps the name of each tensor to its padding value, for example
    `{"input_ids": 0, "attention_mask": 0, "labels": -100}`. Raises ValueError if `lengths` holds no positive integers.
    """

    lengths: tuple[int, ...]
    fill: Mapping[str, float] = field(default_factory=lambda: {"input_ids": 0, "attention_mask": 0, "labels": -100})

    def __post_init__(self) -> None:
        if not self.lengths or any(not isinstance(length, int) or length < 1 for length in self.lengths):
            raise ValueError(f"Buckets need one or more lengths of at least 1; got {self.lengths!r}.")

    def pad(self, batch: Mapping[str, object]) -> dict[str, object]:
        """A copy of the batch with the named tensors padded. Raises BatchError if one is longer than every bucket."""
        padded = dict(batch)
        for name, value in self.fill.items():
            tensor = batch.get(name)
            if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
                continue
            length = tensor.shape[1]
            fitting = [bucket for bucket in self.lengths if bucket >= length]
            if not fitting:
                raise BatchError(
                    f"{name} has length {length} along dimension 1, and the longest bucket is {max(self.lengths)}. Add "
                    "a longer bucket, or shorten the batch."
                )
            missing = (0, 0) * (tensor.dim() - 2) + (0, min(fitting) - length)
            padded[name] = torch.nn.functional.pad(tensor, missing, value=value)
        return padded
