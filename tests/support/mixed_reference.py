"""Plain PyTorch with mixed precision and clipping, as anyone would write it. Nothing in here knows the relay.

fp32 masters, `torch.autocast("cpu")` around each forward, gradients of the micro-batches added up in `.grad`, for
fp16 a `torch.amp.GradScaler("cpu")`, and `torch.nn.utils` for clipping: each value first, then the global norm.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import reference

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Plain:
    """What plain training gave: losses, global gradient norms before clipping by it, and which steps were skipped."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)


def autocast(precision: str, cache: bool = True) -> contextlib.AbstractContextManager[Any]:
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=LOW[precision], cache_enabled=cache)


def train(
    model: nn.Module | Sequence[nn.Module],
    batches: Sequence[Any],
    microbatches: int = 4,
    *,
    precision: str = "fp32",
    loss: Callable[..., Tensor] | None = None,
    optimizer: reference.MakeOptimizer | torch.optim.Optimizer = reference.adamw,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    before_step: Callable[[int], None] = lambda number: None,
    cache: bool = True,
) -> Plain:
    """One optimizer step a batch. With a `schedule` the learning rate follows the steps that were applied.

    `cache` is autocast's: whether a weight used twice in one forward is rounded once, and its gradients added up
    rounded.
    """
    parameters = [parameter for parameter in reference.parameters_of(model) if parameter.requires_grad]
    stepper = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(parameters)
    scheduler = schedule(stepper) if schedule else None
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    call = reference.caller(model, loss)
    found = Plain()
    for number, batch in enumerate(batches):
        before_step(number)
        stepper.zero_grad()
        pieces = reference.cut(batch, microbatches)
        total = 0.0
        for piece, share in zip(pieces, reference.by_samples(pieces), strict=True):
            with autocast(precision, cache):
                value = call(piece) * share
            scaler.scale(value).backward()
            total += value.item()
        scaler.unscale_(stepper)
        overflow = precision == "fp16" and not all(
            bool(torch.isfinite(parameter.grad).all()) for parameter in parameters if parameter.grad is not None
        )
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, clip_value)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        found.norms.append(torch.nn.utils.get_total_norm(gradients).item())
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        scaler.step(stepper)
        scaler.update()
        found.losses.append(total)
        found.skipped.append(overflow)
        found.scales.append(scaler.get_scale() if scaler.is_enabled() else 1.0)
        if scheduler is not None and not overflow:
            scheduler.step()
    return found
