"""Checkpoints of several ranks: written by all of them, by parameter name, and read by any number.

The format is that of one process (`relay.checkpoint.format`). Shards are shared out among the ranks. The rank that
writes a parameter receives the parts of its optimizer state from their owners, one parameter after the other. Rank 0
makes the folder and writes the manifest, so all ranks must see one file system. Each rank reads what it has from a
snapshot, over a channel of its own, so training may continue. Invariant: a checkpoint has its name only when every rank
has written its shards; an error on one rank is raised on all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from relay.checkpoint.format import Progress, ShardPlan, partial_path, replacing, write_batch, write_contents
from relay.checkpoint.manifest import ShardEntry
from relay.checkpoint.shards import DTYPES, NAMES
from relay.distributed.ownership import Ownership
from relay.distributed.ranks import Ranks
from relay.eps.optimizer_state import BoundOptimizer
from relay.eps.snapshot import Record, Snapshot
from relay.eps.store import LayerStore
from relay.errors import CheckpointError
from relay.optim.int8_state import Int8State, group_count
from relay.optim.optimizers import State
from relay.optim.split_master import SplitMaster

Described = dict[str, dict[str, dict[str, Any]]]
"""How the optimizer states of all parameters are made, in plain values: by parameter and label."""


class _OnAllRanks(CheckpointError):
    """A checkpoint that no rank has written, as all of them know."""


def write_together(states: RankStates, snapshot: Snapshot, path: Path, progress: Progress) -> None:
    """Write a checkpoint at `path`, called on all ranks after the same step, from a snapshot that has begun."""
    error: Exception | None = None
    try:
        _write(states, snapshot, path, progress)
    except _OnAllRanks:
        raise
    except CheckpointError as failure:
        error = failure
    _agree(states.ranks, None, error or states.failed)


def _write(states: RankStates, snapshot: Snapshot, path: Path, progress: Progress) -> None:
    plan, ranks = states.plan, states.ranks
    with ExitStack() as stack:
        folder, error = partial_path(path), None
        try:
            if ranks.rank == 0:
                folder = stack.enter_context(replacing(path))
        except CheckpointError as failure:
            error = failure
        _agree(ranks, None, error)
        entries: dict[int, ShardEntry] = {}
        failed: Exception | None = None
        for number, names in enumerate(plan.batches):
            writer = number % ranks.count
            left = deque(names)

            def read(name: str, left: deque[str] = left, writer: int = writer) -> Record:
                left.remove(name)
                return states.gather(snapshot, name, writer)

            if ranks.rank == writer and failed is None:
                try:
                    entries |= write_batch(folder, plan, names, read, lambda name, record: None)
                except (OSError, ValueError) as failure:
                    failed = failure
            for name in tuple(left):  # the others send all the same
                read(name)
        written = [(shard, msgspec.to_builtins(entry)) for shard, entry in entries.items()]
        records = _agree(ranks, written, failed or states.failed)
        if ranks.rank == 0:
            found = {shard: msgspec.convert(entry, ShardEntry) for each in records for shard, entry in each}
            write_contents(folder, progress, plan, found)


class RankStates:
    """The parameters and optimizer states of all ranks, described on each and gathered one by one.

    It is made on all ranks at once, between two steps.

    Attributes:
        plan: which tensor goes to which file. The files of one batch of it are written by one rank.
        weights: what a snapshot on this rank reads: by name the weight that it writes, or the part of it that it owns;
            no elements where it has the optimizer's state alone.
        failed: what kept this rank from reading its own part.
    """

    def __init__(
        self,
        ranks: Ranks,
        ownership: Ownership,
        model: nn.Module,
        store: LayerStore,
        optimizer: BoundOptimizer,
        shard_bytes: int,
    ) -> None:
        self.ranks = ranks
        self.failed: Exception | None = None
        self._channel = ranks.checkpoints
        self._ownership = ownership
        self._optimizer = optimizer
        self._split = store.split
        self._weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        # The next forward pass changes buffers, so they are copied now.
        self._buffers = {name: Record(buffer.detach().cpu().clone(), {}) for name, buffer in model.named_buffers()}
        own = {name: self._describe(name) for name in ownership.owned_names(list(self._weights))}
        self._described: Described = {}
        for each in self._channel.gather_now(own):
            for name, state in each.items():
                self._described.setdefault(name, state)
        layout = {name: Record(self._float(name, "meta"), self._empty(name, "meta")) for name in self._weights}
        self.plan = ShardPlan({**layout, **self._buffers}, self._buffers, shard_bytes)
        self.weights: dict[str, torch.Tensor | SplitMaster] = {}
        for number, names in enumerate(self.plan.batches):
            for name in names:
                if name in self._weights and (ownership.owns(name) or number % ranks.count == ranks.rank):
                    self.weights[name] = self._read_here(name, number % ranks.count)

    def _read_here(self, name: str, writer: int) -> torch.Tensor | SplitMaster:
        if name in self._split:
            return self._split[name] if self._ownership.owns(name) else torch.empty(0)
        return self._weights[name] if writer == self.ranks.rank else torch.empty(0)

    def _describe(self, name: str) -> dict[str, dict[str, Any]]:
        described: dict[str, dict[str, Any]] = {}
        for label, value in self._optimizer.state(name).items():
            if isinstance(value, Int8State):
                described[label] = {"kind": "int8", "elements": value.codes.numel(), "signed": value.signed}
            elif not isinstance(value, torch.Tensor):
                described[label] = {"kind": "value", "value": value}
            else:
                is_cut = value.dim() == 1 and not self._ownership.whole
                shape = list(self._weights[name].shape) if is_cut else list(value.shape)
                described[label] = {"kind": "tensor", "dtype": NAMES[value.dtype], "shape": shape, "is_cut": is_cut}
        return described

    def _float(self, name: str, device: str) -> torch.Tensor:
        """A parameter's weight; one with a split master in float32, not filled."""
        weight = self._weights[name]
        return torch.empty(weight.shape, device=device) if name in self._split else weight

    def _empty(self, name: str, device: str) -> State:
        """A parameter's whole state, not filled."""
        state: State = {}
        for label, made in self._described.get(name, {}).items():
            if made["kind"] == "int8":
                codes = torch.empty(made["elements"], dtype=torch.uint8, device=device)
                scales = torch.empty(group_count(made["elements"]), dtype=torch.float32, device=device)
                state[label] = Int8State(codes, scales, made["signed"])
            elif made["kind"] == "value":
                state[label] = made["value"]
            else:
                state[label] = torch.empty(made["shape"], dtype=DTYPES[made["dtype"]], device=device)
        return state

    def gather(self, snapshot: Snapshot, name: str, writer: int) -> Record:
        """A parameter or buffer with its whole state on the rank `writer`, called on all ranks."""
        if name in self._buffers:
            return self._buffers[name]
        is_writer = self.ranks.rank == writer
        record = self._own(snapshot, name)
        whole = self._gather_state(name, record.states, writer)
        if name in self._split:
            weight = self._float(name, "cpu" if is_writer else "meta")
            self._gather_tensor(name, weight, record.weight if self._ownership.owns(name) else None, writer, True)
        else:
            weight = record.weight
        snapshot.release(record)
        return Record(weight, whole)

    def state(self, name: str) -> State:
        """A parameter's whole state as it is now, called on all ranks."""
        own = self._optimizer.state(name)
        return [self._gather_state(name, own, rank) for rank in range(self.ranks.count)][self.ranks.rank]

    def _gather_state(self, name: str, own: State, writer: int) -> State:
        """A parameter's whole state on the rank `writer`, from what each rank has of it."""
        whole = self._empty(name, "cpu" if self.ranks.rank == writer else "meta")
        own = own if self._ownership.owns(name) else {}
        for label, made in self._described.get(name, {}).items():
            if made["kind"] == "int8":
                self._gather_tensor(name, whole[label].codes, own[label].codes if own else None, writer, False)
                self._gather_tensor(name, whole[label].scales, own[label].scales if own else None, writer, False)
            elif made["kind"] == "tensor":
                self._gather_tensor(name, whole[label], own.get(label), writer, made["is_cut"])
        return whole

    def _own(self, snapshot: Snapshot, name: str) -> Record:
        """What this rank has of a parameter, of the time of the snapshot."""
        if name not in self.weights:
            return Record(torch.empty(0), {})
        try:
            return snapshot.read(name)
        except Exception as failure:  # the others wait for this part; the checkpoint is not completed
            self.failed = self.failed or failure
            weight = self.weights[name]
            live = weight.to_float() if isinstance(weight, SplitMaster) else weight
            return Record(live, dict(self._optimizer.state(name)))

    def _gather_tensor(
        self, name: str, whole: torch.Tensor, own: torch.Tensor | None, writer: int, is_cut: bool
    ) -> None:
        """Fill `whole` on the writer: from all owners where a tensor is cut, else from the first one."""
        ranges = self._ownership.ranges(name)
        owners = [rank for rank, (start, stop) in enumerate(ranges) if stop > start]
        flat = whole.view(-1)
        parts = {rank: flat[slice(*ranges[rank])] if is_cut else flat for rank in (owners if is_cut else owners[:1])}
        rank = self.ranks.rank
        if rank in parts and rank == writer and own is not None:
            parts[rank].copy_(own.reshape(-1))
        sent = own.reshape(-1).contiguous() if rank in parts and own is not None else None
        received = {source: part for source, part in parts.items() if source != writer and part.numel()}
        self._channel.collect_now(writer, sent, received)


def part_of_state(ownership: Ownership, name: str, state: State) -> State:
    """What this rank owns of a parameter's whole optimizer state; nothing if it owns nothing of the parameter."""
    if not ownership.owns(name):
        return {}
    if ownership.whole:
        return state
    start, stop = ownership.own(name)
    found: State = {}
    for label, value in state.items():
        tensor = value.to_float() if isinstance(value, Int8State) else value
        is_cut = isinstance(tensor, torch.Tensor) and tensor.dim() > 0
        found[label] = tensor.reshape(-1)[start:stop] if is_cut else tensor
    return found


def _agree(ranks: Ranks, value: Any, error: Exception | None) -> Sequence[Any]:
    """What each rank brings. Raises an error on all ranks if one has an error."""
    records = ranks.checkpoints.gather_now({"value": value, "error": None if error is None else str(error)})
    for rank, each in enumerate(records):
        if each["error"] is not None:
            ranks.checkpoints.hear_out()
            raise _OnAllRanks(f"{ranks.name(rank)} could not write its part of the checkpoint: {each['error']}")
    return [each["value"] for each in records]
