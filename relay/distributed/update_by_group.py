"""The update of a segment's parameters from sums of gradients, one call of the optimizer for each parameter group.

Invariant: a parameter without a gradient on any rank is not updated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from relay.eps.gradient_plan import GradientPlan
from relay.eps.optimizer_state import BoundOptimizer


def update_by_group(
    plan: GradientPlan,
    sums: Mapping[int, torch.Tensor],
    optimizer: BoundOptimizer,
    groups: Sequence[Mapping[str, Any]],
    group_of: Mapping[str, int],
    factor: torch.Tensor | None,
) -> None:
    """Update the parameters of `sums`, gradients by their index into the plan's updates.

    `groups` are the hyperparameters of the parameter groups, `group_of` each parameter's group by name.
    """
    by_group: dict[int, list[int]] = {}
    for index in sums:
        by_group.setdefault(group_of[plan.names[plan.updates[index]]], []).append(index)
    with torch.no_grad():
        for number, indices in by_group.items():
            names = [plan.names[plan.updates[index]] for index in indices]
            optimizer.allocate(names, groups[number])
            optimizer.update(names, [sums[index] for index in indices], groups[number], factor)
