"""The optimizer as users and learning-rate schedulers hold it: a `torch.optim.Optimizer` over the server's states.

Its `param_groups` hold the hyperparameters, and `state`, `state_dict` and `load_state_dict` give and take the states in
PyTorch's own form. It updates nothing: the server does, layer by layer. Invariant: what `state_dict` gives,
`load_state_dict` restores to the bit, 8-bit states included, since the value of a code is encoded as that code again.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, SupportsIndex

import torch
from torch import nn

from relay.eps.optimizer_state import BoundOptimizer
from relay.errors import RelayError
from relay.optim.int8_state import Int8State
from relay.processes import refuse_copy

State = dict[str, Any]

READ_ONLY = (
    "The states of a trainer's optimizer are the trainer's, so nothing can be put into optimizer.state. Write to its "
    "tensors in place, remove a parameter's state (state.pop, state.clear) to begin anew, or use load_state_dict."
)


class SharedStates(Protocol):
    """The states where several processes have a part each. Both calls are made by all of them at once."""

    def whole(self) -> dict[str, State]:
        """The whole state of each parameter, by its name."""

    def part_of(self, states: Mapping[str, State]) -> dict[str, State]:
        """What this process has of whole states, which all processes give alike."""


class ParameterState(State):
    """The state of a parameter. Its tensors may be written to; entries stay as they are."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(READ_ONLY)

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse


class States(defaultdict[torch.Tensor, State]):
    """The states of all parameters. What is removed begins anew; a parameter without a state has an empty one."""

    def __init__(self, begin_anew: Callable[[Sequence[torch.Tensor]], None]) -> None:
        super().__init__(dict)
        self._begin_anew = begin_anew

    def __missing__(self, parameter: torch.Tensor) -> State:
        return ParameterState()

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(READ_ONLY)

    __setitem__ = __ior__ = update = setdefault = popitem = _refuse

    def __delitem__(self, parameter: torch.Tensor) -> None:
        super().__delitem__(parameter)
        self._begin_anew([parameter])

    def pop(self, parameter: torch.Tensor, *default: Any) -> Any:
        """Remove the state of a parameter."""
        known = parameter in self
        found = super().pop(parameter, *default)
        if known:
            self._begin_anew([parameter])
        return found

    def clear(self) -> None:
        """Remove all states."""
        parameters = list(self)
        super().clear()
        self._begin_anew(parameters)


class RelayOptimizer(torch.optim.Optimizer):
    """The optimizer of a trainer. Updates use the values of its `param_groups`.

    `state` and `state_dict` hold the tensors that updates change (8-bit moments as float32 copies). Before it is
    connected to a trainer's states it has none.
    """

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        self._counting = False
        self._connected = False
        self._whole: dict[str, State] | None = None
        super().__init__(groups, defaults)

    def connect(
        self,
        model: Callable[[], nn.Module],
        states: BoundOptimizer,
        group_of: dict[str, int],
        ready: Callable[[], None],
        shared: SharedStates | None = None,
    ) -> None:
        """Read and write these states from now on.

        `model` gives the model as it is; `group_of` is each parameter's group by name, changed here when groups are
        added; `ready` waits for updates, and raises where the states may not be used. `shared` joins the
        states where this process holds a part of them.
        """
        self._shared = shared
        self._model, self._states, self._group_of, self._ready = model, states, group_of, ready
        self._given = len(self.param_groups)
        self._connected = True
        self._note_members()

    # -- states -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> defaultdict[torch.Tensor, State]:
        """The state of each parameter that has been updated, as `torch.optim` has it.

        Its tensors may be written to, and states may be removed; an update then begins with new ones.
        """
        found = States(self._begin_anew)
        if self._connected:
            if self._shared is not None and self._whole is None:
                raise RelayError(
                    "optimizer.state is not possible with several processes: each holds a part of the states. Call "
                    "optimizer.state_dict() on all of them, which gives each the whole states."
                )
            self._ready()
            for name, parameter in self._model().named_parameters():
                own = self._states.state(name) if self._whole is None else self._whole[name]
                if state := in_torch_form(own, parameter):
                    dict.__setitem__(found, parameter, ParameterState(state))
        return found

    @state.setter
    def state(self, value: Any) -> None:
        """torch sets an empty one when it is made, and so do users who reset it. Raises TypeError for any other."""
        if self._connected:
            if value:
                raise TypeError(READ_ONLY)
            self.state.clear()

    def _begin_anew(self, parameters: Sequence[torch.Tensor]) -> None:
        """Give parameters the states of before their first update."""
        self._ready()
        names = {id(parameter): name for name, parameter in self._model().named_parameters()}
        for parameter in parameters:
            name = names[id(parameter)]
            group = self.param_groups[self._group_of[name]]
            self._states.restore(name, self._states.from_torch_form(name, {}, group, parameter.shape))

    def state_dict(self) -> dict[str, Any]:
        """The states and groups in the form of `torch.optim`: `state` by index, with `step`, `exp_avg` and so on.

        Of several processes all call it, and each gets all of it.
        """
        self._list_unfrozen()
        if self._connected and self._shared is not None:
            self._ready()
            self._whole = self._shared.whole()
        try:
            found = super().state_dict()
        finally:
            self._whole = None
        return found | {"state": {index: dict(state) for index, state in found["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set states and hyperparameters from a `state_dict` of this class, or of torch.optim's of the same name.

        Of several processes all call it with the same. Raises ValueError, with nothing changed, for one of other
        groups, parameters or states.
        """
        if not self._connected:
            raise RuntimeError("This optimizer has no states: use that of a trainer, trainer.optimizer.")
        self._list_unfrozen()
        names = {id(parameter): name for name, parameter in self._model().named_parameters()}
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        listed = [(each, number) for number, group in enumerate(self.param_groups) for each in group["params"]]
        states: dict[str, State] = {}
        if len(indices) == len(listed):  # torch raises ValueError otherwise
            for index, (parameter, number) in zip(indices, listed, strict=True):
                given = state_dict["state"].get(index, {})
                given = {label: value for label, value in given.items() if value is not None}
                group = {**self.defaults, **state_dict["param_groups"][number]}
                name = names[id(parameter)]
                states[name] = self._states.from_torch_form(name, given, group, parameter.shape)
        self._ready()
        if self._shared is not None:
            states = self._shared.part_of(states)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.__dict__.pop("state", None)  # torch puts it here; the states are the server's
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        for name, state in states.items():
            self._states.restore(name, state)
        self._note_members()

    def _list_unfrozen(self) -> None:
        """List parameters that have been unfrozen since, which are updated with the group that they were given."""
        if self._connected:
            listed = {id(parameter) for group in self.param_groups for parameter in group["params"]}
            for name, parameter in self._model().named_parameters():
                if parameter.requires_grad and id(parameter) not in listed:
                    self.param_groups[self._group_of[name]]["params"].append(parameter)
            self._note_members()

    def _note_members(self) -> None:
        self._members = [[id(parameter) for parameter in group["params"]] for group in self.param_groups]

    def refuse_moved_parameters(self) -> None:
        """Raise ValueError where parameters were taken out of the groups, or put into them, by hand."""
        if (
            self._connected
            and [[id(parameter) for parameter in group["params"]] for group in self.param_groups] != self._members
        ):
            raise ValueError(
                "The lists of parameters in trainer.optimizer.param_groups were changed by hand, which changes nothing "
                "in the trainer. To leave a parameter as it is, set its requires_grad to False; for parameters that "
                "have been unfrozen use add_param_group; for other groups build a trainer with param_groups=."
            )

    # -- groups -----------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group for parameters of the model that have been unfrozen.

        Raises ValueError for a parameter that the model does not have, or that has a group already.
        """
        if getattr(self, "_connected", False):
            if "params" not in param_group:
                raise ValueError("A parameter group needs 'params', a list of the model's parameters.")
            params = param_group["params"]
            params = [params] if isinstance(params, torch.Tensor) else list(params)
            param_group = {**param_group, "params": params}
            names = {id(parameter): name for name, parameter in self._model().named_parameters()}
            unknown = set(param_group) - {"params"} - set(self.defaults)
            if unknown:
                raise ValueError(
                    f"The group has {sorted(unknown)}, which this optimizer does not: it has {sorted(self.defaults)}."
                )
            for parameter in params:
                if id(parameter) not in names:
                    what = f"of shape {tuple(getattr(parameter, 'shape', ()))}"
                    raise ValueError(
                        f"add_param_group was given a parameter {what} that the trainer's model does not have. Put "
                        "layers in with trainer.insert or trainer.replace, or build a new trainer."
                    )
            self._ready()
            super().add_param_group(param_group)
            self._group_of.update((names[id(parameter)], len(self.param_groups) - 1) for parameter in params)
            self._note_members()
        else:
            super().add_param_group(param_group)

    def regroup(self, groups: list[dict[str, Any]], group_of: dict[str, int]) -> None:
        """The model has been edited: `groups` and `group_of` are those of the groups that the trainer was given.

        Groups that were added since keep the parameters that the model still has.
        """
        names = {id(parameter): name for name, parameter in self._model().named_parameters()}
        for number in range(self._given, len(self.param_groups)):
            members = [parameter for parameter in self.param_groups[number]["params"] if id(parameter) in names]
            group_of.update((names[id(parameter)], number) for parameter in members)
            chosen = set(map(id, members))
            for group in groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in chosen]
            groups = [*groups, {"params": members}]
        for ours, new in zip(self.param_groups, groups, strict=True):
            ours["params"] = new["params"]
        self._group_of = group_of
        self._note_members()

    # -- steps ------------------------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Called by the trainer for each applied step, for schedulers and step hooks. A user may not call it."""
        if not self._counting:
            raise RuntimeError("Call trainer.step(batch), which updates the parameters, instead of optimizer.step().")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients in `.grad` of the model's parameters, frozen ones too. Steps neither read nor write them.

        With `set_to_none=False` zeros stay in those that have one, which the next step refuses.
        """
        parameters = self._model().parameters() if self._connected else ()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = None if set_to_none else torch.zeros_like(parameter)

    def begin_step(self) -> None:
        """Run the hooks that come before `step`, which may change the groups that the step then uses."""
        for hook in list(self._optimizer_step_pre_hooks.values()):
            hook(self, (), {})

    def count_step(self) -> None:
        """Tell schedulers of a step that was applied, and run the hooks that come after `step`."""
        before, self._optimizer_step_pre_hooks = self._optimizer_step_pre_hooks, OrderedDict()
        self._counting = True
        try:
            self.step()
        finally:
            self._counting = False
            self._optimizer_step_pre_hooks = before

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy(
            "A trainer's optimizer",
            "Use optimizer.state_dict(), or trainer.save(folder) and trainer.load(folder), which hold the optimizer's "
            "states too.",
        )


def in_torch_form(state: Mapping[str, Any], parameter: torch.Tensor) -> State:
    """A parameter's state as torch.optim has it: tensors of the parameter's shape; empty before the first update."""
    step = state.get("step")
    if step is not None and not float(step):
        return {}
    return {
        label: value.to_float().view(parameter.shape) if isinstance(value, Int8State) else value
        for label, value in state.items()
    }
