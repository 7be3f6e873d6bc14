"""The optimizer of a run, as the library's loop, its schedulers and its checkpoints hold it.

The updates are Relay's, layer by layer; here is what `transformers.Trainer` calls `self.optimizer`. Nothing is updated.
Invariant: groups, their order and the form of the states are those of the optimizer that the library would have made,
so that either reads the other's `optimizer.pt`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from relay.eps.torch_form import RelayOptimizer
from relay.optim.optimizers import AdamW

Group = dict[str, Any]


class LoopOptimizer(torch.optim.Optimizer):
    """The groups and states of a relay's optimizer. Its `step` counts and does nothing: the update is made already.

    Args:
        optimizer: the relay's; its first group is empty, the others are those of `groups` that hold parameters.
        groups: the groups in the library's order, with all hyperparameters of the library's optimizer.
        given: the optimizer that a user made, whose states are taken over. Its schedulers act on these groups then.
    """

    _is_accelerate_prepared = True

    def __init__(
        self, optimizer: RelayOptimizer, groups: Sequence[Group], given: torch.optim.Optimizer | None = None
    ) -> None:
        self._relay: RelayOptimizer | None = None
        super().__init__([dict(group) for group in groups], {})
        self._relay = optimizer
        self.step_was_skipped = False
        self._given = given
        self._join()
        if given is not None:
            if given.state:
                self.load_state_dict(given.state_dict())
            given.param_groups = self.param_groups

    def _join(self) -> None:
        """Make each group that holds parameters the relay's own, so that a scheduler writes to it."""
        assert self._relay is not None
        theirs = iter(self._relay.param_groups[1:])
        for position, group in enumerate(self.param_groups):
            if group["params"]:
                own = next(theirs)
                for key, value in group.items():
                    own.setdefault(key, value)
                self.param_groups[position] = own

    @property
    def state(self) -> Any:
        return self._relay.state if self._relay is not None else {}

    @state.setter
    def state(self, value: Any) -> None:
        """torch sets an empty one when it is made."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The training step has updated the parameters."""
        if self._given is not None:
            self._given._opt_called = True  # type: ignore[attr-defined]  # schedulers of the user's look at it

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients are not kept in the parameters."""

    def add_param_group(self, param_group: Group) -> None:
        if self._relay is None:
            super().add_param_group(param_group)
        else:
            self._relay.add_param_group(param_group)
            self.param_groups.append(self._relay.param_groups[-1])

    def state_dict(self) -> dict[str, Any]:
        """The states by index, and the groups, as torch.optim has them."""
        assert self._relay is not None
        packed, start = [], 0
        for group in self.param_groups:
            count = len(group["params"])
            packed.append({**group, "params": list(range(start, start + count))})
            start += count
        return {"state": self._relay.state_dict()["state"], "param_groups": packed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a `state_dict` of this class or of the library's optimizer. Raises ValueError for other groups."""
        assert self._relay is not None
        given = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in given] != sizes:
            raise ValueError(
                f"The optimizer's file has groups of {[len(group['params']) for group in given]} parameters, and this "
                f"run has groups of {sizes}. It is of another model, or other parameters are frozen."
            )
        known = {*self._relay.defaults, "params", "initial_lr"}
        groups = [{key: value for key, value in group.items() if key in known} for group in given if group["params"]]
        first = {**self._relay.defaults, "params": []}
        before = [dict(group) for group in self.param_groups]
        self._relay.load_state_dict({"state": state_dict["state"], "param_groups": [first, *groups]})
        for own, saved in zip(before, given, strict=True):
            own.update({key: value for key, value in saved.items() if key != "params"})
        self.param_groups[:] = before
        self._join()


def choose(cls: type, kwargs: Mapping[str, Any], narrow: bool) -> Any:
    """What `relay.Trainer(optimizer=...)` takes for a class of torch.optim and its arguments.

    A fused AdamW is Relay's own, equal to the bit, and so is any AdamW whose states are to be narrow. Raises TypeError
    for a class that is no torch.optim.Optimizer.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(
            f"{cls!r} is not a class of torch.optim. Use one that is, or relay={{'optimizer': relay.AdamW(lr=...)}}."
        )
    if cls is torch.optim.AdamW and (kwargs.get("fused") or narrow):
        known = inspect.signature(AdamW).parameters
        return AdamW(**{key: value for key, value in kwargs.items() if key in known})
    return functools.partial(cls, **kwargs)


def full_groups(cls: type | None, kwargs: Mapping[str, Any], groups: Sequence[Group], defaults: Group) -> list[Group]:
    """The groups with every hyperparameter that an optimizer of the class `cls` would write into its file."""
    if cls is not None:
        probe = cls([nn.Parameter(torch.zeros(1))], **kwargs)
        defaults = {key: value for key, value in probe.param_groups[0].items() if key != "params"}
    return [{**defaults, **group} for group in groups]


def arguments_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The arguments that the class of an optimizer would take to make one like it."""
    known = inspect.signature(type(optimizer)).parameters
    return {key: value for key, value in optimizer.defaults.items() if key in known}
