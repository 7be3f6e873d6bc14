"""Sequences of many lengths, padded to a few: each length that a batch has costs a capture, a padded one none.

Padding changes nothing where the model is told of it: labels filled with what the loss ignores, and attention
either causal or masked. That is the user's to say, so the fill is given by name and nothing is padded unasked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from relay.errors import BatchError


@dataclass(frozen=True)
class Buckets:
    """Pads dimension 1 of the named tensors of a batch to the smallest of `lengths` that holds it.

    `fill` says with what, for example `{"input_ids": 0, "attention_mask": 0, "labels": -100}`.
    """

    lengths: tuple[int, ...]
    fill: Mapping[str, float] = field(default_factory=lambda: {"input_ids": 0, "attention_mask": 0, "labels": -100})

    def __post_init__(self) -> None:
        if not self.lengths or any(not isinstance(length, int) or length < 1 for length in self.lengths):
            raise ValueError(f"Buckets need one or more lengths of at least 1; got {self.lengths!r}.")

    def pad(self, batch: Mapping[str, object]) -> dict[str, object]:
        """The batch with its named tensors padded. Raises BatchError where one is longer than every bucket."""
        padded = dict(batch)
        for name, value in self.fill.items():
            tensor = batch.get(name)
            if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
                continue
            length = tensor.shape[1]
            fitting = [bucket for bucket in self.lengths if bucket >= length]
            if not fitting:
                raise BatchError(
                    f"{name} is {length} long, and the longest bucket is {max(self.lengths)}. Add a longer bucket, or "
                    "cut the batch."
                )
            missing = (0, 0) * (tensor.dim() - 2) + (0, min(fitting) - length)
            padded[name] = torch.nn.functional.pad(tensor, missing, value=value)
        return padded
