"""Optimizers of the EPS: how one layer's parameters change when its gradients are there.

An optimizer is described once (`AdamW(lr=...)`, or `functools.partial(torch.optim.X, ...)`) and bound to the host
for all layers; then `update` is called for one layer at a time, from the host's task queue. Arithmetic is that of
`torch.optim`, by calling the same kernels: layer by layer or all at once, the result is the same to the bit.

`RelayOptimizer` is what users and learning-rate schedulers hold: a `torch.optim.Optimizer` whose `param_groups` are
the authority on hyperparameters. It does not update anything itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import nn

from hal.host import Host
from relay.eps.store import LayerStore


class BoundOptimizer(Protocol):
    """An optimizer with its state on the host."""

    def allocate(self, names: Sequence[str]) -> None:
        """Make the state of these parameters, in the ledger."""

    def update(
        self,
        names: Sequence[str],
        gradients: Sequence[torch.Tensor],
        group: Mapping[str, Any],
        factor: torch.Tensor | None,
    ) -> None:
        """Change the named parameters, in place, and their rounded copies. `group` holds the hyperparameters.

        `factor` (a float32 scalar) multiplies the gradients first; the gradients may be overwritten.
        """

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

    def bind(self, host: Host, store: LayerStore, state_dtype: str) -> BoundOptimizer:
        """State on `host` for parameters looked up by name."""
        return _BoundAdamW(host, store)


class _BoundAdamW:
    """Both moments of a layer lie in one flat region each, in the layer's own order."""

    def __init__(self, host: Host, store: LayerStore) -> None:
        self._host = host
        self._store = store
        self._state: dict[str, dict[str, torch.Tensor]] = {}

    def allocate(self, names: Sequence[str]) -> None:
        tensors = [self._store[name] for name in names if name not in self._state]
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

    def update(
        self,
        names: Sequence[str],
        gradients: Sequence[torch.Tensor],
        group: Mapping[str, Any],
        factor: torch.Tensor | None,
    ) -> None:
        if factor is not None:
            torch._foreach_mul_(list(gradients), factor)
        states = [self._state[name] for name in names]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            [self._store[name] for name in names],
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
        _round(self._store, names)

    def state(self, name: str) -> dict[str, torch.Tensor]:
        return self._state.get(name, {})


class _TorchOptimizer:
    """Any torch.optim class, through a `functools.partial` of it."""

    def __init__(self, factory: Callable[..., torch.optim.Optimizer]) -> None:
        self._factory = factory

    def defaults(self) -> dict[str, Any]:
        probe = self._factory([nn.Parameter(torch.zeros(1))])
        return {key: value for key, value in probe.param_groups[0].items() if key != "params"}

    def bind(self, host: Host, store: LayerStore, state_dtype: str) -> BoundOptimizer:
        return _BoundTorchOptimizer(self._factory, host, store)


class _BoundTorchOptimizer:
    """One torch optimizer for each set of names that is updated together."""

    def __init__(
        self,
        factory: Callable[..., torch.optim.Optimizer],
        host: Host,
        store: LayerStore,
    ) -> None:
        self._factory = factory
        self._host = host
        self._store = store
        self._leaves: dict[str, nn.Parameter] = {}
        self._optimizers: dict[tuple[str, ...], torch.optim.Optimizer] = {}
        self._counted: set[tuple[str, ...]] = set()

    def allocate(self, names: Sequence[str]) -> None:
        key = tuple(names)
        if not key:
            return
        for name in key:
            self._leaves[name] = nn.Parameter(self._store[name], requires_grad=True)
        self._optimizers[key] = self._factory([self._leaves[name] for name in key])

    def update(
        self,
        names: Sequence[str],
        gradients: Sequence[torch.Tensor],
        group: Mapping[str, Any],
        factor: torch.Tensor | None,
    ) -> None:
        if factor is not None:
            torch._foreach_mul_(list(gradients), factor)
        key = tuple(names)
        optimizer = self._optimizers[key]
        for own in optimizer.param_groups:
            own.update({name: value for name, value in group.items() if name != "params"})
        for name, gradient in zip(names, gradients, strict=True):
            self._leaves[name].grad = gradient
        optimizer.step()
        _round(self._store, names)
        for name in names:
            self._leaves[name].grad = None
        if key not in self._counted:
            # torch makes its state at the first step; the ledger learns of it then.
            self._counted.add(key)
            for state in optimizer.state.values():
                for label, tensor in state.items():
                    if isinstance(tensor, torch.Tensor):
                        self._host.ledger.add(label, tensor.dtype, tensor.numel() * tensor.dtype.itemsize)

    def state(self, name: str) -> dict[str, torch.Tensor]:
        for key, optimizer in self._optimizers.items():
            if name in key:
                return dict(optimizer.state.get(self._leaves[name], {}))
        return {}


def _round(store: LayerStore, names: Sequence[str]) -> None:
    for name in names:
        for copy in store.rounded(name):
            copy.copy_(store[name])


class OptimizerSpec(Protocol):
    """What `Trainer(optimizer=)` takes: hyperparameters, and a way to bind them."""

    def defaults(self) -> dict[str, Any]: ...

    def bind(self, host: Host, store: LayerStore, state_dtype: str) -> BoundOptimizer: ...


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

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        self._counting = False
        super().__init__(groups, defaults)

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
