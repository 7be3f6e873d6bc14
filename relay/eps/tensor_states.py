"""The states and work space of optimizers that update whole tensors (`relay.optim.tensor_optimizer`), on the host.

States are allocated layer by layer in float32, in the ledger, and so is the work space: for the largest tensor, since
tensors are updated one after the other. Split masters and weights in half precision are updated as float32, in memory
for one tensor. Invariant: the ledger before the first step is that after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from hal.host import Host
from relay.eps.optimizer_state import LABELS, BoundHostOptimizer, fill_state, size_of_state
from relay.eps.store import LayerStore
from relay.optim.optimizers import State
from relay.optim.split_master import SplitMaster
from relay.optim.tensor_optimizer import DevicePart, TensorOptimizer

WORK = "work space of the optimizer"
WIDENED = "float32 of one tensor"


class BoundTensorOptimizer(BoundHostOptimizer):
    """See `relay.eps.optimizer_state.BoundOptimizer`."""

    def __init__(self, optimizer: TensorOptimizer, host: Host, store: LayerStore) -> None:
        super().__init__(optimizer, host, store, "fp32")
        self._by_tensor = optimizer
        self._on_device: set[str] = set()
        self._work = host.alloc(0, torch.float32, WORK)
        self._widened = host.alloc(0, torch.float32, WIDENED)

    def allocate(self, names: Sequence[str], group: Mapping[str, Any]) -> None:
        work = [
            self._by_tensor.work_elements(self._store[name].shape, group, name in self._on_device) for name in names
        ]
        self._work = self._at_least(self._work, max(work, default=0), WORK)
        widened = [self._store[name].numel() for name in names if self._store[name].dtype is not torch.float32]
        self._widened = self._at_least(self._widened, max(widened, default=0), WIDENED)
        names = [name for name in names if name not in self._state]
        if not names:
            return
        for name in names:
            self._optimizer.check_dtype(name, self._store.dtype(name), "fp32")
        before = len(self._regions)
        steps = self._alloc(len(names), torch.float32, "step counts")
        made: dict[str, State] = {name: {"step": steps[number]} for number, name in enumerate(names)}
        shapes = {name: self._by_tensor.state_shapes(self._store[name].shape, group) for name in names}
        for label in dict.fromkeys(label for of_one in shapes.values() for label in of_one):
            own = {name: torch.Size(of_one[label]) for name, of_one in shapes.items() if label in of_one}
            flat = self._alloc(sum(shape.numel() for shape in own.values()), torch.float32, LABELS[label])
            parts = torch.split(flat, [shape.numel() for shape in own.values()])
            for (name, shape), part in zip(own.items(), parts, strict=True):
                made[name][label] = part.view(shape)
        self._state.update(made)
        self._bytes.update((name, size_of_state(state)) for name, state in made.items())
        for name in names:
            if name in self._waiting:
                fill_state(made[name], self._waiting.pop(name))
        self._regions[before:] = [(set(names), flat, label) for _, flat, label in self._regions[before:]]

    def _at_least(self, flat: torch.Tensor, count: int, label: str) -> torch.Tensor:
        if flat.numel() >= count:
            return flat
        self._host.free(flat, label)
        return self._host.alloc(count, torch.float32, label)

    def update(
        self,
        names: Sequence[str],
        gradients: Sequence[torch.Tensor],
        group: Mapping[str, Any],
        factor: torch.Tensor | None,
    ) -> None:
        for name, gradient in zip(names, gradients, strict=True):
            state = self._state[name]
            state["step"] += 1
            taken, _ = self._scaled(name, gradient, factor)
            with self._weight(name) as weight:
                self._by_tensor.update_tensor(weight, taken, state, group, self._work)

    def device_part(self, group: Mapping[str, Any]) -> DevicePart | None:
        return self._by_tensor.device_part(group)

    def place(self, names: Collection[str], on_device: Collection[str]) -> None:
        self._on_device.difference_update(names)
        self._on_device.update(on_device)

    def begin(
        self,
        name: str,
        gradient: torch.Tensor,
        group: Mapping[str, Any],
        factor: torch.Tensor | None,
        target: torch.Tensor,
    ) -> bool:
        state = self._state[name]
        state["step"] += 1
        taken, in_place = self._scaled(name, gradient, factor)
        target.copy_(self._by_tensor.begin_update(taken, state, group, self._work))
        return in_place

    def finish(self, name: str, result: torch.Tensor, group: Mapping[str, Any]) -> None:
        with self._weight(name) as weight:
            self._by_tensor.finish_update(weight, result, group)

    def finish_on_host(
        self, name: str, gradient: torch.Tensor, group: Mapping[str, Any], factor: torch.Tensor | None
    ) -> None:
        part = self._by_tensor.device_part(group)
        assert part is not None
        shape = self._store[name].shape
        taken, _ = self._scaled(name, gradient, factor)
        matrix = self._by_tensor.again(taken, self._state[name], group, self._work)
        work = self._host.alloc(part.work_elements(shape), torch.float32, WORK)
        self.finish(name, part.on_host(matrix, work), group)
        self._host.free(work, WORK)

    def _scaled(self, name: str, gradient: torch.Tensor, factor: torch.Tensor | None) -> tuple[torch.Tensor, bool]:
        """A gradient in the master's precision, then float32, times the factor; and whether that is in its memory."""
        taken = gradient.to(self._store.dtype(name))
        if factor is not None:
            taken.mul_(factor)
        return taken.float(), taken is gradient

    @contextlib.contextmanager
    def _weight(self, name: str) -> Iterator[torch.Tensor]:
        """A master weight as float32, to be changed in place."""
        master = self._store.master(name)
        weight = self._as_float32(master)
        yield weight
        if isinstance(master, torch.Tensor) and weight is not master:
            master.copy_(weight)
        self._store.updated_from(name, weight)

    def _as_float32(self, master: torch.Tensor | SplitMaster) -> torch.Tensor:
        if isinstance(master, torch.Tensor) and master.dtype is torch.float32:
            return master
        room = self._widened[: master.numel()].view(master.shape)
        return master.to_float(room) if isinstance(master, SplitMaster) else room.copy_(master)

    @property
    def reads_half(self) -> bool:
        return False

    def check(self, name: str, labels: Collection[str], dtypes: Mapping[str, torch.dtype]) -> None:
        own = self._state.get(name)
        if own is not None and labels and set(own) != set(labels):
            raise ValueError(f"the optimizer here has the states {sorted(own)}, the checkpoint {sorted(labels)}")

    def allows(self, label: str, shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
        return shape in (whole, (), whole[:-1], (*whole[:-2], *whole[-1:]))

    def from_torch_form(self, name: str, state: State, group: Mapping[str, Any], shape: torch.Size) -> State:
        if not state:
            return {}
        expected = self._by_tensor.state_shapes(shape, group)
        found = {label: tuple(value.shape) for label, value in state.items() if label in expected}
        if found != expected or set(state) - {"step", "RMS", *expected}:
            raise ValueError(
                f"The state of {name!r} has {sorted(state)}; {self.kind} with these options has {expected}. Load a "
                "state_dict of the same optimizer."
            )
        kept = {label: state[label] for label in expected}
        # torch.optim.Muon counts no steps; a state that is there is not that of a first step.
        return {**kept, "step": torch.as_tensor(state.get("step", 1.0), dtype=torch.float32)}
