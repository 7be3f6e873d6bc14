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

    def rename(self, names: Mapping[str, str | None]) -> None:
        """Call parameters by their new names, and drop the state of those whose new name is None."""


def bind(optimizer: Any, host: Host, store: LayerStore, state_dtype: str) -> BoundOptimizer:
    """Bind what `as_spec` gave. Raises ValueError for states that the optimizer cannot keep small."""
    if isinstance(optimizer, TorchOptimizer):
        if state_dtype != "fp32":
            raise ValueError(
                f"state_dtype={state_dtype!r} goes with relay's own optimizers; torch.optim's keep their own state"
            )
        return optimizer.bind(host, store)
    if state_dtype != "fp32" and not fused.available():
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
        self._regions: list[tuple[set[str], torch.Tensor, str]] = []

    def allocate(self, names: Sequence[str], group: Mapping[str, Any]) -> None:
        names = [name for name in names if name not in self._state]
        if not names:
            return
        for dtype in dict.fromkeys(self._store[name].dtype for name in names):
            self._allocate_alike([name for name in names if self._store[name].dtype is dtype], dtype, group)

    def _allocate_alike(self, names: Sequence[str], dtype: torch.dtype, group: Mapping[str, Any]) -> None:
        """The states of parameters of one dtype; those of other dtypes than float32 are in the parameter's own."""
        wide = torch.float32 if dtype is torch.float32 else dtype
        if dtype is not torch.float32 and not self._optimizer.takes_any_dtype:
            raise ValueError(
                f"{names[0]} is {dtype}, and {type(self._optimizer).__name__} updates float32 parameters. Convert it, "
                "or use AdamW, Adam or SGD, which take every dtype."
            )
        before = len(self._regions)
        steps = self._alloc(len(names), torch.float32, "step counts")
        made: dict[str, State] = {name: {"step": steps[number]} for number, name in enumerate(names)}
        sizes = [self._store[name].numel() for name in names]
        for label, signed in self._optimizer.states(group).items():
            if dtype is not torch.float32:
                self._allocate_flat(made, sizes, label, dtype)
            elif self._state_dtype == "int8":
                self._allocate_int8(made, sizes, label, signed)
            else:
                self._allocate_flat(made, sizes, label, STATE_DTYPES[self._state_dtype])
        for label in self._optimizer.wide_states(group):
            self._allocate_flat(made, sizes, label, wide)
        self._state.update(made)
        self._regions[before:] = [(set(names), flat, label) for _, flat, label in self._regions[before:]]

    def _alloc(self, count: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        flat = self._host.alloc(count, dtype, label).zero_()
        self._regions.append((set(), flat, label))
        return flat

    def rename(self, names: Mapping[str, str | None]) -> None:
        moved = ((names.get(name, name), state) for name, state in self._state.items())
        self._state = {name: state for name, state in moved if name is not None}
        kept = []
        for owners, flat, label in self._regions:
            now = {new for new in (names.get(name, name) for name in owners) if new is not None}
            if now:
                kept.append((now, flat, label))
            else:
                self._host.free(flat, label)
        self._regions = kept

    def _allocate_flat(self, made: dict[str, State], sizes: Sequence[int], label: str, dtype: torch.dtype) -> None:
        flat = self._alloc(sum(sizes), dtype, LABELS[label])
        for (name, state), part in zip(made.items(), flat.split(list(sizes)), strict=True):
            state[label] = part.view(self._store[name].shape)

    def _allocate_int8(self, made: dict[str, State], sizes: Sequence[int], label: str, signed: bool) -> None:
        groups = [group_count(size) for size in sizes]
        codes = self._alloc(sum(sizes), torch.uint8, LABELS[label])
        scales = self._alloc(sum(groups), torch.float32, f"{LABELS[label]}, scales of {GROUP}")
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
        for dtype in dict.fromkeys(self._store[name].dtype for name in names):
            places = [place for place, name in enumerate(names) if self._store[name].dtype is dtype]
            of_dtype = [names[place] for place in places], [gradients[place] for place in places]
            if dtype is torch.float32:
                self._update_float32(*of_dtype, group, factor)
            else:
                self._update_other(*of_dtype, group, factor)

    def _update_other(
        self,
        names: Sequence[str],
        gradients: Sequence[torch.Tensor],
        group: Mapping[str, Any],
        factor: torch.Tensor | None,
    ) -> None:
        """Parameters of another dtype than float32, by torch's own kernel, one by one in their own dtype."""
        for name, gradient in zip(names, gradients, strict=True):
            state, master = self._state[name], self._store[name]
            state["step"].add_(1)
            own = gradient.to(master.dtype)
            if factor is not None:
                own.mul_(factor)
            done = self._optimizer.update_by_torch([master], [own], [state], group)
            assert done, "an optimizer that takes any dtype has torch's kernel for a single tensor"
            for copy in self._store.rounded(name):
                copy.copy_(master)

    def _update_float32(
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
