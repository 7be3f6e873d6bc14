"""What a step tells its caller.

Plain figures, read off events that have ended: nothing here waits or measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hal.event import Event


@dataclass(frozen=True)
class Metrics:
    """Figures of one step or evaluation. Bytes are exact; seconds are wall time.

    `loss` is the mean over the whole batch. `grad_norm` is the global 2-norm of the gradients (0 for an
    evaluation). `device_peak_bytes` is the peak of the device's account, `host_bytes` all that the host's ledger
    holds. `compute_seconds`, `transfer_seconds` and `optimizer_seconds` are sums over the calls of each kind; they
    overlap, so they may add up to more than `seconds`. `weight_bytes` is what was sent down as weights. With held
    updates (clipping, fp16) `optimizer_seconds` are those of the step before. `skipped` says that nothing of the step
    was applied: its loss, or under clipping or a dynamic loss scale its gradients, were not finite.
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

    @property
    def tokens_per_second(self) -> float:
        """Tokens (samples, for models without tokens) a second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def total_elapsed(events: Sequence[Event]) -> float:
    """Seconds summed over calls that have ended."""
    return sum(event.elapsed() for event in events)
