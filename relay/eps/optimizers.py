"""Optimizers of the EPS: how one layer's parameters change when its gradients are there.

An optimizer is described once (`AdamW(lr=...)`, or `functools.partial(torch.optim.X, ...)`) and bound to the host
for all layers; then `update` is called for one layer at a time, from the host's task queue. Arithmetic is that of
`torch.optim`, by calling the same kernels: layer by layer or all at once, the result is the same to the bit.

`RelayOptimizer` is what users and learning-rate schedulers hold: a `torch.optim.Optimizer` whose `param_groups` are
the authority on hyperparameters. It does not update anything itself.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import nn

from hal.host import Host


class BoundOptimizer(Protocol):
    """An optimizer with its state on the host."""

    def allocate(self, names: Sequence[str]) -> None:
        """Make the state of these parameters, in the ledger."""

    def update(self, names: Sequence[str], gradients: Sequence[torch.Tensor], group: Mapping[str, Any]) -> None:
        """Change the named parameters, in place. `group` holds the hyperparameters."""

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """The optimizer's state of one parameter, as torch.optim names it."""


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019), bit for bit `torch.optim.AdamW(fused=True)`."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        if not self.lr >= 0 or not self.eps >= 0 or not self.weight_decay >= 0:
            raise ValueError(f"lr, eps and weight_decay must not be negative, got {self}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {self.betas}")

    def defaults(self) -> dict[str, Any]:
        """The hyperparameters of a parameter group."""
        return asdict(self)

    def bind(self, host: Host, parameters: Mapping[str, torch.Tensor]) -> BoundOptimizer:
        """State on `host` for parameters looked up by name."""
        return _BoundAdamW(host, parameters)


class _BoundAdamW:
    """Both moments of a layer lie in one flat region each, in the layer's own order."""

    def __init__(self, host: Host, parameters: Mapping[str, torch.Tensor]) -> None:
        self._host = host
        self._parameters = parameters
        self._state: dict[str, dict[str, torch.Tensor]] = {}

    def allocate(self, names: Sequence[str]) -> None:
        names = [name for name in names if name not in self._state]
        tensors = [self._parameters[name] for name in names]
        total = sum(tensor.numel() for tensor in tensors)
        if not total:
            return
        first = self._host.alloc(total, torch.float32, "first moments").zero_()
        second = self._host.alloc(total, torch.float32, "second moments").zero_()
        steps = self._host.alloc(len(tensors), torch.float32, "step counts").zero_()
        at = 0
        for number, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
            end = at + tensor.numel()
            self._state[name] = {
                "step": steps[number],
                "exp_avg": first[at:end].view(tensor.shape),
                "exp_avg_sq": second[at:end].view(tensor.shape),
            }
            at = end

    def update(self, names: Sequence[str], gradients: Sequence[torch.Tensor], group: Mapping[str, Any]) -> None:
        states = [self._state[name] for name in names]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            [self._parameters[name] for name in names],
            list(gradients),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            amsgrad=False,
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def state(self, name: str) -> dict[str, torch.Tensor]:
        return self._state.get(name, {})


class _TorchOptimizer:
    """Any torch.optim class, through a `functools.partial` of it."""

    def __init__(self, factory: Callable[..., torch.optim.Optimizer]) -> None:
        self._factory = factory

    def defaults(self) -> dict[str, Any]:
        probe = self._factory([nn.Parameter(torch.zeros(1))])
        return {key: value for key, value in probe.param_groups[0].items() if key != "params"}

    def bind(self, host: Host, parameters: Mapping[str, torch.Tensor]) -> BoundOptimizer:
        return _BoundTorchOptimizer(self._factory, host, parameters)


class _BoundTorchOptimizer:
    """One torch optimizer for each set of names that is updated together."""

    def __init__(
        self,
        factory: Callable[..., torch.optim.Optimizer],
        host: Host,
        parameters: Mapping[str, torch.Tensor],
    ) -> None:
        self._factory = factory
        self._host = host
        self._parameters = parameters
        self._leaves: dict[str, nn.Parameter] = {}
        self._optimizers: dict[tuple[str, ...], torch.optim.Optimizer] = {}
        self._states: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        self._counted: set[str] = set()

    def allocate(self, names: Sequence[str]) -> None:
        key = tuple(names)
        if not key or key in self._optimizers:
            return
        for name in key:
            if name not in self._leaves:
                self._leaves[name] = nn.Parameter(self._parameters[name], requires_grad=True)
        made = self._factory([self._leaves[name] for name in key])
        # One state for all: a layer that later trains other parameters than now keeps what it has learned of each.
        for leaf, state in made.state.items():
            self._states.setdefault(leaf, state)
        made.state = self._states
        self._optimizers[key] = made

    def update(self, names: Sequence[str], gradients: Sequence[torch.Tensor], group: Mapping[str, Any]) -> None:
        key = tuple(names)
        optimizer = self._optimizers[key]
        for own in optimizer.param_groups:
            own.update({name: value for name, value in group.items() if name != "params"})
        for name, gradient in zip(names, gradients, strict=True):
            self._leaves[name].grad = gradient
        optimizer.step()
        for name in names:
            self._leaves[name].grad = None
        # torch makes its state at the first step; the ledger learns of it then.
        for name in set(names) - self._counted:
            self._counted.add(name)
            for label, tensor in self._states[self._leaves[name]].items():
                if isinstance(tensor, torch.Tensor):
                    self._host.ledger.add(label, tensor.dtype, tensor.numel() * tensor.dtype.itemsize)

    def state(self, name: str) -> dict[str, torch.Tensor]:
        return dict(self._states.get(self._leaves[name], {})) if name in self._leaves else {}


class OptimizerSpec(Protocol):
    """What `Trainer(optimizer=)` takes: hyperparameters, and a way to bind them."""

    def defaults(self) -> dict[str, Any]: ...

    def bind(self, host: Host, parameters: Mapping[str, torch.Tensor]) -> BoundOptimizer: ...


def optimizer_spec(optimizer: Any) -> OptimizerSpec:
    """What a user gave, as a spec. TypeError with what is expected for anything else."""
    made_by = optimizer.func if isinstance(optimizer, functools.partial) else None
    if isinstance(made_by, type) and issubclass(made_by, torch.optim.Optimizer):
        return _TorchOptimizer(optimizer)
    if hasattr(optimizer, "bind") and hasattr(optimizer, "defaults"):
        spec: OptimizerSpec = optimizer
        return spec
    raise TypeError(
        f"optimizer={optimizer!r} is not an optimizer for the relay. Give relay.AdamW(lr=...), or "
        "functools.partial(torch.optim.X, lr=...): the relay makes it itself, layer by layer."
    )


class RelayOptimizer(torch.optim.Optimizer):
    """The optimizer as users and learning-rate schedulers see it. Its `param_groups` are what updates use."""

    def __init__(self, parameters: Sequence[nn.Parameter], defaults: dict[str, Any]) -> None:
        self._counting = False
        super().__init__(list(parameters), defaults)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Called by the trainer for each real step, so that schedulers and step hooks follow real steps."""
        if not self._counting:
            raise RuntimeError("trainer.step(batch) updates the parameters; the optimizer is not stepped by hand.")

    def count_step(self) -> None:
        """Tell hooks and schedulers that a step was applied."""
        self._counting = True
        try:
            self.step()
        finally:
            self._counting = False
