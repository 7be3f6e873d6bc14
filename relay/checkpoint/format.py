"""The format of checkpoints on disk: a folder of safetensors shards and a manifest.

A checkpoint is written from a snapshot, one parameter at a time, so writing takes the memory of one parameter. It is
written under a temporary name, synced to the disk, read back and compared; only then it gets its name, and an earlier
checkpoint of that name is deleted. Reading maps the shards. When to save (`relay.checkpoint_manager`) and what a
trainer does with a checkpoint (`relay.run_state`) are not decided here.

Invariant: whenever the machine stops, the folder of that name is a whole checkpoint or does not exist. While a
checkpoint replaces another, the old one stays under another name until the new one has its name; `find` finds both.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import torch
from msgspec import UNSET

from relay.checkpoint.manifest import (
    MANIFEST,
    LossScaleEntry,
    Manifest,
    OptimizerEntry,
    ParameterEntry,
    ParameterGroup,
    ShardEntry,
    TensorEntry,
    read_manifest,
    scales_key,
    state_key,
    tensors_of,
    weight_key,
    write_manifest,
)
from relay.checkpoint.shards import DTYPES, NAMES, ShardWriter, TensorPlan, hash_file, sync_folder
from relay.eps.snapshot import Record, Snapshot
from relay.errors import CheckpointError
from relay.optim.int8_state import Int8State
from relay.optim.optimizers import State

SHARD_BYTES = 256 * 2**20
"""Parameters share shards up to this size. A larger parameter has shards of its own."""


@dataclass
class Progress:
    """What a checkpoint stores besides tensors. `user` are states of schedulers, data and so on as plain values."""

    step: int
    seed: int
    loss_scale: dict[str, float] | None
    optimizer: str
    groups: list[ParameterGroup]
    options: dict[str, Any]
    user: dict[str, Any] = field(default_factory=dict)


def write_checkpoint(
    path: Path,
    snapshot: Snapshot,
    buffers: Mapping[str, torch.Tensor],
    progress: Progress,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint at `path`, replacing the one that is there, from a snapshot that has begun.

    Raises CheckpointError, with the earlier checkpoint untouched.
    """
    with replacing(path) as partial:
        _write_folder(partial, snapshot, buffers, progress, shard_bytes)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A context in which a checkpoint is written to the folder that it gives. Then it is verified and named `path`.

    Raises CheckpointError, with the earlier checkpoint untouched.
    """
    path = Path(os.path.abspath(path))
    _check_path(path)
    partial = partial_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        Checkpoint(partial).verify()
        _replace(partial, path)
    except OSError as failure:
        raise CheckpointError(
            f"the checkpoint could not be written: {failure.strerror or failure}. An earlier checkpoint is untouched. "
            "Free space or give another folder, and save again.",
            file=str(failure.filename or path),
        ) from failure
    except ValueError as wrong:
        raise CheckpointError(f"the checkpoint cannot be written: {wrong}", file=str(path)) from wrong
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def partial_path(path: Path) -> Path:
    """Where a checkpoint is written before it has its name."""
    path = Path(os.path.abspath(path))
    return path.with_name(f".{path.name}.partial")


def find(path: Path) -> Path:
    """The path of the checkpoint named `path`. It differs from `path` if replacing the checkpoint was interrupted."""
    previous = path.with_name(f".{path.name}.previous")
    return previous if not path.exists() and (previous / MANIFEST).is_file() else path


def remove(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a half-deleted one is never found under its name."""
    doomed = path.with_name(f".{path.name}.partial")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


class Checkpoint:
    """A checkpoint on disk, opened for reading. Opening reads the manifest only. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = find(Path(path))
        self.manifest: Manifest = read_manifest(self.path)
        self._shards: dict[int, Any] = {}

    def verify(self) -> None:
        """Read everything once: sizes, checksums, and that the shards hold what the manifest says.

        Raises CheckpointError, naming the file and what is wrong with it.
        """
        for shard in self.manifest.shards:
            file = self.path / shard.file
            if hash_file(file, shard.size) != shard.sha256:
                raise CheckpointError(
                    "the file does not match its checksum in the manifest: it was damaged or changed", file=str(file)
                )
        self.check_layout()

    def check_layout(self) -> None:
        """Check that every tensor is in its shard, with its dtype and shape. Reads headers only."""
        for name, entry in self.manifest.parameters.items():
            for shard, plan in tensors_of(name, entry):
                file = str(self.path / self.manifest.shards[shard].file)
                try:
                    part = self._open(shard).get_slice(plan.key)
                    found = part.get_dtype(), tuple(part.get_shape())
                except safetensors.SafetensorError as missing:
                    raise CheckpointError(
                        f"the shard does not hold it: {missing}", file=file, field=plan.key
                    ) from missing
                if found != (plan.dtype, plan.shape):
                    raise CheckpointError(
                        f"the shard has {found[0]}{list(found[1])}, the manifest {plan.dtype}{list(plan.shape)}",
                        file=file,
                        field=plan.key,
                    )

    def weight(self, name: str) -> torch.Tensor:
        """A parameter or buffer, mapped from the file."""
        return self._tensor(self.manifest.parameters[name].shard, weight_key(name))

    def state(self, name: str) -> State:
        """A parameter's optimizer state, as `BoundOptimizer.restore` takes it; tensors are mapped from the file."""
        entry = self.manifest.parameters[name]
        result: State = dict(entry.values)
        for label, state in entry.states.items():
            tensor = self._tensor(state.shard, state_key(label, name))
            if state.shard_of_scales is not UNSET:
                scales = self._tensor(state.shard_of_scales, scales_key(label, name))
                result[label] = Int8State(tensor.view(-1), scales, state.signed is True)
            else:
                result[label] = tensor
        return result

    def _tensor(self, shard: int, key: str) -> torch.Tensor:
        tensor: torch.Tensor = self._open(shard).get_tensor(key)
        return tensor

    def _open(self, shard: int) -> Any:
        if shard not in self._shards:
            file = self.path / self.manifest.shards[shard].file
            try:
                self._shards[shard] = safetensors.safe_open(file, framework="pt")
            except (OSError, safetensors.SafetensorError) as wrong:
                raise CheckpointError(f"the file is not a valid safetensors file: {wrong}", file=str(file)) from wrong
        return self._shards[shard]


def _check_path(path: Path) -> None:
    if path.is_dir() and not (path / MANIFEST).is_file() and any(path.iterdir()):
        raise CheckpointError("this folder exists and is not a checkpoint; give another path", file=str(path))
    if path.exists() and not path.is_dir():
        raise CheckpointError("this is a file; give the path of a folder", file=str(path))


def _replace(partial: Path, path: Path) -> None:
    previous = path.with_name(f".{path.name}.previous")
    if path.exists():
        shutil.rmtree(previous, ignore_errors=True)
        path.rename(previous)
    partial.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _write_folder(
    folder: Path,
    snapshot: Snapshot,
    buffers: Mapping[str, torch.Tensor],
    progress: Progress,
    shard_bytes: int,
) -> None:
    records = {name: Record(tensor, {}) for name, tensor in buffers.items()}
    plan = ShardPlan({**snapshot.layout, **records}, records, shard_bytes)

    def read(name: str) -> Record:
        return records[name] if name in records else snapshot.read(name)

    def release(name: str, record: Record) -> None:
        if name not in records:
            snapshot.release(record)

    entries: dict[int, ShardEntry] = {}
    left = list(range(len(plan.batches)))
    while left:
        # What has been copied already is written first, since copies take memory.
        number = max(left, key=lambda batch: (snapshot.copied(plan.batches[batch]), -batch))
        left.remove(number)
        entries |= write_batch(folder, plan, plan.batches[number], read, release)
    write_contents(folder, progress, plan, entries)


def write_batch(
    folder: Path,
    plan: ShardPlan,
    names: Sequence[str],
    read: Callable[[str], Record],
    release: Callable[[str, Record], None],
) -> dict[int, ShardEntry]:
    """Write the shards of one batch of a plan: `read` gives a parameter, `release` is called when it is written."""
    writers: dict[int, ShardWriter] = {}
    entries = {}
    try:
        for name in names:
            record = read(name)
            stored = tensors_of(name, plan.parameters[name])
            for (shard, _), tensor in zip(stored, record.tensors(), strict=True):
                if shard not in writers:
                    writers[shard] = ShardWriter(folder / _shard_name(shard), plan.tensors[shard])
                writers[shard].add(tensor.contiguous())
            release(name, record)
        for shard, writer in writers.items():
            writer.close()
            entries[shard] = ShardEntry(writer.path.name, writer.size, writer.sha256)
    finally:
        for writer in writers.values():
            writer.abandon()
    return entries


def write_contents(folder: Path, progress: Progress, plan: ShardPlan, entries: Mapping[int, ShardEntry]) -> None:
    """Write the manifest of a folder in which all shards of a plan have been written."""
    manifest = Manifest(
        step=progress.step,
        seed=progress.seed,
        loss_scale=None if progress.loss_scale is None else msgspec.convert(progress.loss_scale, LossScaleEntry),
        optimizer=OptimizerEntry(progress.optimizer, progress.groups),
        options=progress.options,
        user=progress.user,
        parameters=plan.parameters,
        shards=[entries[shard] for shard in sorted(entries)],
        software=f"torch {torch.__version__}",
    )
    path = folder / MANIFEST
    with path.open("xb") as file:
        file.write(write_manifest(path, manifest))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


class ShardPlan:
    """Which tensor goes to which shard. Tensors of different item sizes have different shards, so all are aligned.

    `described` are the parameters and buffers (`buffers` names these); `batches` are the names that share shards.
    """

    def __init__(self, described: Mapping[str, Record], buffers: Collection[str], shard_bytes: int) -> None:
        self.parameters: dict[str, ParameterEntry] = {}
        self.tensors: list[list[TensorPlan]] = []
        self.batches: list[list[str]] = []
        self._by_width: dict[int, int] = {}
        filled = shard_bytes
        for name, record in described.items():
            if filled + record.size > shard_bytes:
                self.batches.append([])
                self._by_width = {}
                filled = 0
            self.batches[-1].append(name)
            self._add(name, record, name in buffers)
            filled += record.size

    def _add(self, name: str, record: Record, buffer: bool) -> None:
        weight = self._entry(name, record.weight)
        entry = ParameterEntry(weight.shard, weight.dtype, weight.shape, buffer=buffer)
        for label, value in record.states.items():
            if isinstance(value, Int8State):
                codes, scales = self._shard(1), self._shard(4)
                shape = tuple(value.codes.shape)
                entry.states[label] = TensorEntry(codes, "U8", shape, scales, value.signed)
            elif isinstance(value, torch.Tensor):
                entry.states[label] = self._entry(f"state {label} of {name}", value)
            else:
                entry.values[label] = value
        self.parameters[name] = entry
        for shard, tensor in tensors_of(name, entry):
            self.tensors[shard].append(tensor)

    def _entry(self, what: str, tensor: torch.Tensor) -> TensorEntry:
        if tensor.dtype not in NAMES:
            raise ValueError(f"{what} has dtype {tensor.dtype}, which safetensors cannot hold")
        dtype = NAMES[tensor.dtype]
        return TensorEntry(self._shard(DTYPES[dtype].itemsize), dtype, tuple(tensor.shape))

    def _shard(self, width: int) -> int:
        if width not in self._by_width:
            self._by_width[width] = len(self.tensors)
            self.tensors.append([])
        return self._by_width[width]


def _shard_name(number: int) -> str:
    return f"shard-{number:05}.safetensors"
