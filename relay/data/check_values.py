"""What a batch may hold. Tensors that no program takes, and arrays that are no tensors, raise BatchError by name.

A value that is no tensor is part of the compiled program, and is compared by its `repr` from step to step. That of an
array leaves numbers out, so that another array could be taken for the same; and an array is not cut by samples. Nothing
is converted here. Invariant: what passes is strided, and has its numbers in the memory of its own class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from relay.capture.fake_tensors import is_fake
from relay.errors import BatchError

_DEEPEST = 8


def check_values(parts: dict[str, Any]) -> None:
    """Raise BatchError for the first value in the parts of a batch that cannot be used, by its name."""
    for name, part in parts.items():
        for path, value in _leaves(part, repr(name), 0):
            problem = _of_tensor(value) if isinstance(value, torch.Tensor) else _of_array(value)
            if problem:
                raise BatchError(f"{path} of the batch {problem}")


def _of_tensor(tensor: torch.Tensor) -> str:
    """Why a tensor cannot be used, and what to give instead; empty if it can."""
    if tensor.is_nested:
        return (
            "is a nested tensor, which programs of fixed shapes do not take. Pad it (torch.nested.to_padded_tensor) "
            "and give a mask, or give a list with one tensor for each sample."
        )
    if tensor.layout is not torch.strided:
        return (
            f"is a tensor of layout {tensor.layout}, which cannot be cut into micro-batches or copied to a device. "
            "Give it dense (.to_dense()), or give its indices and values and make the sparse tensor in the model."
        )
    if tensor.is_quantized:
        return f"is a quantized tensor ({tensor.dtype}), which has no gradient kernels. Give it as .dequantize()."
    if is_fake(tensor):
        return ""
    if tensor.device.type == "meta":
        return "is on the device 'meta', so it has no numbers. Give a tensor with values."
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"is a {type(tensor).__name__}, a class of tensors with kernels of its own, which a compiled program would "
            "not use. Give plain tensors, and make it in the model."
        )
    return ""


def _of_array(value: Any) -> str:
    """The same for what is no tensor: arrays and tables of other libraries."""
    if isinstance(value, type) or not hasattr(value, "__array__") or not getattr(value, "shape", ()):
        return ""
    kind = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
    return (
        f"is a {kind} of shape {tuple(value.shape)}. It is not cut into micro-batches, and would be a constant of the "
        "compiled program. Give numbers as a tensor, torch.as_tensor(...); other entries as a list; and leave out what "
        "the model does not use."
    )


def _leaves(part: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """The values in a part of a batch with their names, those within objects included."""
    if isinstance(part, torch.Tensor):
        yield path, part
        return
    for keys, leaf in pytree.tree_flatten_with_path(part)[0]:
        own = path + pytree.keystr(keys)
        yield own, leaf
        if depth < _DEEPEST and not isinstance(leaf, (torch.Tensor, type, torch.nn.Module)):
            if dataclasses.is_dataclass(leaf):
                inside = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
            else:
                inside = getattr(leaf, "__dict__", {})
            for name, value in dict(inside).items():
                yield from _leaves(value, f"{own}.{name}", depth + 1)
