"""Adafactor: second moments of a matrix as one number for each row and one for each column.

The semantics are those of `transformers.optimization.Adafactor` with `relative_step=False`: the learning rate is given,
and `scale_parameter` scales it by the root mean square of the tensor. The ops are torch's, in the order that
transformers has them. Invariant: a float32 tensor is updated as there, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from relay.optim.tensor_optimizer import TensorOptimizer


@dataclass(frozen=True)
class Adafactor(TensorOptimizer):
    """Adafactor (Shazeer and Stern 2018) as transformers has it, with a given learning rate.

    Attributes:
        lr: the learning rate.
        eps: what is added to squared gradients, and the least scale of a parameter.
        clip_threshold: the largest root mean square of an update.
        decay_rate: the average of squared gradients decays by 1 - step ** decay_rate.
        beta1: the decay of a first moment, or None for none: it takes 4 bytes a parameter.
        weight_decay: decoupled weight decay.
        scale_parameter: whether the learning rate is multiplied by the root mean square of the tensor.
    """

    eps: tuple[float, float] = (1e-30, 1e-3)
    clip_threshold: float = 1.0
    decay_rate: float = -0.8
    beta1: float | None = None
    weight_decay: float = 0.0
    scale_parameter: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.eps, tuple | list) or len(self.eps) != 2 or not all(value >= 0 for value in self.eps):
            raise ValueError(f"eps={self.eps!r} must be two numbers that are not negative")
        if self.lr is None:
            raise ValueError("lr=None must be a number: Adafactor's relative steps, which choose it, are not supported")
        if self.beta1 is not None and not 0 <= self.beta1 < 1:
            raise ValueError(f"beta1={self.beta1!r} must be None or a number in [0, 1)")
        if not self.decay_rate < 0:
            raise ValueError(f"decay_rate={self.decay_rate!r} must be below 0, such as -0.8")
        if not self.clip_threshold > 0:
            raise ValueError(f"clip_threshold={self.clip_threshold!r} must be above 0")
        if not (self.lr >= 0 and self.weight_decay >= 0):
            raise ValueError(f"lr={self.lr!r} and weight_decay={self.weight_decay!r} must not be negative")

    def state_shapes(self, shape: torch.Size, group: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        if group["beta1"] is not None:
            shapes["exp_avg"] = tuple(shape)
        if len(shape) >= 2:
            return {**shapes, "exp_avg_sq_row": tuple(shape[:-1]), "exp_avg_sq_col": (*shape[:-2], shape[-1])}
        return {**shapes, "exp_avg_sq": tuple(shape)}

    def work_elements(self, shape: torch.Size, group: Mapping[str, Any], on_device: bool) -> int:
        return shape.numel()

    def update_tensor(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        state: Mapping[str, Any],
        group: Mapping[str, Any],
        work: torch.Tensor,
    ) -> None:
        update = work[: weight.numel()].view(weight.shape)
        lr: Any = float(group["lr"])
        if group["scale_parameter"]:
            lr = max(group["eps"][1], _rms(weight)) * lr
        decay = 1.0 - math.pow(int(state["step"]), group["decay_rate"])
        torch.mul(gradient, gradient, out=update).add_(group["eps"][0])
        if "exp_avg_sq" in state:
            squares = state["exp_avg_sq"]
            squares.mul_(decay).add_(update, alpha=1.0 - decay)
            torch.rsqrt(squares, out=update)
        else:
            rows, columns = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
            rows.mul_(decay).add_(update.mean(dim=-1), alpha=1.0 - decay)
            columns.mul_(decay).add_(update.mean(dim=-2), alpha=1.0 - decay)
            of_rows = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
            torch.mul(of_rows, columns.unsqueeze(-2).rsqrt(), out=update)
        update.mul_(gradient)
        update.div_((_rms(update) / group["clip_threshold"]).clamp_(min=1.0))
        update.mul_(lr)
        if "exp_avg" in state:
            average = state["exp_avg"]
            average.mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
            update = average
        if group["weight_decay"] != 0:
            weight.add_(weight, alpha=float(-group["weight_decay"] * lr))
        weight.sub_(update)


def _rms(tensor: torch.Tensor) -> torch.Tensor:
    rms: torch.Tensor = tensor.norm(2) / (tensor.numel() ** 0.5)
    return rms
