"""What tests run on each rank: functions of its number, the number of ranks, and plain arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import relay
from tests.support.ranks.models import Batch, layers, loss


def train(rank: int, count: int, batches: Sequence[Sequence[Batch]], options: dict[str, Any]) -> dict[str, Any]:
    """Train this rank's shares. Returns losses, norms, parameters and the ledger."""
    with relay.Trainer(layers(), loss, **options) as trainer:
        metrics = [trainer.step(of_ranks[rank]) for of_ranks in batches]
        trainer.synchronize()
        return {
            "losses": [one.loss for one in metrics],
            "norms": [one.grad_norm for one in metrics],
            "skipped": [one.skipped for one in metrics],
            "parameters": {name: value.clone() for name, value in trainer.state_dict().items()},
            "ledger": {(state, dtype): size for state, dtype, size in trainer.ledger.rows()},
        }
