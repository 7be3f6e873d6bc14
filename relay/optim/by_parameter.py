"""Whether a class of optimizers treats each parameter by itself, found by trying it on tensors of a few elements.

The relay makes an optimizer for each layer. A class that looks across parameters (a norm over all gradients), or that
keeps numbers of its own in `param_groups`, would see one layer at a time, or begin with the same numbers in each step,
and train otherwise than in plain PyTorch. Nothing of a model is touched here. Invariant: a class that is refused has
given other numbers for two parameters together than for each alone, or has changed its groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Factory = Callable[..., torch.optim.Optimizer]

SHAPES = (((3,), (2, 2)), ((2, 3), (4, 2)))
"""Shapes of two parameters; the second pair is for classes that take matrices alone."""

STEPS = 3


def check_by_parameter(factory: Factory) -> None:
    """Raise TypeError for a class that cannot run layer by layer, and warn of one that draws random numbers.

    Classes of torch.optim itself are known, and a class that cannot be tried is not refused.
    """
    kind = getattr(factory, "func", factory)
    name = getattr(kind, "__name__", str(kind))
    if getattr(kind, "__module__", "").startswith("torch.optim"):
        return
    with torch.random.fork_rng(devices=[]):
        for shapes in SHAPES:
            before = torch.get_rng_state()
            try:
                together, changed = _trained(factory, shapes)
                torch.set_rng_state(before)
                alone = [_trained(factory, [shape])[0][0] for shape in shapes]
            except Exception:  # it may want other shapes, or more than gradients
                continue
            break
        else:
            return
        draws = not torch.equal(torch.get_rng_state(), before)
    if changed:
        raise TypeError(
            f"{name} cannot run layer by layer: its step changes {changed[0]!r} in param_groups, which each layer "
            "would begin with anew. Keep such numbers in the state of each parameter (optimizer.state[parameter]), or "
            "use an optimizer that has none."
        )
    if draws:
        warnings.warn(
            f"{name} draws random numbers. Layers are updated in another order than in plain PyTorch, so they get "
            "other numbers of the same generator.",
            stacklevel=2,
        )
    elif not all(torch.equal(one, other) for one, other in zip(together, alone, strict=True)):
        raise TypeError(
            f"{name} cannot run layer by layer: it combines parameters, since two of them updated together come out "
            "otherwise than each alone. For a norm over all gradients use clip_grad_norm=, and an optimizer that "
            "treats each parameter by itself."
        )


def _trained(factory: Factory, shapes: Sequence[tuple[int, ...]]) -> tuple[list[torch.Tensor], list[str]]:
    """Parameters after some steps, each with its own gradients, and what the steps changed in the group."""
    parameters = [nn.Parameter(_numbers(shape, 0)) for shape in shapes]
    optimizer = factory(parameters)
    before = _hyperparameters(optimizer)
    for step in range(1, STEPS + 1):
        for parameter in parameters:
            parameter.grad = _numbers(tuple(parameter.shape), step)
        optimizer.step()
    after = _hyperparameters(optimizer)
    changed = [key for key in after if after[key] != before.get(key)]
    return [parameter.detach() for parameter in parameters], changed


def _numbers(shape: tuple[int, ...], step: int) -> torch.Tensor:
    """Numbers that differ by step and by shape."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(1.0, count + 1) * (step + 0.5) + len(shape) + count).view(shape)


def _hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    (group,) = optimizer.param_groups
    return {key: repr(value) for key, value in group.items() if key not in ("params", "param_names")}
