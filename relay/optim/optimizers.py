"""The optimizers that a user can choose: their hyperparameters, their states, and their arithmetic.

Each has two forms of its arithmetic: torch's own kernel over a list of tensors, and a rule for the fused pass of
`relay.optim.fused`, which also clips, unscales, takes narrow states and rounds the weight. States and their memory are
in `relay.eps.optimizer_state`; classes of `torch.optim` are in `relay.eps.torch_optimizer`. Invariant: where both
forms can be used, they give the same bits.

What users and learning-rate schedulers hold is in `relay.eps.torch_form`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from relay.optim import fused

State = dict[str, Any]
"""A tensor's optimizer state by torch.optim's names: tensors, or Int8State."""

Tensors = Sequence[torch.Tensor]

TORCH_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
"""The dtypes of parameters that torch's own kernels update; complex ones as pairs of real numbers."""


@dataclass(frozen=True)
class HostOptimizer:
    """What the optimizers have in common. `rule` is the arithmetic of the fused pass."""

    rule: ClassVar[fused.Rule]
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

    def param_groups(self, model: nn.Module, given: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The parameter groups that a user gave, and those that the optimizer has of itself."""
        return given

    def check_dtype(self, name: str, dtype: torch.dtype, state_dtype: str) -> None:
        """Raise ValueError if a parameter of that dtype cannot be updated with states of `state_dtype`."""
        if dtype is torch.float32 or (dtype in TORCH_DTYPES and state_dtype == "fp32" and self.has_torch_kernel):
            return
        if dtype in TORCH_DTYPES:
            advice = (
                "Use AdamW, Adam or SGD with state_dtype='fp32', or functools.partial(torch.optim.X, ...), or make it "
                "float32."
            )
        else:
            advice = "Freeze it with requires_grad_(False), or make it float32."
        raise ValueError(
            f"{name!r} is {dtype}: {type(self).__name__} with state_dtype={state_dtype!r} cannot update it. {advice}"
        )

    def states(self, group: Mapping[str, Any]) -> Mapping[str, bool]:
        """The states that may be narrower than float32, by name, and whether each is signed."""
        return self.rule.moments

    def wide_states(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The states that are as wide as the parameter."""
        return ()

    def update_by_torch(
        self, masters: Tensors, gradients: Tensors, states: Sequence[State], group: Mapping[str, Any], first: bool
    ) -> None:
        """Update tensors of one dtype by torch's own kernel, where it has one. `first` is each one's first step."""
        raise NotImplementedError


@dataclass(frozen=True)
class AdamW(HostOptimizer):
    """AdamW (Loshchilov and Hutter 2019), bit for bit `torch.optim.AdamW(fused=True)`."""

    rule: ClassVar[fused.Rule] = fused.ADAMW
    has_torch_kernel: ClassVar[bool] = True

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    amsgrad: bool = False
    maximize: bool = False

    def wide_states(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("max_exp_avg_sq",) if group["amsgrad"] else ()

    def update_by_torch(
        self, masters: Tensors, gradients: Tensors, states: Sequence[State], group: Mapping[str, Any], first: bool
    ) -> None:
        kernel = torch._fused_adamw_ if type(self) is AdamW else torch._fused_adam_
        kernel(
            _real(masters),
            _real(gradients),
            _real([state["exp_avg"] for state in states]),
            _real([state["exp_avg_sq"] for state in states]),
            _real([state["max_exp_avg_sq"] for state in states]) if group["amsgrad"] else [],
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

    rule: ClassVar[fused.Rule] = fused.ADAM

    weight_decay: float = 0.0


@dataclass(frozen=True)
class SGD(HostOptimizer):
    """Stochastic gradient descent with momentum (Nesterov's if asked), bit for bit `torch.optim.SGD(fused=True)`."""

    rule: ClassVar[fused.Rule] = fused.SGD
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

    def states(self, group: Mapping[str, Any]) -> Mapping[str, bool]:
        return self.rule.moments if group["momentum"] else {}

    def update_by_torch(
        self, masters: Tensors, gradients: Tensors, states: Sequence[State], group: Mapping[str, Any], first: bool
    ) -> None:
        torch._fused_sgd_(
            _real(masters),
            _real(gradients),
            _real([state["momentum_buffer"] for state in states]) if group["momentum"] else [],
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

    rule: ClassVar[fused.Rule] = fused.LAMB

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01


@dataclass(frozen=True)
class Lion(HostOptimizer):
    """Lion (Chen et al. 2023): the sign of an average; a third to a tenth of AdamW's learning rate suits it."""

    rule: ClassVar[fused.Rule] = fused.LION

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0


def _real(tensors: Tensors) -> list[torch.Tensor]:
    """Complex tensors as pairs of real numbers, as torch.optim updates them; others as they are."""
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
