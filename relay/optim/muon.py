"""Muon: the momentum of each matrix, orthogonalized by Newton-Schulz iterations.

It updates the matrices of the layers. Embeddings, the head, norms and biases are updated by AdamW, in a parameter group
of their own, so that learning-rate schedules reach both. The relay has whole matrices on the host, so nothing is
flattened or sharded. The iterations run on the host, once a step, in bfloat16, as in `torch.optim.Muon`. Invariant: a
float32 matrix is updated as by that class, to the bit, and the others as by `torch.optim.AdamW(fused=True)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

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

    def work_elements(self, shape: torch.Size, group: Mapping[str, Any]) -> int:
        if not group["use_muon"]:
            return 0
        # The update in float32; in bfloat16 two matrices like it and two squares of its shorter side.
        return shape.numel() + shape.numel() + min(shape) ** 2

    def update_tensor(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        state: Mapping[str, Any],
        group: Mapping[str, Any],
        work: torch.Tensor,
    ) -> None:
        lr = float(group["lr"])
        if not group["use_muon"]:
            torch._fused_adamw_(
                [weight], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
                amsgrad=False, lr=lr, beta1=group["betas"][0], beta2=group["betas"][1],
                weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            )  # fmt: skip
            return
        average, momentum = state["momentum_buffer"], group["momentum"]
        average.lerp_(gradient, 1 - momentum)
        update = average
        if group["nesterov"]:
            update = torch.lerp(gradient, average, momentum, out=work[: weight.numel()].view(weight.shape))
        direction = orthogonalized(update, group["ns_coefficients"], group["ns_steps"], group["eps"], work)
        weight.mul_(1 - lr * group["weight_decay"])
        weight.add_(direction, alpha=-lr * _ratio(group["adjust_lr_fn"], weight.shape))


def orthogonalized(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, work: torch.Tensor
) -> torch.Tensor:
    """A bfloat16 matrix of the same singular vectors, with singular values near 1, by quintic iterations.

    `work` is flat float32 memory, of which the first `matrix.numel()` may be the matrix itself; the result lies in it.
    """
    rows, columns = matrix.shape
    count, short = matrix.numel(), min(rows, columns)
    halves = work[count:].view(torch.bfloat16)
    first, second = halves[:count], halves[count : 2 * count]
    squares = halves[2 * count : 2 * count + 2 * short * short].view(2, short, short)
    now = first.view(rows, columns).copy_(matrix)
    now = now.T if rows > columns else now
    now.div_(now.norm().clamp(min=eps))
    other = second
    a, b, c = coefficients
    for _ in range(steps):
        gram = torch.mm(now, now.T, out=squares[0])
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c, out=squares[1])
        then = torch.addmm(now, polynomial, now, beta=a, out=other.view(short, count // short if short else 0))
        now, other = then, first if other is second else second
    return now.T if rows > columns else now


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
