"""Element-wise ops in core form: operands of one dtype, scalars as numbers, constants folded.

Part of the core lowering (`relay.capture.core.lowering`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hal.ops.rules import Spec, broadcast
from relay.capture.core.builder import Builder, constant_of, part_spec

aten = torch.ops.aten

_COMPARISONS = {getattr(aten, name).Tensor: getattr(aten, name).Scalar for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_MIRRORED = {
    aten.eq.Scalar: aten.eq.Scalar,
    aten.ne.Scalar: aten.ne.Scalar,
    aten.lt.Scalar: aten.gt.Scalar,
    aten.le.Scalar: aten.ge.Scalar,
    aten.gt.Scalar: aten.lt.Scalar,
    aten.ge.Scalar: aten.le.Scalar,
    aten.add.Scalar: aten.add.Scalar,
    aten.mul.Scalar: aten.mul.Scalar,
}
_WITH_SCALAR = {
    **_COMPARISONS,
    aten.add.Tensor: aten.add.Scalar,
    aten.mul.Tensor: aten.mul.Scalar,
    aten.div.Tensor: aten.div.Scalar,
}


def elementwise(builder: Builder, target: Any, args: list[Any], kwargs: dict[str, Any], wanted: Spec) -> Any:
    """An element-wise call with operands of one dtype, scalars as numbers, and constants folded."""
    compares = wanted.dtype is torch.bool
    tensors = [argument for argument in args if isinstance(argument, fx.Node)]
    if target in _LOGICAL:
        dtype = torch.bool
    elif target is aten.where.self:
        args[0] = builder.cast(args[0], torch.bool)
        dtype = wanted.dtype
    elif compares:
        dtype = _promoted(args)
    else:
        dtype = wanted.dtype
    args = [
        argument
        if not isinstance(argument, fx.Node) or (target is aten.where.self and position == 0)
        else truth(builder, argument)
        if dtype is torch.bool and target in _LOGICAL
        else builder.cast(argument, dtype)
        for position, argument in enumerate(args)
    ]
    if target in _WITH_SCALAR and len(tensors) >= 1:
        for position in (1, 0):
            number = args[position] if not isinstance(args[position], fx.Node) else constant_of(args[position])
            other = args[1 - position]
            if number is None or not isinstance(other, fx.Node) or part_spec(other).shape != wanted.shape:
                continue
            scalar = _WITH_SCALAR[target]
            if position == 1 or scalar in _MIRRORED:
                target = scalar if position == 1 else _MIRRORED[scalar]
                args = [other, number]
                break
    number_positions = _number_positions(target)
    for position, argument in enumerate(args):
        if position in number_positions and isinstance(argument, (int, float)):
            args[position] = as_number(argument, dtype)
        elif argument is not None and not isinstance(argument, (fx.Node, str)) and target in _TENSORS_ONLY:
            args[position] = builder.full((), argument, dtype)
    if dtype is torch.bool and target in (aten.mul.Tensor, aten.maximum.default, aten.minimum.default):
        target = aten.logical_or.default if target is aten.maximum.default else aten.logical_and.default
    if target in (aten.mul.Scalar, aten.div.Scalar) and args[1] == 1:
        return args[0]
    if target is aten.logical_and.default:
        for position in (0, 1):
            other = args[1 - position]
            if constant_of(args[position]) is True and part_spec(other).shape == wanted.shape:
                return other
    folded = _folded(builder, target, args, kwargs)
    return folded if folded is not None else builder.call(target, *args, **kwargs)


_LOGICAL = {aten.logical_and.default, aten.logical_or.default, aten.logical_not.default}
_TENSORS_ONLY = {
    *_WITH_SCALAR,
    aten.sub.Tensor,
    aten.pow.Tensor_Tensor,
    aten.atan2.default,
    aten.floor_divide.default,
    aten.maximum.default,
    aten.minimum.default,
    aten.where.self,
    aten.bitwise_and.Tensor,
    aten.bitwise_or.Tensor,
    aten.bitwise_xor.Tensor,
}


def _number_positions(target: Any) -> range:
    """The positions of arguments that are numbers of the tensor's kind (floats for floating-point tensors)."""
    if target is aten.clamp.default:
        return range(1, 3)
    if target is aten.pow.Scalar:
        return range(1)
    return range(1, 2) if str(target).endswith("Scalar") else range(0)


def as_number(value: Any, dtype: torch.dtype) -> Any:
    """A number as a float for floating-point dtypes, and as an int for others."""
    return float(value) if dtype.is_floating_point else int(value)


def _promoted(args: Sequence[Any]) -> torch.dtype:
    """The dtype to which PyTorch would promote these operands."""
    tensors = [
        torch.empty(part_spec(argument).shape, dtype=part_spec(argument).dtype, device="meta")
        if isinstance(argument, fx.Node)
        else argument
        for argument in args
        if argument is not None
    ]
    return functools.reduce(_common, tensors).dtype if len(tensors) > 1 else tensors[0].dtype


def _common(first: Any, second: Any) -> torch.Tensor:
    shape = broadcast(*[tuple(value.shape) for value in (first, second) if isinstance(value, torch.Tensor)])
    return torch.empty(shape, dtype=torch.result_type(first, second), device="meta")


def truth(builder: Builder, x: fx.Node) -> fx.Node:
    """`x` as booleans: whether each element differs from 0."""
    if part_spec(x).dtype is torch.bool:
        return x
    return builder.call(aten.ne.Scalar, x, as_number(0, part_spec(x).dtype))


def _folded(builder: Builder, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> fx.Node | None:
    """The result of an element-wise op if all tensors are constants, else None."""
    if not all(constant_of(argument) is not None for argument in args if isinstance(argument, fx.Node)):
        return None
    with unset_fake_temporarily():
        numbers = [
            torch.full((), constant_of(argument), dtype=part_spec(argument).dtype)
            if isinstance(argument, fx.Node)
            else argument
            for argument in args
        ]
        result: torch.Tensor = target(*numbers, **kwargs)
    shape = broadcast(*[part_spec(argument).shape for argument in args if isinstance(argument, fx.Node)])
    return builder.full(shape, result.item(), result.dtype)
