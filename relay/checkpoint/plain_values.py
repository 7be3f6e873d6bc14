"""Plain values as JSON and back: the states of schedulers, data loaders and hyperparameters, without large tensors.

Plain values are numbers, text, bytes, lists, tuples, dicts with any plain keys, counters, and small tensors and arrays.
An object of any other class is refused, with its location in the value. This is not pickle: decoding makes only these
types and runs no code from the file. Invariant: `decode(encode(value))` equals `value`, with the same types and bits.

JSON's own kinds stand for themselves. Everything else is an object with one key that starts with "!".
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

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
_ARRAYS = {
    "float64",
    "float32",
    "float16",
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}


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
    content = value[marks[0]]
    try:
        return _READERS[marks[0]](content, what, depth + 1)
    except (TypeError, KeyError, OverflowError, binascii.Error, RuntimeError) as wrong:
        raise ValueError(f"{what} is not a {marks[0][1:]}: {wrong}") from wrong


def _tuple(content: Any, what: str, depth: int) -> Any:
    if not isinstance(content, list):
        raise TypeError("expected a list of its items")
    return tuple(decode(content, what, depth))


def _dict(content: Any, what: str, depth: int) -> Any:
    if not isinstance(content, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in content):
        raise TypeError("expected a list of pairs")
    return {decode(key, f"a key of {what}", depth): decode(item, what, depth) for key, item in content}


def _float(content: Any, what: str, depth: int) -> Any:
    if content not in ("inf", "-inf", "nan"):
        raise TypeError(f"expected inf, -inf or nan, received {content!r:.40}")
    return float(content)


def _tensor(content: Any, what: str, depth: int) -> Any:
    dtype, shape, raw = _parts(content, _DTYPES, lambda name: _DTYPES[name].itemsize)
    flat = torch.frombuffer(raw, dtype=_DTYPES[dtype]) if raw else torch.empty(0, dtype=_DTYPES[dtype])
    return flat.reshape(shape)


def _array(content: Any, what: str, depth: int) -> Any:
    dtype, shape, raw = _parts(content, _ARRAYS, lambda name: np.dtype(name).itemsize)
    return (np.frombuffer(raw, dtype=dtype) if raw else np.empty(0, dtype=dtype)).reshape(shape)


def _scalar(content: Any, what: str, depth: int) -> Any:
    return _array(content, what, depth)[()]


_READERS: dict[str, Callable[[Any, str, int], Any]] = {
    "!float": _float,
    "!bytes": lambda content, what, depth: bytes(_raw(content)),
    "!tuple": _tuple,
    "!dict": _dict,
    "!counter": lambda content, what, depth: Counter(_dict(content, what, depth)),
    "!tensor": _tensor,
    "!array": _array,
    "!scalar": _scalar,
}


def _parts(content: Any, dtypes: Any, itemsize: Callable[[str], int]) -> tuple[str, list[int], bytearray]:
    if not isinstance(content, list) or len(content) != 3:
        raise TypeError("expected its dtype, shape and bytes")
    dtype, shape, text = content
    if not isinstance(dtype, str) or dtype not in dtypes:
        raise TypeError(f"{dtype!r:.40} is not a dtype")
    if not isinstance(shape, list) or not all(type(extent) is int and 0 <= extent < 2**40 for extent in shape):
        raise TypeError(f"{shape!r:.40} is not a shape")
    raw = _raw(text)
    if math.prod(shape) * itemsize(dtype) != len(raw) or len(shape) > 32:
        raise TypeError(f"{len(raw)} bytes do not fill a shape of {shape!r:.40}")
    return dtype, shape, raw


def _raw(text: Any) -> bytearray:
    if not isinstance(text, str):
        raise TypeError("expected bytes in base 64")
    return bytearray(base64.b64decode(text, validate=True))


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _check_size(size: int, what: str) -> None:
    if size > LARGEST_TENSOR:
        raise ValueError(f"{what} has {size:,} bytes; a tensor in a manifest has at most {LARGEST_TENSOR:,}")
