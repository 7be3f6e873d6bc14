"""An optimizer with its states on the host, for one trainer.

States are allocated layer by layer, in the ledger and in the dtype that the user chose. An update uses torch's own
kernel where that does all the work in one pass, and the fused pass otherwise. Invariant: the result is the same with
either; where it would not be, torch's kernel is used.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from hal.host import Host
from relay.eps.split_weights import SplitWeights
from relay.optim import fused
from relay.optim.int8_state import GROUP, Int8State, group_count
from relay.optim.optimizers import HostOptimizer, State
from relay.optim.split_master import SplitMaster
from relay.optim.tensor_optimizer import DevicePart
from relay.precision import STATE_DTYPES

LABELS = {
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
    "max_exp_avg_sq": "largest second moments",
    "momentum_buffer": "momentum",
    "exp_avg_sq_row": "second moments of rows",
    "exp_avg_sq_col": "second moments of columns",
}


HELD: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.bfloat16: (torch.bfloat16, torch.uint8),
    torch.uint8: (torch.uint8,),
}
"""The dtypes of moments whose values a narrow dtype holds to the bit. A code of 8 bits has 3 of a bfloat16's 7."""


class MasterWeights(Protocol):
    """What an optimizer sees of the store (`relay.eps.store`), or of a part of it."""

    @property
    def split(self) -> SplitWeights:
        """The names of the parameters whose masters are split."""

    def __getitem__(self, name: str) -> torch.Tensor: ...

    def master(self, name: str) -> torch.Tensor | SplitMaster: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str) -> torch.Tensor: ...

    def updated_from(self, name: str, updated: torch.Tensor) -> None: ...

    def rounded(self, name: str) -> list[torch.Tensor]: ...

    def round(self, name: str) -> None: ...


class BoundOptimizer(Protocol):
    """An optimizer with its state on the host."""

    def allocate(self, names: Sequence[str], group: Mapping[str, Any]) -> None:
        """Allocate the states of these parameters, in the ledger. Those that have states are skipped."""

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

    def device_part(self, group: Mapping[str, Any]) -> DevicePart | None:
        """What a device computes in the middle of updates with this group. The methods below are then there."""

    def place(self, names: Collection[str], on_device: Collection[str]) -> None:
        """Of these tensors, those `on_device` are updated in two halves, with the device's part between them."""

    def begin(
        self,
        name: str,
        gradient: torch.Tensor,
        group: Mapping[str, Any],
        factor: torch.Tensor | None,
        target: torch.Tensor,
    ) -> bool:
        """The first half of an update: `target` gets what the device takes.

        `factor` multiplies the gradient first. Returns whether the gradient was overwritten by that product.
        """

    def finish(self, name: str, result: torch.Tensor, group: Mapping[str, Any]) -> None:
        """The second half, by the device's result."""

    def finish_on_host(
        self, name: str, gradient: torch.Tensor, group: Mapping[str, Any], factor: torch.Tensor | None
    ) -> None:
        """The second half without the device, which was lost; the gradient and its factor as after `begin`."""

    def state(self, name: str) -> State:
        """The optimizer's state of one parameter, by torch.optim's names; what `restore` took, if not yet allocated."""

    @property
    def kind(self) -> str:
        """The optimizer's name in checkpoints."""

    @property
    def reads_half(self) -> bool:
        """Whether updates take gradients in half precision for float32 masters, without memory for a wider copy."""

    def check(self, name: str, labels: Collection[str], dtypes: Mapping[str, torch.dtype]) -> None:
        """Raise ValueError if a state with these labels cannot be restored to the bit.

        `dtypes` are those of its tensors; uint8 stands for moments of 8 bits.
        """

    def allows(self, label: str, shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
        """Whether a state may have this shape, for a parameter of the shape `whole`."""

    def restore(self, name: str, state: State) -> None:
        """Set a parameter's state, as `state` returns it (empty: a new one). Other dtypes are converted.

        If the state has no memory yet, the tensors are kept as they are until `allocate`.
        """

    def from_torch_form(self, name: str, state: State, group: Mapping[str, Any], shape: torch.Size) -> State:
        """A state of torch.optim's form as `restore` takes it.

        `shape` is the parameter's. Raises ValueError for a state of another optimizer.
        """

    def rename(self, names: Mapping[str, str | None]) -> None:
        """Rename parameters, and drop the states of those whose new name is None."""

    def state_bytes(self, name: str) -> int:
        """The bytes of a state that an update reads and writes; those of two moments if it is not allocated yet."""


class WithoutDevice:
    """An optimizer whose updates are the host's altogether."""

    def device_part(self, group: Mapping[str, Any]) -> DevicePart | None:
        return None

    def place(self, names: Collection[str], on_device: Collection[str]) -> None:
        """Does nothing: no tensor is on the device."""

    def begin(self, *_: Any) -> bool:
        raise NotImplementedError

    def finish(self, *_: Any) -> None:
        raise NotImplementedError

    def finish_on_host(self, *_: Any) -> None:
        raise NotImplementedError


class BoundHostOptimizer(WithoutDevice):
    """Each state of a layer is one flat region, in the layer's own order of parameters."""

    def __init__(
        self, optimizer: HostOptimizer, host: Host, store: MasterWeights, state_dtype: str, computes: bool = True
    ) -> None:
        self._optimizer = optimizer
        self._host = host
        self._store = store
        self._state_dtype = state_dtype
        self._computes = computes
        self._state: dict[str, State] = {}
        self._waiting: dict[str, State] = {}
        self._bytes: dict[str, int] = {}
        self._regions: list[tuple[set[str], torch.Tensor, str]] = []

    def allocate(self, names: Sequence[str], group: Mapping[str, Any]) -> None:
        names = [name for name in names if name not in self._state]
        for dtype in dict.fromkeys(self._store.dtype(name) for name in names):
            self._allocate([name for name in names if self._store.dtype(name) == dtype], dtype, group)

    def _allocate(self, names: Sequence[str], dtype: torch.dtype, group: Mapping[str, Any]) -> None:
        small = self._state_dtype
        self._optimizer.check_dtype(names[0], dtype, small)
        before = len(self._regions)
        steps = self._alloc(len(names), torch.float32, "step counts")
        made: dict[str, State] = {name: {"step": steps[number]} for number, name in enumerate(names)}
        sizes = [self._store[name].numel() for name in names]
        for label, signed in self._optimizer.states(group).items():
            if small == "int8":
                self._allocate_int8(made, sizes, label, signed)
            else:
                self._allocate_flat(made, sizes, label, STATE_DTYPES[small] if dtype is torch.float32 else dtype)
        for label in self._optimizer.wide_states(group):
            self._allocate_flat(made, sizes, label, dtype)
        self._state.update(made)
        self._bytes.update((name, size_of_state(state)) for name, state in made.items())
        for name in names:
            if name in self._waiting:
                fill_state(made[name], self._waiting.pop(name))
        self._regions[before:] = [(set(names), flat, label) for _, flat, label in self._regions[before:]]

    def _alloc(self, count: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        flat = self._host.alloc(count, dtype, label).zero_()
        self._regions.append((set(), flat, label))
        return flat

    def rename(self, names: Mapping[str, str | None]) -> None:
        moved = ((names.get(name, name), state) for name, state in self._state.items())
        self._state = {name: state for name, state in moved if name is not None}
        self._bytes = {name: size_of_state(state) for name, state in self._state.items()}
        waiting = ((names.get(name, name), state) for name, state in self._waiting.items())
        self._waiting = {name: state for name, state in waiting if name is not None}
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
        for (name, state), part in zip(made.items(), torch.split(flat, list(sizes)), strict=True):
            state[label] = part.view(self._store[name].shape)

    def _allocate_int8(self, made: dict[str, State], sizes: Sequence[int], label: str, signed: bool) -> None:
        groups = [group_count(size) for size in sizes]
        codes = self._alloc(sum(sizes), torch.uint8, LABELS[label])
        scales = self._alloc(sum(groups), torch.float32, f"{LABELS[label]}, scales of {GROUP}")
        parts = zip(made.values(), torch.split(codes, list(sizes)), torch.split(scales, groups), strict=True)
        for state, own_codes, own_scales in parts:
            state[label] = Int8State(own_codes, own_scales, signed)

    def update(
        self,
        names: Sequence[str],
        gradients: Sequence[torch.Tensor],
        group: Mapping[str, Any],
        factor: torch.Tensor | None,
    ) -> None:
        torch._foreach_add_([self._state[name]["step"] for name in names], 1)
        amount = 1.0 if factor is None else float(factor)
        # One call of torch takes tensors of one dtype; and SGD's first step of a tensor differs from the later ones.
        torch_calls: dict[tuple[torch.dtype, bool], list[int]] = {}
        for index, name in enumerate(names):
            master, state, rounded = self._store.master(name), self._state[name], self._store.rounded(name)
            if self._uses_torch(name, factor):
                torch_calls.setdefault((self._store.dtype(name), bool(state["step"] == 1)), []).append(index)
                continue
            flat = {
                label: value.view(-1) if isinstance(value, torch.Tensor) else value for label, value in state.items()
            }
            split = isinstance(master, SplitMaster)
            fused.update(
                self._optimizer.rule,
                master.view(-1) if isinstance(master, torch.Tensor) else master,
                gradients[index].view(-1),
                flat,
                rounded[0].view(-1) if rounded and not split else None,
                group,
                step=int(state["step"]),
                factor=amount,
                seed=zlib.crc32(name.encode()),
            )
            if len(rounded) > (not split):
                self._store.round(name)
        for (dtype, first), indices in torch_calls.items():
            masters = [self._store.read(names[index]) for index in indices]
            taken = [gradients[index].to(dtype) for index in indices]
            if factor is not None:
                torch._foreach_mul_(taken, factor)
            states = [self._state[names[index]] for index in indices]
            self._optimizer.update_by_torch(masters, taken, states, group, first)
            for index, updated in zip(indices, masters, strict=True):
                self._store.updated_from(names[index], updated)

    def _uses_torch(self, name: str, factor: torch.Tensor | None) -> bool:
        """Whether torch's own kernel updates a parameter: where it is as good as the fused pass, or the only one."""
        if self._store.dtype(name) is not torch.float32:
            return True
        if self._state_dtype != "fp32" or not self._optimizer.has_torch_kernel:
            return False
        one_pass = factor is None and not self._store.rounded(name) and name not in self._store.split
        return one_pass or not fused.matches_torch()

    def state(self, name: str) -> State:
        return self._state.get(name) or self._waiting.get(name, {})

    def state_bytes(self, name: str) -> int:
        made = self._bytes.get(name)
        return size_of_state(self.state(name)) if made is None else made

    @property
    def kind(self) -> str:
        return type(self._optimizer).__name__

    @property
    def reads_half(self) -> bool:
        by_torch = self._state_dtype == "fp32" and self._optimizer.has_torch_kernel
        return not by_torch or not self._computes or fused.matches_torch()

    def check(self, name: str, labels: Collection[str], dtypes: Mapping[str, torch.dtype]) -> None:
        own = self._state.get(name)
        if own is not None and labels and set(own) != set(labels):
            raise ValueError(f"the optimizer here has the states {sorted(own)}, the checkpoint {sorted(labels)}")
        narrow = STATE_DTYPES[self._state_dtype]
        for label in self._optimizer.rule.moments:
            stored = dtypes.get(label, narrow)
            if stored not in HELD.get(narrow, (stored,)):
                was = next(key for key, dtype in STATE_DTYPES.items() if dtype is stored)
                raise ValueError(
                    f"{label!r} is {was} in the checkpoint and {self._state_dtype} here, which cannot hold it to the "
                    f"bit. Build the trainer with state_dtype={was!r}, or load with weights_only=True"
                )

    def allows(self, label: str, shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
        return shape in (whole, ())

    def from_torch_form(self, name: str, state: State, group: Mapping[str, Any], shape: torch.Size) -> State:
        expected = {*self._optimizer.states(group), *self._optimizer.wide_states(group)}
        if not state:
            return {}
        labels = set(state) - {"step"}
        if labels != expected:
            raise ValueError(
                f"The state of {name!r} has {sorted(labels)}; {self.kind} with these options has {sorted(expected)}. "
                "Load a state_dict of the same optimizer."
            )
        for label in labels:
            found, count = state[label].numel(), shape.numel()
            if found != count:
                raise ValueError(f"{label!r} of {name!r} has {found} elements, the parameter {count}.")
        # torch.optim.SGD counts no steps; a state that is there is not that of a first step.
        return {**state, "step": torch.as_tensor(state.get("step", 1.0), dtype=torch.float32)}

    def restore(self, name: str, state: State) -> None:
        own = self._state.get(name)
        if own is not None:
            fill_state(own, state)
        elif state:
            self._waiting[name] = state
        else:
            self._waiting.pop(name, None)


def size_of_state(state: State) -> int:
    """The bytes of a state's tensors."""
    total = 0
    for value in state.values():
        parts = (value.codes, value.scales) if isinstance(value, Int8State) else (value,)
        total += sum(part.numel() * part.dtype.itemsize for part in parts)
    return total


def fill_state(own: State, state: State) -> None:
    """Copy a state into allocated memory. What is missing becomes zero, as in a new state."""
    for label, target in own.items():
        source = state.get(label)
        if isinstance(target, Int8State):
            if isinstance(source, Int8State):
                target.codes.copy_(source.codes)
                target.scales.copy_(source.scales)
            elif source is not None:
                target.assign(source)
            else:
                target.codes.zero_()
                target.scales.zero_()
        elif source is None:
            target.zero_()
        else:
            target.copy_(source.to_float().view(target.shape) if isinstance(source, Int8State) else source)
