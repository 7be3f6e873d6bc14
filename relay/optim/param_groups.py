"""Parameter groups: which hyperparameters a parameter is updated with.

A group is a mapping as in `torch.optim`: `params` names parameters of the model, by pattern (`"*.bias"`) or by the
tensors themselves, and further keys are the group's hyperparameters. Parameters that no group names are in the default
group. Nothing is updated here. Invariant: every parameter has exactly one group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn


def split_into_groups(
    model: nn.Module, groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Groups for `torch.optim.Optimizer`, the default group first, and each parameter's group number by name.

    A parameter is in the first group that names it. Frozen parameters have a group number too, in case they are
    unfrozen later. Raises ValueError for a group without `params`, a pattern that matches no parameter, or a
    hyperparameter that the optimizer does not have.
    """
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    group_of: dict[str, int] = {}
    result: list[dict[str, Any]] = [{"params": []}]
    for number, group in enumerate(groups, start=1):
        unknown = set(group) - {"params"} - set(defaults)
        if unknown or "params" not in group:
            raise ValueError(
                f"parameter group {number} has {sorted(group)}; expected 'params' and hyperparameters out of "
                f"{sorted(defaults)}."
            )
        wanted = group["params"]
        members: list[str] = []
        for item in [wanted] if isinstance(wanted, (str, nn.Parameter)) else wanted:
            found = (
                [name for name in parameters if fnmatchcase(name, item)]
                if isinstance(item, str)
                else [names[id(item)]]
                if id(item) in names
                else []
            )
            if not found:
                raise ValueError(f"parameter group {number}: {item!r} matches no parameter of the model.")
            members += found
        for name in members:
            group_of.setdefault(name, number)
        result.append({**{key: value for key, value in group.items() if key != "params"}, "params": []})
    for name, parameter in parameters.items():
        index = group_of.setdefault(name, 0)
        if parameter.requires_grad:
            result[index]["params"].append(parameter)
    return result, group_of
