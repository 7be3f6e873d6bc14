"""Parameter groups: which hyperparameters a parameter is updated with.

A group is a mapping as in `torch.optim`, with `params` naming parameters of the model, by pattern (`"*.bias"`) or
by the tensors themselves, and hyperparameters of its own. What no group names is in the default group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn


def split_into_groups(
    model: nn.Module, groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Groups for `torch.optim.Optimizer`, the default one first, and each parameter's group by name.

    The first group that names a parameter has it. Raises ValueError for a group that names none, a pattern that
    fits nothing, or a hyperparameter that the optimizer does not have. Frozen parameters have a group too, for the
    day they are thawed.
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
                raise ValueError(f"parameter group {number}: {item!r} fits no parameter of the model.")
            members += found
        for name in members:
            group_of.setdefault(name, number)
        result.append({**{key: value for key, value in group.items() if key != "params"}, "params": []})
    for name, parameter in parameters.items():
        group = group_of.setdefault(name, 0)
        if parameter.requires_grad:
            result[group]["params"].append(parameter)
    return result, group_of
