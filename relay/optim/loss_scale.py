"""The dynamic loss scale of fp16 training: it multiplies the loss, and a step whose gradients overflow is skipped.

The rule is that of `torch.amp.GradScaler` (Micikevicius et al. 2018): halve the scale after an overflow, double it
after a number of steps without one. Gradients are not touched here. Invariant: the scale is a power of two, so scaling
and unscaling are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relay.errors import LossScaleExhausted


@dataclass
class LossScale:
    """A dynamic loss scale. `good_steps` counts the steps since the last change."""

    value: float = 65536.0
    growth_interval: int = 2000
    good_steps: int = 0
    smallest: float = 2.0**-14

    def succeeded(self) -> None:
        """Call after a step that was applied."""
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.value *= 2.0
            self.good_steps = 0

    def overflowed(self) -> None:
        """Call after a step that was skipped. Raises LossScaleExhausted if the scale is at its smallest."""
        self.good_steps = 0
        self.value /= 2.0
        if self.value < self.smallest:
            raise LossScaleExhausted(self.value * 2.0)

    def state(self) -> dict[str, float]:
        """The state for a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps, "growth_interval": self.growth_interval}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore what `state` returned."""
        self.value = float(state["value"])
        self.good_steps, self.growth_interval = int(state["good_steps"]), int(state["growth_interval"])
