"""The optimizers one can ask for: their hyperparameters, their states, and how one tensor is updated.

Each is described once (`AdamW(lr=...)`) and knows two forms of its arithmetic: torch's own kernel over a list of
tensors, and the fused pass of `relay.optim.fused`, which also clips, unscales, keeps small states and rounds the
weight. Where both can be used they give the same bits. State and its memory are `bound`'s; `torch.optim` classes
given by `functools.partial` are `torch_optimizer`'s.

`RelayOptimizer` is what users and learning-rate schedulers hold: a `torch.optim.Optimizer` whose `param_groups` are
the authority on hyperparameters. It does not update anything itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import torch

from relay.optim import fused

State = dict[str, Any]
"""A tensor's optimizer state by torch.optim's names: tensors, or Int8State."""

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class HostOptimizer:
    """What the five have in common.

    `kernel` is the fused pass over a tensor, its gradient and its `moments`: the states that may be small, each with
    whether it is signed.
    """

    kernel: ClassVar[Callable[..., Any]]
    moments: ClassVar[dict[str, bool]]
    has_torch_kernel: ClassVar[bool] = False

    lr: float = 1e-3

    def __post_init__(self) -> None:
        for name, value in self.defaults().items():
            if name == "betas":
                if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
                    raise ValueError(f"betas={value!r} must be two numbers in [0, 1)")
            elif not isinstance(value, bool) and not value >= 0:
                raise ValueError(f"{name}={value!r} must not be negative")

    def defaults(self) -> dict[str, Any]:
        """The hyperparameters of a parameter group."""
        return asdict(self)

    def states(self, group: Mapping[str, Any]) -> dict[str, bool]:
        """The states that may be small, by name, and whether they are signed."""
        return self.moments

    def wide_states(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The states that are always float32."""
        return ()

    def update(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        state: State,
        weight_out: torch.Tensor | None,
        group: Mapping[str, Any],
        step: int,
        factor: float,
        seed: int,
    ) -> None:
        """Update one flat tensor by the fused pass."""
        options = {one.name: group[one.name] for one in fields(self) if one.name not in ("lr", "betas", "amsgrad")}
        if "betas" in group:
            options["beta1"], options["beta2"] = group["betas"]
        options |= self.further_options(state, step)
        moments = [state.get(label) for label in self.moments]
        lr = float(group["lr"])
        self.kernel(master, gradient, *moments, weight_out, lr=lr, step=step, factor=factor, seed=seed, **options)

    def further_options(self, state: State, step: int) -> dict[str, Any]:
        """What the fused pass is told besides the hyperparameters."""
        return {}

    def update_by_torch(
        self, masters: Tensors, gradients: Tensors, states: Sequence[State], group: Mapping[str, Any], first: bool
    ) -> None:
        """Update tensors of one dtype by torch's own kernel, where it has one. `first` is each one's first step."""
        raise NotImplementedError


@dataclass(frozen=True)
class AdamW(HostOptimizer):
    """AdamW (Loshchilov and Hutter 2019), bit for bit `torch.optim.AdamW(fused=True)`."""

    kernel = staticmethod(fused.adamw)
    moments: ClassVar[dict[str, bool]] = {"exp_avg": True, "exp_avg_sq": False}
    has_torch_kernel: ClassVar[bool] = True

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    amsgrad: bool = False
    maximize: bool = False

    def wide_states(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("max_exp_avg_sq",) if group["amsgrad"] else ()

    def further_options(self, state: State, step: int) -> dict[str, Any]:
        return {"max_exp_avg_sq": state.get("max_exp_avg_sq")}

    def update_by_torch(
        self, masters: Tensors, gradients: Tensors, states: Sequence[State], group: Mapping[str, Any], first: bool
    ) -> None:
        kernel = torch._fused_adamw_ if type(self) is AdamW else torch._fused_adam_
        kernel(
            list(masters),
            list(gradients),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
            [state["step"] for state in states],
            amsgrad=group["amsgrad"],
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


@dataclass(frozen=True)
class Adam(AdamW):
    """Adam (Kingma and Ba 2015), weight decay added to the gradient; bit for bit `torch.optim.Adam(fused=True)`."""

    kernel = staticmethod(fused.adam)

    weight_decay: float = 0.0


@dataclass(frozen=True)
class SGD(HostOptimizer):
    """Stochastic gradient descent with momentum (Nesterov's if asked), bit for bit `torch.optim.SGD(fused=True)`."""

    kernel = staticmethod(fused.sgd)
    moments: ClassVar[dict[str, bool]] = {"momentum_buffer": True}
    has_torch_kernel: ClassVar[bool] = True

    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError(
                f"nesterov=True needs momentum above 0 and dampening 0, got momentum={self.momentum} and "
                f"dampening={self.dampening}"
            )

    def states(self, group: Mapping[str, Any]) -> dict[str, bool]:
        return self.moments if group["momentum"] else {}

    def further_options(self, state: State, step: int) -> dict[str, Any]:
        return {"first_step": step == 1}

    def update_by_torch(
        self, masters: Tensors, gradients: Tensors, states: Sequence[State], group: Mapping[str, Any], first: bool
    ) -> None:
        torch._fused_sgd_(
            list(masters),
            list(gradients),
            [state["momentum_buffer"] for state in states] if group["momentum"] else [],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=float(group["lr"]),
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=first,
        )


@dataclass(frozen=True)
class LAMB(HostOptimizer):
    """LAMB (You et al. 2020), for large batches: AdamW's direction, each tensor's step as long as lr times its norm."""

    kernel = staticmethod(fused.lamb)
    moments: ClassVar[dict[str, bool]] = {"exp_avg": True, "exp_avg_sq": False}

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01


@dataclass(frozen=True)
class Lion(HostOptimizer):
    """Lion (Chen et al. 2023): the sign of an average; a third to a tenth of AdamW's learning rate suits it."""

    kernel = staticmethod(fused.lion)
    moments: ClassVar[dict[str, bool]] = {"exp_avg": True}

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0


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
