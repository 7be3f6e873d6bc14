"""Plain values as JSON and back: the states of schedulers, data loaders and hyperparameters, without large tensors.

Plain values are numbers, text, bytes, lists, tuples, dicts with any plain keys, counters, and small tensors and arrays.
An object of any other class is refused, with its location in the value. This is not pickle: decoding makes only these
types and runs no code from the file. Invariant: `decode(encode(value))` equals `value`, with the same types and bits.

JSON's own kinds stand for themselves. Everything else is an object with one key that starts with "!".
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch
from msgspec import Meta

from hal import schema

DEEPEST = 64
LARGEST_TENSOR = 64 * 2**20
"""Bytes. Larger tensors belong in files of their own."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
    )
}
_ARRAYS = (
    *("float64", "float32", "float16", "bool", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
)


def encode(value: Any, what: str = "value", depth: int = 0) -> Any:
    """As JSON's kinds. `what` names the value in errors. ValueError for what is not plain."""
    if depth > DEEPEST:
        raise ValueError(f"{what} is nested more than {DEEPEST} deep")
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"!float": repr(value)}
    if isinstance(value, bytes):
        return {"!bytes": _text(value)}
    if isinstance(value, list):
        return [encode(item, f"{what}[{number}]", depth + 1) for number, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"!tuple": [encode(item, f"{what}[{number}]", depth + 1) for number, item in enumerate(value)]}
    if isinstance(value, dict):
        simple = all(isinstance(key, str) and not key.startswith("!") for key in value)
        if simple and not isinstance(value, Counter):
            return {key: encode(item, f"{what}[{key!r}]", depth + 1) for key, item in value.items()}
        pairs = [
            [encode(key, f"key {key!r} of {what}", depth + 1), encode(item, f"{what}[{key!r}]", depth + 1)]
            for key, item in value.items()
        ]
        return {"!counter" if isinstance(value, Counter) else "!dict": pairs}
    if isinstance(value, torch.Tensor) and str(value.dtype).removeprefix("torch.") in _DTYPES:
        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        _check_size(flat.nbytes, what)
        return {"!tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), _text(flat.tobytes())]}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.name in _ARRAYS:
        _check_size(value.nbytes, what)
        kind = "!array" if isinstance(value, np.ndarray) else "!scalar"
        return {kind: [value.dtype.name, list(value.shape), _text(np.ascontiguousarray(value).tobytes())]}
    raise ValueError(
        f"{what} is a {type(value).__name__}, which is not plain data; expected numbers, text, lists, dicts or small "
        "tensors"
    )


def decode(value: Any, what: str = "value", depth: int = 0) -> Any:
    """The value that `encode` was given. ValueError, naming `what`, for anything that `encode` does not write."""
    if depth > 2 * DEEPEST:
        raise ValueError(f"{what} is nested more than {2 * DEEPEST} deep")
    if value is None or isinstance(value, (bool, str, int, float)):
        return value
    if isinstance(value, list):
        return [decode(item, f"{what}[{number}]", depth + 1) for number, item in enumerate(value)]
    if not isinstance(value, dict):
        raise ValueError(f"{what} is a {type(value).__name__}, which JSON does not have")
    marks = [key for key in value if key.startswith("!")]
    if not marks:
        return {key: decode(item, f"{what}[{key!r}]", depth + 1) for key, item in value.items()}
    if len(value) != 1 or marks[0] not in _READERS:
        raise ValueError(f"{what} has the keys {sorted(value)[:5]}; expected one of {', '.join(_READERS)} alone")
    mark = marks[0]
    form, make = _READERS[mark]

    def refuse(field: str, message: str) -> ValueError:
        return ValueError(f"{what} is not a {mark[1:]}: {schema.located(field, message)}")

    try:
        return make(schema.read(value[mark], form, refuse), what, depth + 1)
    except (TypeError, OverflowError, RuntimeError) as wrong:
        raise ValueError(f"{what} is not a {mark[1:]}: {wrong}") from wrong


_Shape = Annotated[list[Annotated[int, Meta(ge=0, lt=2**40)]], Meta(max_length=32)]


class _Tensor(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A tensor as it is stored: a list of its dtype, shape and bytes."""

    dtype: Annotated[str, Meta(pattern=rf"\A({'|'.join(_DTYPES)})\Z", description=f"one of {', '.join(_DTYPES)}")]
    shape: _Shape
    raw: bytes = msgspec.field(name="bytes")

    def __post_init__(self) -> None:
        _check_filled(self.shape, _DTYPES[self.dtype].itemsize, self.raw)


class _Array(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """An array or a scalar of numpy as it is stored: a list of its dtype, shape and bytes."""

    dtype: Annotated[str, Meta(pattern=rf"\A({'|'.join(_ARRAYS)})\Z", description=f"one of {', '.join(_ARRAYS)}")]
    shape: _Shape
    raw: bytes = msgspec.field(name="bytes")

    def __post_init__(self) -> None:
        _check_filled(self.shape, np.dtype(self.dtype).itemsize, self.raw)


def _check_filled(shape: list[int], itemsize: int, raw: bytes) -> None:
    if math.prod(shape) * itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes do not fill a shape of {shape!r:.40}")


def _dict(pairs: list[tuple[Any, Any]], what: str, depth: int) -> dict[Any, Any]:
    return {decode(key, f"a key of {what}", depth): decode(item, what, depth) for key, item in pairs}


def _tensor(stored: _Tensor, what: str, depth: int) -> torch.Tensor:
    dtype = _DTYPES[stored.dtype]
    flat = torch.frombuffer(bytearray(stored.raw), dtype=dtype) if stored.raw else torch.empty(0, dtype=dtype)
    return flat.reshape(stored.shape)


def _array(stored: _Array, what: str, depth: int) -> np.ndarray[Any, Any]:
    dtype = stored.dtype
    flat = np.frombuffer(bytearray(stored.raw), dtype=dtype) if stored.raw else np.empty(0, dtype=dtype)
    return flat.reshape(stored.shape)


_READERS: dict[str, tuple[Any, Callable[[Any, str, int], Any]]] = {
    "!float": (Literal["inf", "-inf", "nan"], lambda text, what, depth: float(text)),
    "!bytes": (bytes, lambda raw, what, depth: raw),
    "!tuple": (list[Any], lambda items, what, depth: tuple(decode(items, what, depth))),
    "!dict": (list[tuple[Any, Any]], _dict),
    "!counter": (list[tuple[Any, Any]], lambda pairs, what, depth: Counter(_dict(pairs, what, depth))),
    "!tensor": (_Tensor, _tensor),
    "!array": (_Array, _array),
    "!scalar": (_Array, lambda stored, what, depth: _array(stored, what, depth)[()]),
}
"""For each mark the schema of what is stored under it, and the function that makes the value of that."""


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _check_size(size: int, what: str) -> None:
    if size > LARGEST_TENSOR:
        raise ValueError(f"{what} has {size:,} bytes; a tensor in a manifest has at most {LARGEST_TENSOR:,}")
