"""Writes a trainer's state as a checkpoint, and restores it.

`start` takes a snapshot and writes it, in this thread or in the background. `check_fits`, then `restore_weights`,
`restore_optimizer` and `restore_user` load it. When to save is decided elsewhere, and the file format is
`relay.checkpoint.format`. Invariant: a checkpoint that does not fit is refused by `check_fits`, before any change.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import UNSET
from torch import nn

from hal.event import Event
from hal.host import Host
from relay.checkpoint import plain_values
from relay.checkpoint.format import Checkpoint, Progress, write_checkpoint
from relay.checkpoint.manifest import ParameterGroup
from relay.checkpoint.shards import DTYPES
from relay.eps.optimizer_state import BoundOptimizer, State
from relay.eps.server import ParameterServer
from relay.eps.snapshot import Snapshot
from relay.eps.store import LayerStore
from relay.errors import CheckpointError, RelayError


class Saving:
    """A checkpoint that is being written to `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None
        self._ended = threading.Event()

    def done(self) -> bool:
        """Whether writing has ended, successfully or not. Never blocks."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Raises CheckpointError if it could not be written."""
        self._ended.wait()
        if self.thread is not None:
            self.thread.join()
        _unreported.discard(self)
        if self.error is not None:
            raise self.error

    def end(self, error: BaseException | None) -> None:
        """Called once by the writer, with its error or None."""
        self.error = error
        if error is None:
            _unreported.discard(self)
        self._ended.set()


_unreported: set[Saving] = set()
"""Background checkpoints that may still fail, or that failed without anything having waited for them."""


@atexit.register
def _report_failures() -> None:
    """At the end of the process, when writers have ended: print the failures that nothing has waited for.

    The exit code cannot be changed here. To get an error, close the trainer or call `wait`.
    """
    for saving in sorted(_unreported, key=lambda one: str(one.path)):
        if saving.error is not None:
            what = f"{type(saving.error).__name__}: {saving.error}"
            print(f"relay: the checkpoint {str(saving.path)!r} was not written. {what}", file=sys.stderr)


def start(
    path: Path,
    model: nn.Module,
    server: ParameterServer,
    host: Host,
    pending: Sequence[Event],
    progress: Progress,
    budget: int,
    shard_bytes: int,
    background: bool,
) -> Saving:
    """Write a checkpoint of the state after the updates of `pending`.

    With `background` a thread writes it and training may continue at once; `Saving.wait` raises its errors. Otherwise
    the checkpoint is written when this returns, and errors are raised.
    """
    split = server.store.split
    weights = {
        name: split[name] if name in split else parameter.detach() for name, parameter in model.named_parameters()
    }
    snapshot = Snapshot(weights, server.optimizer, host, budget)
    # The next forward pass changes buffers, so they are copied now.
    buffers = {name: buffer.detach().cpu().clone() for name, buffer in model.named_buffers()}

    def write() -> None:
        write_checkpoint(path, snapshot, buffers, progress, shard_bytes)

    return write_from(snapshot, path, server, host, pending, write, background)


def write_from(
    snapshot: Snapshot,
    path: Path,
    server: ParameterServer,
    host: Host,
    pending: Sequence[Event],
    write_all: Callable[[], None],
    background: bool,
) -> Saving:
    """Begin a snapshot after the updates of `pending`, and write it by `write_all`, as `start` does."""
    saving = Saving(path)

    def begin() -> None:
        snapshot.begin()
        server.updater.snapshot = snapshot

    # In order with the updates: after those of this step, before those of the next.
    begun = host.run(begin, list(pending), "beginning of a checkpoint")

    def write() -> None:
        error: BaseException | None = None
        try:
            begun.wait()
            write_all()
        except BaseException as failure:  # `Saving.wait` raises it
            error = failure
        finally:
            server.updater.snapshot = None
            snapshot.end()
            saving.end(error)

    if background:
        # Not a daemon: a script that ends before its checkpoint is written waits for it.
        _unreported.add(saving)
        saving.thread = threading.Thread(target=write, name="relay-checkpoint")
        saving.thread.start()
    else:
        write()
        saving.wait()
    return saving


def group_names(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> list[ParameterGroup]:
    """Parameter groups, with names instead of parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        ParameterGroup(
            [names[id(parameter)] for parameter in group["params"] if id(parameter) in names],
            states_of({key: value for key, value in group.items() if key not in ("params", "param_names")}),
        )
        for group in groups
    ]


def states_of(user: Mapping[str, Any]) -> dict[str, Any]:
    """What is stored for a user's objects: a copy of their `state_dict()`, or of the plain value itself.

    Raises ValueError, with its location, for a value that is not plain.
    """
    states = {
        name: value.state_dict() if callable(getattr(value, "state_dict", None)) else value
        for name, value in user.items()
    }
    # A copy, since objects change their state while a checkpoint is written.
    return {name: plain_values.decode(plain_values.encode(state, name), name) for name, state in states.items()}


def check_fits(
    checkpoint: Checkpoint,
    model: nn.Module,
    store: LayerStore,
    optimizer: BoundOptimizer,
    groups: Sequence[Mapping[str, Any]],
    weights_only: bool,
    user: Mapping[str, Any],
) -> None:
    """Raise CheckpointError, naming the field, if a checkpoint is of another model or optimizer."""
    manifest, file = checkpoint.manifest, str(checkpoint.path)
    tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    missing = [name for name in tensors if name not in manifest.parameters]
    unknown = [name for name in manifest.parameters if name not in tensors]
    if missing or unknown:
        raise CheckpointError(
            f"the checkpoint is of another model: it lacks {_some(missing)} and has {_some(unknown)} besides",
            file=file,
            field="parameters",
        )
    for name, tensor in tensors.items():
        entry, dtype = manifest.parameters[name], store.dtype_of(name, tensor)
        if entry.shape != tuple(tensor.shape) or not _holds(dtype, DTYPES[entry.dtype]):
            raise CheckpointError(
                f"the model has {dtype}{list(tensor.shape)}, the checkpoint {entry.dtype}{list(entry.shape)}",
                file=file,
                field=f"parameters[{name!r}]",
            )
    for name in user:
        if name not in manifest.user:
            raise CheckpointError(
                f"the checkpoint holds no such state; it was saved with {_some(list(manifest.user))}",
                file=file,
                field=f"user.{name}",
            )
    if weights_only:
        return
    if manifest.optimizer.kind != optimizer.kind:
        raise CheckpointError(
            f"it was saved with {manifest.optimizer.kind}, the trainer has {optimizer.kind}. Build the trainer with "
            "that, or load with weights_only=True.",
            file=file,
            field="optimizer.kind",
        )
    own = group_names(model, groups)
    if [sorted(group.names) for group in own] != [sorted(group.names) for group in manifest.optimizer.groups]:
        raise CheckpointError(
            f"its parameter groups are of {[len(group.names) for group in manifest.optimizer.groups]} parameters, the "
            f"trainer's of {[len(group.names) for group in own]}, or of others. Build the trainer with the same "
            "param_groups, or load with weights_only=True.",
            file=file,
            field="optimizer.groups",
        )
    for number, (ours, stored) in enumerate(zip(own, manifest.optimizer.groups, strict=True)):
        values, theirs = ours.values, stored.values
        for key, value in theirs.items():
            # Schedules keep numbers of their own there, such as initial_lr.
            if key not in values and (key in ("params", "param_names") or type(value) not in (int, float, bool)):
                raise CheckpointError(
                    f"{optimizer.kind} has no such hyperparameter; received {value!r:.80}",
                    file=file,
                    field=f"optimizer.groups[{number}].values.{key}",
                )
        for key, value in values.items():
            if not _of_kind(value, theirs.get(key)):
                was = f"{key}={theirs[key]!r:.80}" if key in theirs else f"no {key}"
                raise CheckpointError(
                    f"it was saved with {optimizer.kind} and {was}, the trainer has {key}={value!r}. Build the trainer "
                    "with that, or load with weights_only=True.",
                    file=file,
                    field=f"optimizer.groups[{number}].values.{key}",
                )
    for name, parameter in manifest.parameters.items():
        for label, state in parameter.states.items():
            flat = state.shard_of_scales is not UNSET
            whole = (tensors[name].numel(),) if flat else tuple(tensors[name].shape)
            if not optimizer.allows(label, state.shape, whole):
                raise CheckpointError(
                    f"a state of shape {list(state.shape)} does not go with a parameter of {list(tensors[name].shape)}",
                    file=file,
                    field=f"parameters[{name!r}].states[{label!r}]",
                )
        try:
            dtypes = {label: DTYPES[state.dtype] for label, state in parameter.states.items()}
            optimizer.check(name, [*parameter.states, *parameter.values], dtypes)
        except ValueError as wrong:
            raise CheckpointError(str(wrong), file=file, field=f"parameters[{name!r}].states") from wrong


def restore_weights(checkpoint: Checkpoint, model: nn.Module, store: LayerStore) -> None:
    """Copy parameters and buffers into a model and its store, one after the other."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        store.write(name, tensor, checkpoint.weight(name))


def restore_optimizer(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: BoundOptimizer,
    groups: Sequence[dict[str, Any]],
    part_of: Callable[[str, State], State],
) -> None:
    """Load the optimizer's states, and the hyperparameters of the parameter groups.

    `part_of` gives what this process holds of a parameter's state.
    """
    for name, _ in model.named_parameters():
        optimizer.restore(name, part_of(name, checkpoint.state(name)))
    for group, stored in zip(groups, checkpoint.manifest.optimizer.groups, strict=True):
        for key, value in stored.values.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def whole_state(name: str, state: State) -> State:
    """What one process alone holds of a parameter's state: all of it."""
    return state


def restore_user(checkpoint: Checkpoint, user: Mapping[str, Any]) -> None:
    """Load the states of schedulers, data and the like. Raises CheckpointError if one refuses its state."""
    for name, target in user.items():
        try:
            target.load_state_dict(checkpoint.manifest.user[name])
        except RelayError:
            raise
        except Exception as refused:
            raise CheckpointError(
                f"{type(target).__name__} did not take its state: {type(refused).__name__}: {refused}",
                file=str(checkpoint.path),
                field=f"user.{name}",
            ) from refused


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether tensors of `dtype` hold every value of the other dtype."""
    return dtype is other or (dtype is torch.float32 and other in (torch.bfloat16, torch.float16))


def _of_kind(value: Any, other: Any) -> bool:
    """Whether a hyperparameter can replace another: numbers for numbers, tuples of equal length, else the same type."""
    if isinstance(value, bool) or isinstance(other, bool):
        return isinstance(value, (bool, type(None))) and isinstance(other, (bool, type(None)))
    if isinstance(value, (int, float, torch.Tensor)):
        return isinstance(other, (int, float, torch.Tensor))
    if isinstance(value, (tuple, list)):
        return isinstance(other, (tuple, list)) and len(value) == len(other) and all(map(_of_kind, value, other))
    return value is None or other is None or isinstance(other, type(value))


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}" if names else "nothing"
