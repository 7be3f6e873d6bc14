"""From the optimizer that a user gave to the one that holds states on the host: which class does it.

It allocates and updates nothing. Invariant: what cannot be bound is refused with what to give instead.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from hal.host import Host
from relay.eps.optimizer_state import BoundHostOptimizer, BoundOptimizer, MasterWeights
from relay.eps.store import LayerStore
from relay.eps.tensor_states import BoundTensorOptimizer
from relay.eps.torch_optimizer import TorchOptimizer
from relay.optim import fused
from relay.optim.optimizers import HostOptimizer
from relay.optim.tensor_optimizer import TensorOptimizer


def bind(
    optimizer: Any,
    host: Host,
    store: LayerStore,
    state_dtype: str,
    computes: bool = True,
    part: MasterWeights | None = None,
) -> BoundOptimizer:
    """Bind an optimizer of `as_spec` to a host and a store.

    `computes` is False if updates never run, so that nothing needs to be compiled. `part` is what an optimizer that
    works element by element sees instead of the store. Raises ValueError for a state dtype
    that the optimizer does not have.
    """
    if isinstance(optimizer, TorchOptimizer):
        if state_dtype != "fp32":
            raise ValueError(
                f"state_dtype={state_dtype!r} goes with relay's own optimizers; torch.optim's keep their own state"
            )
        return optimizer.bind(host, store)
    if isinstance(optimizer, TensorOptimizer):
        if state_dtype != "fp32":
            raise ValueError(
                f"state_dtype={state_dtype!r} makes moments narrow, and {type(optimizer).__name__} has its states in "
                "float32. Leave it out."
            )
        return BoundTensorOptimizer(optimizer, host, store)
    if computes and state_dtype != "fp32" and not fused.available():
        raise ValueError(
            f"state_dtype={state_dtype!r} needs the fused optimizers, which are not here: {fused.reason()}"
        )
    return BoundHostOptimizer(optimizer, host, store if part is None else part, state_dtype, computes)


def narrows_states(optimizer: Any) -> bool:
    """Whether the states of an optimizer of `as_spec` may be stored in fewer bits than those of float32."""
    return not isinstance(optimizer, (TorchOptimizer, TensorOptimizer))


def as_spec(optimizer: Any) -> Any:
    """The optimizer that a user gave as `optimizer=`, checked. Raises TypeError for anything else."""
    made_by = optimizer.func if isinstance(optimizer, functools.partial) else None
    if isinstance(made_by, type) and issubclass(made_by, torch.optim.Optimizer):
        return TorchOptimizer(optimizer)
    if isinstance(optimizer, HostOptimizer):
        return optimizer
    raise TypeError(
        f"optimizer={optimizer!r} is not an optimizer for the relay. Give relay.AdamW(lr=...), Adam, SGD, LAMB, "
        "Lion, Adafactor or Muon, or functools.partial(torch.optim.X, lr=...): the relay makes it itself, layer by "
        "layer."
    )
