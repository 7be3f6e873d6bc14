"""Batches whose tensors require a gradient: where these tensors come from, and what that must not be.

The gradients themselves are computed by the step (`relay.runtime.run_step`). Invariant: nothing here changes a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from relay.data.microbatches import Piece
from relay.errors import BatchError


def refuse_own_parameters(pieces: Sequence[Piece], model: nn.Module) -> None:
    """Raise BatchError for a batch computed from parameters of the model that trains on it.

    Such a parameter would be updated without the part of its gradient that passes through the batch.
    """
    sources = [source for piece in pieces for source in piece.sources.values()]
    if not sources:
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    pending: list[Any] = [source.grad_fn for source in sources if source.grad_fn is not None]
    leaves: list[Any] = [source for source in sources if source.grad_fn is None]
    seen = set()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            leaves.append(getattr(node, "variable", None))
            pending += [following for following, _ in node.next_functions if following is not None]
    for leaf in leaves:
        if id(leaf) in names:
            raise BatchError(
                f"The batch was computed from the model's parameter {names[id(leaf)]!r}, which this step would update "
                "without the gradient that comes through the batch. Compute that part inside of the model, or detach "
                "the tensor that you pass."
            )
