"""A snapshot: the parameters and optimizer states as they were between two steps, read while training continues.

Nothing is copied beforehand. A parameter that has not been read yet is copied by the update that is about to change it;
a parameter that was not updated is read from its own memory. Copies stay within a budget: beyond it an update waits
until the reader has caught up, so memory does not grow with the model. No files are written here.

Invariants: every parameter is read exactly once, with the value it had when the snapshot began; a snapshot that fails
never fails an update.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hal.host import Host
from relay.eps.optimizer_state import BoundOptimizer
from relay.optim.int8_state import Int8State
from relay.optim.optimizers import State
from relay.optim.split_master import SplitMaster

SNAPSHOT = "copies for a checkpoint"


@dataclass(eq=False)
class Record:
    """A parameter's tensors: its weight, and its optimizer states (`Int8State`, tensors, or plain values)."""

    weight: torch.Tensor
    states: State

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor in a fixed order; an 8-bit state gives its codes, then its scales."""
        result = [self.weight]
        for value in self.states.values():
            if isinstance(value, Int8State):
                result += [value.codes, value.scales]
            elif isinstance(value, torch.Tensor):
                result.append(value)
        return result

    def copy(self) -> Record:
        """A record with memory of its own."""
        return Record(self.weight.detach().clone(), self.states).copy_of_states()

    def copy_of_states(self) -> Record:
        """A record of the same weight, whose states have memory of their own."""
        return Record(self.weight, {label: _cloned(value) for label, value in self.states.items()})


class Snapshot:
    """The state of `weights` (parameters by the model's names) and of their optimizer at the time of `begin`.

    `budget` is how many bytes of copies may wait to be read; one record always may. `layout`, once the snapshot has
    begun, has the dtypes and shapes of what there is to read; its tensors are the live ones. A split master is read as
    float32.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor | SplitMaster], optimizer: BoundOptimizer, host: Host, budget: int
    ) -> None:
        self._weights = weights
        self._optimizer = optimizer
        self._host = host
        self._budget = budget
        self._copies: dict[str, Record] = {}
        self._unread = set(weights)
        self._copied_bytes = 0
        self._ended = False
        self._changed = threading.Condition()
        self.error: BaseException | None = None
        self.layout: dict[str, Record] = {}

    def begin(self) -> None:
        """Start the snapshot. Call it where updates run, between those of one step and those of the next."""
        self.layout = {name: self.live(name) for name in self._weights}

    def live(self, name: str) -> Record:
        """A parameter as it is now, not copied; for a split master, what it will be read as, without memory."""
        weight = self._weights[name]
        if isinstance(weight, SplitMaster):
            weight = torch.empty(weight.shape, dtype=torch.float32, device="meta")
        return Record(weight, dict(self._optimizer.state(name)))

    def _record(self, name: str) -> Record:
        """A parameter as it is now, in memory of its own."""
        weight = self._weights[name]
        if isinstance(weight, SplitMaster):
            return Record(weight.to_float(), dict(self._optimizer.state(name))).copy_of_states()
        return self.live(name).copy()

    def before_update(self, names: Sequence[str]) -> None:
        """Call before these parameters change. Copies those that have not been read; may wait."""
        for name in names:
            with self._changed:
                if self._ended or name not in self._unread or name in self._copies:
                    continue
                try:
                    self._copy(name)
                except Exception as failure:  # the checkpoint is lost, the step is not
                    self.error = failure
                    self._end()

    def _copy(self, name: str) -> None:
        live = self.live(name)
        size = live.size
        if self._copied_bytes and self._copied_bytes + size > self._budget:
            self._changed.wait_for(
                lambda: self._ended or not self._copied_bytes or self._copied_bytes + size <= self._budget
            )
            if self._ended or name not in self._unread:
                return
        self._copies[name] = self._record(name)
        self._count(size)

    def copied(self, names: Sequence[str]) -> int:
        """Bytes of copies of these parameters that wait to be read."""
        with self._changed:
            return sum(self._copies[name].size for name in names if name in self._copies)

    def read(self, name: str) -> Record:
        """A parameter as it was at the beginning, in memory of its own. Raises the error of a snapshot that failed."""
        with self._changed:
            if self.error is not None:
                raise self.error
            self._unread.discard(name)
            record = self._copies.pop(name, None)
            if record is None:
                record = self._record(name)
                self._count(record.size)
            return record

    def release(self, record: Record) -> None:
        """Call when a record has been written: its memory no longer counts."""
        with self._changed:
            if not self._ended:
                self._count(-record.size)
                self._changed.notify_all()

    def end(self) -> None:
        """End the snapshot: updates copy no more, and the copies are dropped."""
        with self._changed:
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._copies.clear()
        self._count(-self._copied_bytes)
        self._changed.notify_all()

    def _count(self, size: int) -> None:
        self._copied_bytes += size
        self._host.ledger.add(SNAPSHOT, torch.uint8, size)


def _cloned(value: Any) -> Any:
    if isinstance(value, Int8State):
        return Int8State(value.codes.clone(), value.scales.clone(), value.signed)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
