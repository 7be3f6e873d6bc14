"""The figures that a step returns.

They are read from events that have ended. Nothing here waits or measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hal.event import Event


@dataclass(frozen=True)
class Metrics:
    """Figures of one step or evaluation. Bytes are exact; seconds are wall time.

    Attributes:
        loss: the mean over the whole batch.
        grad_norm: the global 2-norm of the gradients before clipping; 0 for an evaluation.
        seconds: the whole call.
        tokens: tokens in the batch (samples, for models without tokens).
        device_peak_bytes: the peak of the device memory in use.
        host_bytes: all bytes in the host's ledger.
        compute_seconds, transfer_seconds, optimizer_seconds: sums over the calls of each kind. They overlap, so they
            may add up to more than `seconds`. With `defer_updates=True` and clipping by norm or a
            dynamic loss scale, `optimizer_seconds` is that of the step before.
        weight_bytes: the bytes of weights that were sent to the device.
        optimizer_bytes: the bytes that crossed the link, both ways together, for what the device computes of updates
            (Muon's matrices).
        resident_layers: how many segments (embedding, layers of a slot, head) were resident on the device.
        skipped: True if nothing of the step was applied, since its loss was not finite, or, under clipping by norm or a
            dynamic loss scale, its gradients were not.
        outputs: for each micro-batch, in order, the outputs that `step(outputs=[...])` names, detached and by name;
            None for one that did not run, since all of its targets are masked. Empty if none are asked for.
    """

    loss: float
    grad_norm: float
    seconds: float
    tokens: int
    device_peak_bytes: int
    host_bytes: int
    compute_seconds: float
    transfer_seconds: float
    optimizer_seconds: float
    weight_bytes: int
    skipped: bool = False
    resident_layers: int = 0
    optimizer_bytes: int = 0
    outputs: list[dict[str, Any] | None] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Tokens (samples, for models without tokens) a second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def total_elapsed(events: Sequence[Event]) -> float:
    """The seconds of calls that have ended, summed."""
    return sum(event.elapsed() for event in events)
