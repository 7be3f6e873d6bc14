"""Shards: the safetensors files of a checkpoint, written tensor by tensor and read by mapping.

Writing is done here rather than by the safetensors library because that takes all tensors of a file at once: here
one is in memory at a time, and is hashed on its way. Reading is the library's, which checks a header before it
believes it. It knows no parameters and no manifest. Invariant: a `ShardWriter` that was closed has written every
byte that its header promises, and they are on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from relay.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""The format's names."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

_PIECE = 2**24


@dataclass(frozen=True)
class TensorPlan:
    """A tensor that a shard will hold: its key, dtype (the format's name) and shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return DTYPES[self.dtype].itemsize * torch.Size(self.shape).numel()


class ShardWriter:
    """Writes one safetensors file: the header at once, then the tensors in the order of the plan.

    `metadata` is the header's own entry of that name: text by name.
    """

    def __init__(self, path: Path, plan: Sequence[TensorPlan], metadata: Mapping[str, str] | None = None) -> None:
        self.path = path
        self._plan = plan
        self._next = 0
        self._hash = hashlib.sha256()
        self.size = 0
        header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
        offset = 0
        for one in plan:
            header[one.key] = {
                "dtype": one.dtype,
                "shape": list(one.shape),
                "data_offsets": [offset, offset + one.size],
            }
            offset += one.size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the data starts aligned when the file is mapped
        self._file = path.open("xb", buffering=0)
        try:
            self._write(len(text).to_bytes(8, "little") + text)
        except BaseException:
            self._file.close()  # the caller gets no writer that it could close
            raise

    @property
    def sha256(self) -> str:
        """Of what has been written so far, in hexadecimal."""
        return self._hash.hexdigest()

    def add(self, tensor: torch.Tensor) -> None:
        """Write the next tensor of the plan. It must be contiguous and on the host."""
        plan = self._plan[self._next]
        if tuple(tensor.shape) != plan.shape or tensor.dtype is not DTYPES[plan.dtype]:
            raise ValueError(
                f"{plan.key} was planned as {plan.dtype}{list(plan.shape)}, got {tensor.dtype}{tensor.shape}"
            )
        self._next += 1
        if tensor.numel():
            self._write(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Sync everything to the disk, and close the file."""
        if self._next != len(self._plan):
            raise ValueError(f"{self.path} has {self._next} of {len(self._plan)} tensors")
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Close without syncing."""
        self._file.close()

    def _write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            self._hash.update(piece)
            while piece:  # an unbuffered file may write less than all of it
                piece = piece[self._file.write(piece) :]
        self.size += len(view)


def hash_file(path: Path, size: int) -> str:
    """The sha256 of a file that should have `size` bytes, read from the disk instead of the cache where possible.

    Raises CheckpointError if the file is missing, of another size, or not a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError as missing:
        raise CheckpointError("the file is missing; the checkpoint is incomplete", file=str(path)) from missing
    except OSError as refused:
        raise CheckpointError(f"the file cannot be read: {refused.strerror}", file=str(path)) from refused
    with open(descriptor, "rb", buffering=0) as file:
        found = os.fstat(descriptor).st_size
        if found != size:
            raise CheckpointError(
                f"the file has {found:,} bytes and should have {size:,}; it was cut off or changed", file=str(path)
            )
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        digest = hashlib.sha256()
        buffer = bytearray(_PIECE)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Sync a folder's own entries to the disk, where the system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows does not open folders
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
