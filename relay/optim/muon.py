"""Muon: the momentum of each matrix, orthogonalized by Newton-Schulz iterations.

It updates the matrices of the layers. Embeddings, the head, norms and biases are updated by AdamW, in a parameter group
of their own, so that learning-rate schedules reach both. The relay has whole matrices, so nothing is flattened or
sharded. The momentum is the host's; the iterations (`relay.optim.newton_schulz`) are the part of an update that the
device computes, once a step, in bfloat16, as in `torch.optim.Muon`. Invariant: a float32 matrix is updated as by that
class, to the bit where PyTorch runs the iterations, and the others as by `torch.optim.AdamW(fused=True)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from relay.optim.newton_schulz import NewtonSchulz
from relay.optim.optimizers import AdamW
from relay.optim.param_groups import split_into_groups
from relay.optim.tensor_optimizer import TensorOptimizer

ADJUSTMENTS = (None, "original", "match_rms_adamw")


@dataclass(frozen=True)
class Muon(TensorOptimizer):
    """Muon (Jordan et al. 2024) for the matrices of the layers, and AdamW for all else.

    Attributes:
        lr: the learning rate of the matrices.
        weight_decay: decoupled weight decay of the matrices.
        momentum, nesterov: of the matrices' gradients.
        ns_coefficients, ns_steps, eps: of the Newton-Schulz iterations.
        adjust_lr_fn: how the learning rate follows a matrix's shape, as in torch.optim.Muon: "original" (None is the
            same) or "match_rms_adamw".
        adamw: what updates embeddings, the head, and tensors that are no matrices.
    """

    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = None
    adamw: AdamW = field(default_factory=lambda: AdamW(lr=3e-4))

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "momentum", "eps"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must not be negative")
        if len(self.ns_coefficients) != 3:
            raise ValueError(f"ns_coefficients={self.ns_coefficients!r} must be three numbers")
        if not 0 < self.ns_steps < 100:
            raise ValueError(f"ns_steps={self.ns_steps!r} must be a whole number from 1 to 99")
        if self.adjust_lr_fn not in ADJUSTMENTS:
            raise ValueError(f"adjust_lr_fn={self.adjust_lr_fn!r} must be one of {ADJUSTMENTS}")
        if type(self.adamw) is not AdamW or self.adamw.amsgrad or self.adamw.maximize:
            raise ValueError(f"adamw={self.adamw!r} must be a relay.AdamW(...) without amsgrad and maximize")

    def defaults(self) -> dict[str, Any]:
        """The hyperparameters of a group: Muon's, and those of AdamW that Muon has none of. `use_muon` chooses."""
        own = asdict(self)
        del own["adamw"]
        return {**own, "use_muon": True, "betas": self.adamw.betas}

    def param_groups(self, model: nn.Module, given: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The given groups, and one more: parameters that no group names and that AdamW updates.

        A group with `use_muon=False` has AdamW's hyperparameters where it has none of its own. Raises ValueError for
        a parameter that is no matrix in a group of Muon's.
        """
        of_adamw = {"use_muon": False, "lr": self.adamw.lr, "weight_decay": self.adamw.weight_decay,
                    "eps": self.adamw.eps, "betas": self.adamw.betas}  # fmt: skip
        groups = [group if group.get("use_muon", True) else {**of_adamw, **group} for group in given]
        _, group_of = split_into_groups(model, groups, self.defaults())
        parameters = dict(model.named_parameters())
        for name, number in group_of.items():
            if number and groups[number - 1].get("use_muon", True) and parameters[name].ndim != 2:
                raise ValueError(
                    f"Parameter group {number} gives {name!r} of shape {tuple(parameters[name].shape)} to Muon, which "
                    "orthogonalizes matrices. Add use_muon=False to the group, so that AdamW updates it; or leave the "
                    "parameter out of the groups, which does the same."
                )
        others = _not_hidden_matrices(model)
        rest = [parameters[name] for name, number in group_of.items() if not number and name in others]
        return [*groups, {"params": rest, **of_adamw}]

    def state_shapes(self, shape: torch.Size, group: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        labels = ("momentum_buffer",) if group["use_muon"] else ("exp_avg", "exp_avg_sq")
        return dict.fromkeys(labels, tuple(shape))

    def device_part(self, group: Mapping[str, Any]) -> NewtonSchulz | None:
        if not group["use_muon"]:
            return None
        return NewtonSchulz(tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])

    def work_elements(self, shape: torch.Size, group: Mapping[str, Any], on_device: bool) -> int:
        part = self.device_part(group)
        if part is None:
            return 0
        # The update in float32, of which the momentum itself is one without Nesterov's.
        update = shape.numel() if group["nesterov"] else 0
        return update if on_device else update + part.work_elements(shape)

    def update_tensor(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        state: Mapping[str, Any],
        group: Mapping[str, Any],
        work: torch.Tensor,
    ) -> None:
        part = self.device_part(group)
        if part is None:
            torch._fused_adamw_(
                [weight], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
                amsgrad=False, lr=float(group["lr"]), beta1=group["betas"][0], beta2=group["betas"][1],
                weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            )  # fmt: skip
            return
        update = self.begin_update(gradient, state, group, work)
        self.finish_update(weight, part.on_host(update, work[weight.numel() if group["nesterov"] else 0 :]), group)

    def begin_update(
        self, gradient: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any], work: torch.Tensor
    ) -> torch.Tensor:
        state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        return self.again(gradient, state, group, work)

    def again(
        self, gradient: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any], work: torch.Tensor
    ) -> torch.Tensor:
        average: torch.Tensor = state["momentum_buffer"]
        if not group["nesterov"]:
            return average
        return torch.lerp(gradient, average, group["momentum"], out=work[: gradient.numel()].view(gradient.shape))

    def finish_update(self, weight: torch.Tensor, result: torch.Tensor, group: Mapping[str, Any]) -> None:
        lr = float(group["lr"])
        weight.mul_(1 - lr * group["weight_decay"])
        weight.add_(result, alpha=-lr * _ratio(group["adjust_lr_fn"], weight.shape))


def _ratio(adjustment: str | None, shape: torch.Size) -> float:
    rows, columns = shape
    if adjustment == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _not_hidden_matrices(model: nn.Module) -> set[str]:
    """The names of parameters that are no matrices of a layer: embeddings, the last linear layer, other shapes."""
    outside: set[int] = set()
    head: nn.Module | None = None
    for module in model.modules():
        if hasattr(module, "num_embeddings"):
            outside.update(id(parameter) for parameter in module.parameters(recurse=False))
        if isinstance(module, nn.Linear):
            head = module
    named = getattr(model, "get_output_embeddings", None)
    head = (named() if callable(named) else None) or head
    if head is not None:
        outside.update(id(parameter) for parameter in head.parameters(recurse=False))
    return {name for name, one in model.named_parameters() if one.ndim != 2 or id(one) in outside}
