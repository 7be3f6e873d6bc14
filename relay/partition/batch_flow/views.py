"""Views, and ops that move data or go along a dimension without taking it away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from relay.partition.batch_flow.elementwise import by_shape
from relay.partition.batch_flow.labels import Kind, Label, free, rows
from relay.partition.batch_flow.op_call import Labels, OpCall, alike

REORDERS = {
    "permute", "transpose", "t", "numpy_T", "mT", "mH", "matrix_H", "adjoint", "movedim", "moveaxis", "swapaxes",
    "swapdims", "select", "slice", "narrow", "split", "split_with_sizes", "chunk", "tensor_split", "unbind",
    "view_as_real", "view_as_complex", "constant_pad_nd", "pad", "one_hot",
}  # fmt: skip
"""Ops that move dimensions, take one or a part of one away, or add to one."""

RESHAPES = {
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel",
    "_reshape_alias",
}  # fmt: skip
"""Ops that keep the elements in their order."""


def reordered(call: OpCall) -> Labels:
    """Views and moves that leave the rows whole: where they are now, their size says."""
    label = the_only(call)
    if label is None:
        return None  # type: ignore[return-value]
    if label.kind is Kind.TERMS:
        if call.flow.pair.varying(call.node):
            return call.mixed("puts a number from all of the batch together with each sample")
        return alike(call, label.derived(call.given))
    return call.shaped(label, "takes single samples out of the batch")


def the_only(call: OpCall) -> Label | None:
    """The label of the one operand that has to do with the batch."""
    found = [label for label in map(call.label, call.operands) if label.kind is not Kind.FREE]
    return found[0] if len(found) == 1 else None


def reshaped(call: OpCall) -> Labels:
    """Elements keep their order: a sample's are found by their distance in it."""
    source = call.operands[0]
    label = call.label(source)
    if label.kind is Kind.TERMS:
        return label.derived(call.given)
    val = call.node.meta["val"]
    if label.unit == 0:
        return call.mixed("spreads samples") if len(call.flow.pair.varying(call.node)) != 1 else replace(
            label, dim=call.flow.pair.varying(call.node)[0], given=call.given
        )  # fmt: skip
    shape = source.meta["val"].shape
    distance = label.unit * product_of_sizes(shape[label.dim + 1 :])
    length = call.flow.pair.lengths[1]
    for dim, size in enumerate(val.shape):
        inner = product_of_sizes(val.shape[dim + 1 :])
        if inner <= distance < inner * size and distance % inner == 0:
            unit = distance // inner
            if size % unit == 0 and (size // unit) % length == 0 and call.flow.pair.varying(call.node) == [dim]:
                return replace(label, dim=dim, unit=unit, given=call.given)
    return call.mixed("takes the batch's dimension apart")


def product_of_sizes(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= int(size)
    return result


def spread(call: OpCall) -> Labels:
    """expand, of which operands that are named for their shape alone do not count."""
    if call.name == "broadcast_tensors":
        labels = [call.label(operand) for operand in call.arguments["tensors"]]
        found = []
        for number, label in enumerate(labels):
            if label.kind is Kind.TERMS and not call.flow.pair.varying(call.node, number):
                found.append(label.derived(call.given))
            elif label.kind is Kind.ROWS:
                found.append(call.shaped_item(label, number, "spreads a sample over the batch"))
            elif label.kind is Kind.FREE:
                dims = call.flow.pair.varying(call.node, number)
                found.append(rows(dims[0], 0, call.given) if len(dims) == 1 else free(call.given))
            else:
                found.append(call.mixed("spreads a sample over the batch"))
        return tuple(found)
    label = call.label(call.operands[0])
    if label.kind is Kind.FREE:
        return by_shape(call)
    if label.kind is Kind.TERMS:
        if call.flow.pair.varying(call.node):
            return call.mixed("puts a number from all of the batch together with each sample")
        return label.derived(call.given)
    return call.shaped(label, "spreads samples over the batch")


def along(call: OpCall) -> Labels:
    """Ops along a dimension that keep it: softmax, cumsum, sort, flip."""
    source = call.operands[0]
    label = call.label(source)
    if label.kind is not Kind.ROWS or len(call.operands) > 1:
        return None if label.kind is Kind.ROWS else alike(call, call.mixed("goes over the batch"))  # type: ignore
    if label.dim in call.dims(source):
        return alike(call, call.mixed("goes over the batch"))
    return call.shaped(label, "goes over the batch")


def by_numbers(call: OpCall) -> Labels | None:
    """Data moves: the op moves the numbers of the rows, and what comes out shows where the samples are."""
    label = the_only(call)
    source = call.operands[0]
    val = source.meta["val"]
    if label is None or label.kind is not Kind.ROWS or len(call.operands) != 1 or val.numel() > 1 << 20:
        return None
    length = call.flow.pair.lengths[1]
    dims = call.flow.pair.varying(call.node)
    if len(dims) != 1:
        return call.mixed("takes samples together")
    unit = max(label.unit, 1)
    column = (torch.arange(val.shape[label.dim]) // unit) % length
    numbers = column.reshape([-1 if dim == label.dim else 1 for dim in range(val.dim())]).expand(val.shape).contiguous()
    found = call.node.target(numbers, *call.node.args[1:], **call.node.kwargs)  # type: ignore[operator]
    moved = found.movedim(dims[0], 0).reshape(found.shape[dims[0]], -1)
    size = moved.shape[0]
    for wide in {size // length, unit}:
        if wide and bool((moved == ((torch.arange(size) // wide) % length)[:, None]).all()):
            return rows(dims[0], wide, call.given)
    return call.mixed("puts samples into other places")


def joined(call: OpCall) -> Labels:
    """cat and stack."""
    tensors = call.arguments["tensors"]
    labels = [call.label(tensor) for tensor in tensors]
    if all(label.kind in (Kind.TERMS, Kind.FREE) for label in labels):
        if any(label.kind is Kind.FREE for label in labels):
            return call.mixed("puts a number from all of the batch beside others")
        return Label(
            Kind.TERMS, given=call.given, terms=tuple(dict.fromkeys(term for label in labels for term in label.terms))
        )
    if not all(label.kind is Kind.ROWS for label in labels):
        return call.mixed("puts a number from all of the batch beside others")
    units = {label.unit for label in labels if label.unit}
    if len({label.dim for label in labels}) > 1 or len(units) > 1:
        return call.mixed("puts samples beside each other")
    dim = call.argument("dim")
    if call.name != "stack" and dim % tensors[0].meta["val"].dim() == labels[0].dim:  # each keeps its place in its part
        whole = all(tensor.meta["val"].shape[labels[0].dim] % call.flow.pair.lengths[1] == 0 for tensor in tensors)
        return rows(labels[0].dim, units.pop(), call.given) if units and whole else call.mixed("puts samples together")
    return call.shaped(replace(labels[0], unit=units.pop() if units else 0), "puts samples beside each other")


def renormed(call: OpCall) -> Labels:
    """renorm, whose dimension is the one that it does not go over."""
    source = call.operands[0]
    label = call.label(source)
    if label.kind is not Kind.ROWS or len(call.operands) > 1 or [label.dim] != call.dims(source):
        return call.mixed("goes over the batch")
    return call.shaped(label)
