"""The manifest of a checkpoint: one JSON file with its content and the checksums of its shards.

A manifest is untrusted input: every field is checked for its type and bounds before it is used, and errors name file
and field. No shard is opened here. Invariant: a `Manifest` that `read_manifest` returns is consistent (its own checksum
matches, every tensor is in a shard that it lists, and no name can leave the folder).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relay.checkpoint import plain_values
from relay.checkpoint.shards import DTYPES, TensorPlan
from relay.errors import CheckpointError
from relay.optim.int8_state import group_count

MANIFEST = "manifest.json"
FORMAT = "relay checkpoint"
VERSION = 1
LARGEST = 256 * 2**20
"""The most bytes that a manifest may have."""

_SHARD_NAME = re.compile(r"shard-\d{5,9}\.safetensors")
_LABEL = re.compile(r"[A-Za-z0-9_.]{1,100}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST_STEP = 2**63
WHOLE = 2**53


@dataclass(frozen=True)
class ShardEntry:
    """A shard: file name, bytes, sha256 in hexadecimal."""

    file: str
    size: int
    sha256: str


@dataclass(frozen=True)
class TensorEntry:
    """A stored tensor: the shard (an index into the list), dtype in safetensors' names, shape.

    With `shard_of_scales` it is an 8-bit state: codes here, their scales there, `signed` as in Int8State.
    """

    shard: int
    dtype: str
    shape: tuple[int, ...]
    shard_of_scales: int | None = None
    signed: bool = False


@dataclass
class ParameterEntry:
    """A parameter or buffer with its optimizer states; `values` are the states that are no tensors."""

    tensor: TensorEntry
    buffer: bool
    states: dict[str, TensorEntry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class OptimizerEntry:
    """The optimizer: its kind, and for each parameter group the names in it and its hyperparameters."""

    kind: str
    groups: list[tuple[list[str], dict[str, Any]]]


@dataclass
class Manifest:
    """What a checkpoint holds. `loss_scale` is None without one; `user` is what the caller gave to be kept."""

    step: int
    seed: int
    loss_scale: dict[str, float] | None
    optimizer: OptimizerEntry
    options: dict[str, Any]
    user: dict[str, Any]
    parameters: dict[str, ParameterEntry]
    shards: list[ShardEntry]
    software: str = ""


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
    result = [(entry.tensor.shard, TensorPlan(weight_key(name), entry.tensor.dtype, entry.tensor.shape))]
    for label, state in entry.states.items():
        result.append((state.shard, TensorPlan(state_key(label, name), state.dtype, state.shape)))
        if state.shard_of_scales is not None:
            groups = group_count(math.prod(state.shape))
            result.append((state.shard_of_scales, TensorPlan(scales_key(label, name), "F32", (groups,))))
    return result


def write_manifest(path: Path, manifest: Manifest) -> bytes:
    """The manifest as the bytes of its file. ValueError for user values that are not plain."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "software": manifest.software,
        "step": manifest.step,
        "seed": manifest.seed,
        "loss_scale": manifest.loss_scale,
        "options": plain_values.encode(manifest.options, "options"),
        "user": plain_values.encode(manifest.user, "user"),
        "optimizer": {
            "kind": manifest.optimizer.kind,
            "groups": [
                {"names": names, "values": plain_values.encode(values, f"parameter group {number}")}
                for number, (names, values) in enumerate(manifest.optimizer.groups)
            ],
        },
        "shards": [{"file": one.file, "bytes": one.size, "sha256": one.sha256} for one in manifest.shards],
        "parameters": {name: _parameter_text(name, entry) for name, entry in manifest.parameters.items()},
    }
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
            data = file.read(LARGEST + 1)
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
    return _Reader(str(path)).manifest(raw)


class _Reader:
    """Checks one manifest field by field."""

    def __init__(self, file: str) -> None:
        self._file = file

    def fail(self, name: str, message: str) -> CheckpointError:
        return CheckpointError(message, file=self._file, field=name)

    def manifest(self, raw: Any) -> Manifest:
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise self.fail("format", f"expected {FORMAT!r}; this is no manifest of a checkpoint")
        version = raw.get("version")
        if version != VERSION or type(version) is not int:
            raise self.fail(
                "version", f"expected {VERSION}, received {version!r:.40}. Read it with the version that wrote it."
            )
        body = {key: value for key, value in raw.items() if key != "sha256"}
        try:
            fits = raw.get("sha256") == _own_hash(body)
        except (ValueError, RecursionError):
            fits = False
        if not fits:
            raise self.fail("sha256", "the manifest does not fit its own checksum: it was changed or damaged")
        shards = [self._shard(number, one) for number, one in enumerate(self._list(raw, "shards"))]
        if len({one.file for one in shards}) != len(shards):
            raise self.fail("shards", "a file is listed twice")
        parameters = {
            name: self._parameter(name, one, len(shards)) for name, one in self._dict(raw, "parameters").items()
        }
        return Manifest(
            step=self._int(raw, "step", _LARGEST_STEP),
            seed=self._int(raw, "seed", 2**64 - 1),
            loss_scale=self._loss_scale(raw),
            optimizer=self._optimizer(self._dict(raw, "optimizer"), parameters),
            options=self._plain_dict(raw, "options"),
            user=self._plain_dict(raw, "user"),
            parameters=parameters,
            shards=shards,
            software=self._text(raw, "software", "software"),
        )

    def _shard(self, number: int, raw: Any) -> ShardEntry:
        where = f"shards[{number}]"
        if not isinstance(raw, dict):
            raise self.fail(where, "expected an object")
        name, sha256 = raw.get("file"), raw.get("sha256")
        if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name):
            raise self.fail(
                f"{where}.file", f"expected a name like shard-00000.safetensors in this folder, received {name!r:.80}"
            )
        if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            raise self.fail(f"{where}.sha256", f"expected 64 hexadecimal digits, received {sha256!r:.80}")
        return ShardEntry(name, self._int(raw, "bytes", WHOLE, where), sha256)

    def _parameter(self, name: str, raw: Any, shards: int) -> ParameterEntry:
        where = f"parameters[{name!r:.200}]"
        if not isinstance(raw, dict):
            raise self.fail(where, "expected an object")
        buffer = raw.get("buffer", False)
        if not isinstance(buffer, bool):
            raise self.fail(f"{where}.buffer", f"expected true or false, received {buffer!r:.40}")
        entry = ParameterEntry(self._tensor(raw, where, shards), buffer)
        for label, state in self._dict(raw, "states", where, optional=True).items():
            here = f"{where}.states[{label!r:.100}]"
            self._label(label, here)
            if not isinstance(state, dict):
                raise self.fail(here, "expected an object")
            entry.states[label] = self._tensor(state, here, shards)
        for label, value in self._dict(raw, "values", where, optional=True).items():
            here = f"{where}.values[{label!r:.100}]"
            self._label(label, here)
            entry.values[label] = self._plain(value, here)
        return entry

    def _label(self, label: str, where: str) -> None:
        if not _LABEL.fullmatch(label):
            raise self.fail(where, "expected a state's name of letters, digits, '_' and '.'")

    def _tensor(self, raw: dict[str, Any], where: str, shards: int) -> TensorEntry:
        dtype, shape = raw.get("dtype"), raw.get("shape")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self.fail(f"{where}.dtype", f"expected one of {', '.join(DTYPES)}, received {dtype!r:.40}")
        if not isinstance(shape, list) or len(shape) > 32 or not all(type(one) is int and one >= 0 for one in shape):
            raise self.fail(f"{where}.shape", f"expected a list of whole numbers, received {shape!r:.80}")
        if math.prod(max(one, 1) for one in shape) > WHOLE:
            raise self.fail(f"{where}.shape", f"{shape!r:.80} is larger than any tensor can be")
        shard = self._int(raw, "shard", shards - 1, where)
        if "scales" not in raw and "signed" not in raw:
            return TensorEntry(shard, dtype, tuple(shape))
        signed = raw.get("signed")
        if not isinstance(signed, bool) or dtype != "U8" or len(shape) != 1:
            raise self.fail(f"{where}.signed", f"expected true or false beside flat U8 codes, received {signed!r:.40}")
        return TensorEntry(shard, dtype, tuple(shape), self._int(raw, "scales", shards - 1, where), signed)

    def _optimizer(self, raw: dict[str, Any], parameters: Mapping[str, ParameterEntry]) -> OptimizerEntry:
        groups = []
        seen: set[str] = set()
        for number, one in enumerate(self._list(raw, "groups", "optimizer")):
            where = f"optimizer.groups[{number}]"
            if not isinstance(one, dict):
                raise self.fail(where, "expected an object")
            names = self._list(one, "names", where)
            for name in names:
                if not isinstance(name, str) or name not in parameters or name in seen:
                    raise self.fail(f"{where}.names", f"{name!r:.200} is no parameter, or in two groups")
                seen.add(name)
            groups.append((names, self._plain_dict(one, "values", where)))
        return OptimizerEntry(self._text(raw, "kind", "optimizer.kind"), groups)

    def _loss_scale(self, raw: dict[str, Any]) -> dict[str, float] | None:
        scale = raw.get("loss_scale")
        if scale is None:
            return None
        expected = {"value", "good_steps", "growth_interval"}
        if not isinstance(scale, dict) or set(scale) != expected:
            raise self.fail("loss_scale", f"expected null or {sorted(expected)}")
        for key, value in scale.items():
            if type(value) not in (int, float) or not 0 <= value <= 2.0**127:
                raise self.fail(f"loss_scale.{key}", f"expected a number from 0, received {value!r:.40}")
        if scale["value"] <= 0:
            raise self.fail("loss_scale.value", f"expected a number above 0, received {scale['value']!r}")
        return scale

    def _plain(self, raw: Any, where: str) -> Any:
        try:
            return plain_values.decode(raw, where)
        except (ValueError, RecursionError) as wrong:
            raise self.fail(where, str(wrong)) from wrong

    def _plain_dict(self, raw: dict[str, Any], key: str, where: str = "") -> dict[str, Any]:
        name = f"{where}.{key}" if where else key
        value = self._plain(self._dict(raw, key, where), name)
        if not isinstance(value, dict) or not all(isinstance(one, str) for one in value):
            raise self.fail(name, "expected an object with names as keys")
        return value

    def _int(self, raw: dict[str, Any], key: str, largest: int, where: str = "") -> int:
        value = raw.get(key)
        name = f"{where}.{key}" if where else key
        if type(value) is not int or not 0 <= value <= largest:
            raise self.fail(name, f"expected a whole number from 0 to {largest:,}, received {value!r:.40}")
        return value

    def _text(self, raw: dict[str, Any], key: str, where: str) -> str:
        value = raw.get(key)
        if not isinstance(value, str) or len(value) > 1000:
            raise self.fail(where, f"expected a short text, received {value!r:.80}")
        return value

    def _list(self, raw: dict[str, Any], key: str, where: str = "") -> list[Any]:
        value = raw.get(key)
        if not isinstance(value, list):
            raise self.fail(f"{where}.{key}" if where else key, f"expected a list, received {value!r:.80}")
        return value

    def _dict(self, raw: dict[str, Any], key: str, where: str = "", optional: bool = False) -> dict[str, Any]:
        value = raw.get(key, {}) if optional else raw.get(key)
        if not isinstance(value, dict):
            raise self.fail(f"{where}.{key}" if where else key, f"expected an object, received {value!r:.80}")
        return value


def _parameter_text(name: str, entry: ParameterEntry) -> dict[str, Any]:
    text: dict[str, Any] = _tensor_text(entry.tensor)
    if entry.buffer:
        text["buffer"] = True
    if entry.states:
        text["states"] = {label: _tensor_text(state) for label, state in entry.states.items()}
    if entry.values:
        text["values"] = plain_values.encode(entry.values, f"the optimizer's state of {name}")
    return text


def _tensor_text(entry: TensorEntry) -> dict[str, Any]:
    text: dict[str, Any] = {"dtype": entry.dtype, "shape": list(entry.shape), "shard": entry.shard}
    if entry.shard_of_scales is not None:
        text["scales"], text["signed"] = entry.shard_of_scales, entry.signed
    return text


def _own_hash(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
