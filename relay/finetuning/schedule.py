"""The learning rate of each step, and which parameters decay. Nothing is trained here."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

LR = 2e-5
LR_OF_ADAPTERS = 2e-4


def learning_rate(step: int, steps: int, highest: float, schedule: str, warmup: float) -> float:
    """The rate of a step, counted from 0: a linear rise over the first `warmup` of the steps, then the schedule."""
    rising = math.ceil(steps * warmup)
    if step < rising:
        return highest * (step + 1) / rising
    progress = (step - rising) / max(1, steps - rising)
    if schedule == "cosine":
        return highest * 0.5 * (1 + math.cos(math.pi * progress))
    return highest * (1 - progress) if schedule == "linear" else highest


def without_decay(model: nn.Module) -> list[dict[str, Any]]:
    """The parameter group of norms and biases, which have no weight decay; no group if there are none."""
    vectors = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim < 2]
    return [{"params": vectors, "weight_decay": 0.0}] if vectors else []
