"""The manifest of a checkpoint: one JSON file with its content and the checksums of its shards.

A manifest is untrusted input: every field is checked for its type and bounds before it is used, and errors name file
and field. The Structs here are the schema of the file. No shard is opened here. Invariant: a `Manifest` that
`read_manifest` returns is consistent (its own checksum matches, every tensor is in a shard that it lists, and no name
can leave the folder).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hal import schema
from relay.checkpoint import plain_values
from relay.checkpoint.shards import DTYPES, TensorPlan
from relay.errors import CheckpointError
from relay.optim.int8_state import group_count

MANIFEST = "manifest.json"
VERSION = 1
LARGEST = 256 * 2**20
"""The most bytes that a manifest may have."""

_LARGEST_TENSOR = 2**53
_Whole = Annotated[int, Meta(ge=0)]
_Text = Annotated[str, Meta(max_length=1000, description="a string of at most 1000 characters")]
_ShardName = Annotated[
    str,
    Meta(
        pattern=r"\Ashard-\d{5,9}\.safetensors\Z",
        description="a name like shard-00000.safetensors, of a file in this folder",
    ),
]
_Label = Annotated[
    str,
    Meta(pattern=r"\A[A-Za-z0-9_.]{1,100}\Z", description="the name of a state, of letters, digits, '_' and '.'"),
]
_Dtype = Annotated[str, Meta(pattern=rf"\A({'|'.join(DTYPES)})\Z", description=f"one of {', '.join(DTYPES)}")]


class ShardEntry(msgspec.Struct, frozen=True):
    """A shard: file name, bytes, sha256 in hexadecimal."""

    file: _ShardName
    size: Annotated[int, Meta(ge=0, le=2**53)] = msgspec.field(name="bytes")
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z", description="64 hexadecimal digits")]


class TensorEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stored tensor: the shard (an index into the list), dtype in safetensors' names, shape.

    With `shard_of_scales` it is an 8-bit state: codes here, their scales there, `signed` as in Int8State.
    """

    shard: _Whole
    dtype: _Dtype
    shape: Annotated[
        tuple[_Whole, ...], Meta(max_length=32, description="a list of at most 32 whole numbers of at least 0")
    ]
    shard_of_scales: _Whole | UnsetType = msgspec.field(default=UNSET, name="scales")
    signed: bool | UnsetType = UNSET

    def __post_init__(self) -> None:
        if math.prod(max(extent, 1) for extent in self.shape) > _LARGEST_TENSOR:
            raise ValueError(f"the shape {list(self.shape)!r:.80} is larger than any tensor can be")
        if self.signed is UNSET and self.shard_of_scales is UNSET:
            return
        if UNSET in (self.signed, self.shard_of_scales) or self.dtype != "U8" or len(self.shape) != 1:
            raise ValueError("expected 'scales' and 'signed' together, for codes of dtype U8 with one dimension")


class ParameterEntry(TensorEntry, frozen=True, omit_defaults=True):
    """A parameter or buffer with its optimizer states; `values` are the states that are no tensors."""

    buffer: bool = False
    states: dict[_Label, TensorEntry] = {}
    values: dict[_Label, Any] = {}


class ParameterGroup(msgspec.Struct, frozen=True):
    """A parameter group of the optimizer: the names of its parameters, and its hyperparameters."""

    names: list[str]
    values: dict[str, Any]


class OptimizerEntry(msgspec.Struct, frozen=True):
    """The optimizer: its kind and its parameter groups."""

    kind: _Text
    groups: list[ParameterGroup]


class LossScaleEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of a dynamic loss scale, as `LossScale.state` returns it."""

    value: Annotated[float, Meta(gt=0, le=2.0**127)]
    good_steps: _Whole
    growth_interval: _Whole


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds. `loss_scale` is None without one; `user` is what the caller gave to be kept."""

    step: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    seed: Annotated[int, Meta(ge=0, description="a whole number from 0 to 2**64 - 1")]
    loss_scale: LossScaleEntry | None = None
    optimizer: OptimizerEntry
    options: dict[str, Any]
    user: dict[str, Any]
    parameters: dict[str, ParameterEntry]
    shards: list[ShardEntry]
    software: _Text

    def describe(self) -> str:
        """The checkpoint in words: its step, and a number that another one does not have."""
        return f"step {self.step}, checksum {_own_hash([shard.sha256 for shard in self.shards])[:16]}"


class _Head(msgspec.Struct, frozen=True):
    """What is checked before the rest of the file is believed."""

    format: Annotated[
        Literal["relay checkpoint"],
        Meta(description="'relay checkpoint'", extra={"advice": "This is no manifest of a checkpoint"}),
    ]
    version: Annotated[
        Literal[1],
        Meta(description=str(VERSION), extra={"advice": "Read it with the version of Relay that wrote it"}),
    ]
    sha256: str


def weight_key(name: str) -> str:
    """The key of a parameter or buffer in its shard."""
    return f"weights/{name}"


def state_key(label: str, name: str) -> str:
    """The key of an optimizer state in its shard."""
    return f"states/{label}/{name}"


def scales_key(label: str, name: str) -> str:
    """Under what the scales of an 8-bit state lie."""
    return f"scales/{label}/{name}"


def tensors_of(name: str, entry: ParameterEntry) -> list[tuple[int, TensorPlan]]:
    """All tensors of a parameter with their shards, in the order in which they are stored."""
    result = [(entry.shard, TensorPlan(weight_key(name), entry.dtype, entry.shape))]
    for label, state in entry.states.items():
        result.append((state.shard, TensorPlan(state_key(label, name), state.dtype, state.shape)))
        if state.shard_of_scales is not UNSET:
            groups = group_count(math.prod(state.shape))
            result.append((state.shard_of_scales, TensorPlan(scales_key(label, name), "F32", (groups,))))
    return result


def write_manifest(path: Path, manifest: Manifest) -> bytes:
    """The manifest as the bytes of its file. ValueError for user values that are not plain."""
    plain = _with_values(manifest, plain_values.encode)
    body = {"format": "relay checkpoint", "version": VERSION, **msgspec.to_builtins(plain)}
    text = json.dumps({"sha256": _own_hash(body), **body}, indent=1, allow_nan=False) + "\n"
    data = text.encode()
    if len(data) > LARGEST:
        raise CheckpointError(f"the manifest would have {len(data):,} bytes; at most {LARGEST:,}", file=str(path))
    return data


def read_manifest(folder: Path) -> Manifest:
    """Read and check. Raises CheckpointError, naming file and field."""
    path = folder / MANIFEST
    try:
        with path.open("rb") as file:
            # Python takes the memory of as many bytes as are asked for.
            data = file.read(min(os.fstat(file.fileno()).st_size, LARGEST) + 1)
    except FileNotFoundError as missing:
        raise CheckpointError(f"'{folder}' is no checkpoint: it has no {MANIFEST}", file=str(path)) from missing
    except OSError as refused:
        raise CheckpointError(f"the file cannot be read: {refused.strerror}", file=str(path)) from refused
    if len(data) > LARGEST:
        raise CheckpointError(f"the file has more than {LARGEST:,} bytes", file=str(path))
    try:
        raw = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as wrong:
        raise CheckpointError(f"the file is not JSON: {wrong}", file=str(path)) from wrong

    def refuse(field: str, message: str) -> CheckpointError:
        return CheckpointError(message, file=str(path), field=field)

    head = schema.read(raw, _Head, refuse)
    try:
        fits = head.sha256 == _own_hash({key: value for key, value in raw.items() if key != "sha256"})
    except (ValueError, RecursionError):
        fits = False
    if not fits:
        raise refuse("sha256", "the manifest does not fit its own checksum: it was changed or damaged")
    manifest = schema.read(raw, Manifest, refuse)
    _check_together(manifest, refuse)

    def decoded(values: dict[str, Any], field: str) -> dict[str, Any]:
        try:
            value = plain_values.decode(values, field)
        except (ValueError, RecursionError) as wrong:
            raise refuse(field, str(wrong)) from wrong
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise refuse(field, "expected a mapping with names as keys")
        return value

    return _with_values(manifest, decoded)


def _check_together(manifest: Manifest, refuse: Callable[[str, str], CheckpointError]) -> None:
    """Raise an error for fields that contradict each other."""
    if manifest.seed >= 2**64:
        raise refuse("seed", f"expected a whole number from 0 to 2**64 - 1, received {manifest.seed!r:.40}")
    if len({shard.file for shard in manifest.shards}) != len(manifest.shards):
        raise refuse("shards", "a file is listed twice")
    for name, entry in manifest.parameters.items():
        for label, tensor in {"": entry, **entry.states}.items():
            field = f"parameters[{name!r}]" + (f".states[{label!r}]" if label else "")
            for key, shard in (("shard", tensor.shard), ("scales", tensor.shard_of_scales)):
                if shard is not UNSET and shard >= len(manifest.shards):
                    raise refuse(
                        f"{field}.{key}",
                        f"expected the index of one of {len(manifest.shards)} shards, received {shard}",
                    )
    seen: set[str] = set()
    for number, group in enumerate(manifest.optimizer.groups):
        for name in group.names:
            if name not in manifest.parameters or name in seen:
                raise refuse(f"optimizer.groups[{number}].names", f"{name!r:.200} is no parameter, or in two groups")
            seen.add(name)


def _with_values(manifest: Manifest, change: Callable[[dict[str, Any], str], dict[str, Any]]) -> Manifest:
    """The manifest with its plain values encoded or decoded. `change` is given the values and their field."""
    replaced = msgspec.structs.replace
    groups = [
        replaced(group, values=change(group.values, f"optimizer.groups[{number}].values"))
        for number, group in enumerate(manifest.optimizer.groups)
    ]
    parameters = {
        name: replaced(entry, values=change(entry.values, f"parameters[{name!r}].values"))
        for name, entry in manifest.parameters.items()
    }
    return replaced(
        manifest,
        options=change(manifest.options, "options"),
        user=change(manifest.user, "user"),
        optimizer=replaced(manifest.optimizer, groups=groups),
        parameters=parameters,
    )


def _own_hash(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
