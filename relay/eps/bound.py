"""An optimizer with its state on the host, for one trainer.

It allocates states layer by layer (in the ledger, in the dtype asked for) and chooses the arithmetic: torch's own
kernel where that does the whole work in one pass, else the fused pass. Invariant: which of the two ran cannot be
told from the result; where it could, torch's is taken.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from hal.host import Host
from relay.eps import fused
from relay.eps.optimizers import State, _Optimizer
from relay.eps.small_states import GROUP, Int8State, group_count
from relay.eps.store import LayerStore
from relay.eps.torch_optimizer import TorchOptimizer

STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}

LABELS = {
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
    "max_exp_avg_sq": "largest second moments",
    "momentum_buffer": "momentum",
}


class BoundOptimizer(Protocol):
    """An optimizer with its state on the host."""

    def allocate(self, names: Sequence[str], group: Mapping[str, Any]) -> None:
        """Make the state of these parameters, in the ledger; those that have theirs are passed."""

    def update(
        self,
        names: Sequence[str],
        gradients: Sequence[torch.Tensor],
        group: Mapping[str, Any],
        factor: torch.Tensor | None,
    ) -> None:
        """Change the named parameters, in place, and their rounded copies. `group` holds the hyperparameters.

        `factor` (a float32 scalar) multiplies the gradients first; the gradients may be overwritten.
        """

    def state(self, name: str) -> State:
        """The optimizer's state of one parameter, as torch.optim names it."""

    def state_bytes(self, name: str) -> int:
        """The bytes of that state which an update reads and writes; two moments where it is not made yet."""


def bind(
    optimizer: Any, host: Host, store: LayerStore, state_dtype: str, computes: bool = True
) -> BoundOptimizer:
    """Bind what `as_spec` gave. Raises ValueError for states that the optimizer cannot keep small.

    `computes` is False where updates are never run, so that nothing need be compiled for them.
    """
    if isinstance(optimizer, TorchOptimizer):
        if state_dtype != "fp32":
            raise ValueError(
                f"state_dtype={state_dtype!r} goes with relay's own optimizers; torch.optim's keep their own state"
            )
        return optimizer.bind(host, store)
    if computes and state_dtype != "fp32" and not fused.available():
        raise ValueError(
            f"state_dtype={state_dtype!r} needs the fused optimizers, which are not here: {fused.reason()}"
        )
    return _Bound(optimizer, host, store, state_dtype)


def as_spec(optimizer: Any) -> Any:
    """What a user gave as `optimizer=`, checked. TypeError with what is expected for anything else."""
    made_by = optimizer.func if isinstance(optimizer, functools.partial) else None
    if isinstance(made_by, type) and issubclass(made_by, torch.optim.Optimizer):
        return TorchOptimizer(optimizer)
    if isinstance(optimizer, _Optimizer):
        return optimizer
    raise TypeError(
        f"optimizer={optimizer!r} is not an optimizer for the relay. Give relay.AdamW(lr=...), Adam, SGD, LAMB or "
        "Lion, or functools.partial(torch.optim.X, lr=...): the relay makes it itself, layer by layer."
    )


class _Bound:
    """States of a layer lie in one flat region each, in the layer's own order."""

    def __init__(self, optimizer: _Optimizer, host: Host, store: LayerStore, state_dtype: str) -> None:
        self._optimizer = optimizer
        self._host = host
        self._store = store
        self._state_dtype = state_dtype
        self._state: dict[str, State] = {}

    def allocate(self, names: Sequence[str], group: Mapping[str, Any]) -> None:
        names = [name for name in names if name not in self._state]
        if not names:
            return
        steps = self._host.alloc(len(names), torch.float32, "step counts").zero_()
        made: dict[str, State] = {name: {"step": steps[number]} for number, name in enumerate(names)}
        sizes = [self._store[name].numel() for name in names]
        for label, signed in self._optimizer.states(group).items():
            if self._state_dtype == "int8":
                self._allocate_int8(made, sizes, label, signed)
            else:
                self._allocate_flat(made, sizes, label, STATE_DTYPES[self._state_dtype])
        for label in self._optimizer.wide_states(group):
            self._allocate_flat(made, sizes, label, torch.float32)
        self._state.update(made)

    def _allocate_flat(self, made: dict[str, State], sizes: Sequence[int], label: str, dtype: torch.dtype) -> None:
        flat = self._host.alloc(sum(sizes), dtype, LABELS[label]).zero_()
        for (name, state), part in zip(made.items(), flat.split(list(sizes)), strict=True):
            state[label] = part.view(self._store[name].shape)

    def _allocate_int8(self, made: dict[str, State], sizes: Sequence[int], label: str, signed: bool) -> None:
        groups = [group_count(size) for size in sizes]
        codes = self._host.alloc(sum(sizes), torch.uint8, LABELS[label]).zero_()
        scales = self._host.alloc(sum(groups), torch.float32, f"{LABELS[label]}, scales of {GROUP}").zero_()
        parts = zip(made.values(), codes.split(list(sizes)), scales.split(groups), strict=True)
        for state, own_codes, own_scales in parts:
            state[label] = Int8State(own_codes, own_scales, signed)

    def update(
        self,
        names: Sequence[str],
        gradients: Sequence[torch.Tensor],
        group: Mapping[str, Any],
        factor: torch.Tensor | None,
    ) -> None:
        states = [self._state[name] for name in names]
        masters = [self._store[name] for name in names]
        copies = [self._store.rounded(name) for name in names]
        torch._foreach_add_([state["step"] for state in states], 1)
        plain = self._state_dtype == "fp32" and all(master.dtype is torch.float32 for master in masters)
        one_pass = factor is None and not any(copies)
        exact = not plain or fused.matches_torch()
        if plain and (one_pass or not exact) and self._by_torch(masters, gradients, states, group, factor, copies):
            return
        amount = 1.0 if factor is None else float(factor)
        for name, master, gradient, state, rounded in zip(names, masters, gradients, states, copies, strict=True):
            out = rounded[0].view(-1) if rounded else None
            flat_state = {
                key: value.view(-1) if isinstance(value, torch.Tensor) else value for key, value in state.items()
            }
            self._optimizer.update(
                master.view(-1),
                gradient.view(-1),
                flat_state,
                out,
                group,
                int(state["step"]),
                amount,
                zlib.crc32(name.encode()),
            )
            for extra in rounded[1:]:
                extra.copy_(master)

    def _by_torch(
        self,
        masters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        states: Sequence[State],
        group: Mapping[str, Any],
        factor: torch.Tensor | None,
        copies: Sequence[Sequence[torch.Tensor]],
    ) -> bool:
        wide = [gradient if gradient.dtype is torch.float32 else gradient.float() for gradient in gradients]
        if factor is not None:
            torch._foreach_mul_(wide, factor)
        if not self._optimizer.update_by_torch(masters, wide, states, group):
            return False
        for master, rounded in zip(masters, copies, strict=True):
            for copy in rounded:
                copy.copy_(master)
        return True

    def state(self, name: str) -> State:
        return self._state.get(name, {})

    def state_bytes(self, name: str) -> int:
        total = 0
        for value in self.state(name).values():
            parts = (value.codes, value.scales) if isinstance(value, Int8State) else (value,)
            total += sum(part.numel() * part.dtype.itemsize for part in parts)
        return total
