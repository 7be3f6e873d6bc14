"""A check of the host memory that a run needs: the same code makes the same allocations, of tensors without memory.

The figure is therefore exact to the byte, and a run that cannot fit is refused before the model is touched. No sizes
are computed here. Invariant: nothing of the check outlives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hal.errors import OutOfMemory
from hal.host import Host, Ledger
from hal.slot.layout import SlotContent
from hal.worker import Worker
from relay.eps.gradient_plan import GradientPlan
from relay.eps.regions import Wanted
from relay.eps.server import ParameterServer
from relay.eps.store import LayerStore

Build = Callable[[Host], tuple[LayerStore, ParameterServer]]
"""Makes a store and a server on a host."""


class CountingHost(Host):
    """A host whose tensors have shapes but no memory. It counts bytes and never raises OutOfMemory."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(None, worker)

    def alloc(self, count: int, dtype: torch.dtype, state: str, crosses: bool = False) -> torch.Tensor:
        self.ledger.add(state, dtype, count * dtype.itemsize)
        return torch.empty(count, dtype=dtype, device="meta")


class _StandIn:
    """A model's parameters and buffers by name, without their memory."""

    def __init__(self, model: nn.Module, now: LayerStore) -> None:
        described = [
            (name, torch.empty_like(tensor, dtype=now.dtype_of(name, tensor), device="meta"), tensor.requires_grad)
            for name, tensor in model.named_parameters()
        ]
        self._parameters = [(name, nn.Parameter(tensor, requires_grad=trained)) for name, tensor, trained in described]
        self._buffers = [(name, torch.empty_like(tensor, device="meta")) for name, tensor in model.named_buffers()]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return self._parameters

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return self._buffers


def rehearse(
    model: nn.Module,
    now: LayerStore,
    host: CountingHost,
    build: Build,
    wanted: Sequence[Sequence[Wanted]],
    lay_out: Callable[[LayerStore], Sequence[SlotContent]],
    plans: Sequence[GradientPlan],
    groups: Sequence[Mapping[str, Any]],
) -> LayerStore:
    """Allocate on `host` the weights, gradients and optimizer states of a run. Returns the store, to look up sizes.

    `now` is the store of the run itself, which may hold the model already.
    """
    store, server = build(host)
    store.aliases = dict(now.aliases)
    stand_in: Any = _StandIn(model, now)
    store.take_over(stand_in, wanted)
    server.allocate(plans, groups, lay_out(store))
    return store


def refuse_beyond(
    capacity: int,
    ledger: Ledger,
    precision: str,
    state_dtype: str,
    stash: str,
    keeps_gradients: bool,
    keeps_tensors: bool,
    splits: bool,
) -> None:
    """Raise OutOfMemory, with the ledger and what would reduce it, where the ledger exceeds the capacity."""
    if ledger.total <= capacity:
        return
    advice = []
    if state_dtype == "fp32":
        advice.append("state_dtype='bf16' or 'int8' (2 or about 1 byte a moment instead of 4)")
    elif state_dtype == "bf16":
        advice.append("state_dtype='int8' (about 1 byte a moment instead of 2)")
    if precision == "bf16" and not splits:
        advice.insert(0, "master_weights='split' (2 bytes a weight less, and no result changes)")
    if stash == "host":
        advice.append("recompute=True, or stash='device'" if keeps_tensors else "stash='device'")
    if keeps_gradients:
        advice.append("neither clip_grad_norm= nor precision='fp16' (both keep all gradients until the norm is known)")
    advice.append("an optimizer with fewer moments (Lion has one, SGD without momentum none)")
    if precision != "fp32" and not splits:
        advice.append("precision='fp32' (no rounded copy of the weights, 2 bytes each, but twice the traffic)")
    raise OutOfMemory(
        "This run on the host",
        ledger.total,
        0,
        capacity,
        f"What it needs:\n{ledger}\nWhat reduces it: {'; '.join(advice)}; or raise host_memory=.",
    )
