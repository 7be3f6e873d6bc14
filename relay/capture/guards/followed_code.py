"""Which objects and functions are followed in search of what code reads, and which names code mentions.

The walk itself is in `relay.capture.guards.code_walk`. Code of PyTorch, numpy, the standard library and the modules
that Relay wraps layers in is compared by identity and not followed. Nothing here changes or runs what it looks at.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch

OPAQUE = frozenset(sys.stdlib_module_names) - {"__main__"} | {"torch", "numpy", "functorch", "torchgen"}
"""Top-level packages whose code is not followed."""

OWN = ("relay.capture.", "relay.partition", "relay.runtime.")
"""Where the modules that wrap a model's layers are defined."""

IMMUTABLE = (
    bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range, slice, enum.Enum,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, types.BuiltinFunctionType,
    types.MethodWrapperType, types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.CodeType, types.GeneratorType, types.FrameType, weakref.ref, torch.Generator,
    torch.nn.parameter.UninitializedTensorMixin,  # type: ignore[attr-defined]
)  # fmt: skip
"""Classes whose objects cannot change, or hold nothing that code reads."""


@functools.lru_cache(maxsize=10_000)
def mentioned_by(code: types.CodeType) -> frozenset[str]:
    """The names that code and the functions within it mention, short texts included: `getattr` takes those."""
    return frozenset(_mentions(code))


def _mentions(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _mentions(constant)
        elif isinstance(constant, str) and len(constant) < 64 and constant.isidentifier():
            yield constant


def is_opaque(value: Any) -> bool:
    """Whether a class or function is of a library whose code is not followed."""
    name = getattr(value, "__module__", None)
    return not isinstance(name, str) or name.split(".")[0] in OPAQUE or name.startswith(OWN)


def is_a_modules_code(function: types.FunctionType) -> bool:
    """Whether it is a method of one of PyTorch's own layers: the functions that those call may be replaced."""
    return str(function.__module__).startswith("torch.nn.modules.")


def is_data(value: Any) -> bool:
    """Whether what a class holds is a constant, and no code."""
    return value is not None and not callable(value) and not hasattr(type(value), "__get__")


def is_slot(value: Any) -> bool:
    """Whether what a class holds is the descriptor of a slot."""
    return isinstance(value, types.MemberDescriptorType)


def is_array(value: Any) -> bool:
    """Whether it is an array or a scalar of numpy, which need not be installed."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))
