"""Ops that pick by index: embeddings, gather, scatter, indexing with tensors."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from relay.partition.batch_flow.labels import Kind, rows
from relay.partition.batch_flow.op_call import Labels, OpCall, alike, name_of


def looked_up(call: OpCall) -> Labels:
    """embedding and the like: of a table that is free of the batch."""
    if call.label(call.argument("weight")).kind is not Kind.FREE:
        return alike(call, call.mixed("looks up in a table made from the batch"))
    if call.argument("scale_grad_by_freq") is True:
        return alike(
            call, call.mixed("scales gradients by how often a row is looked up in the batch (scale_grad_by_freq=True)")
        )
    return call.shaped(call.label(call.argument("indices", "self")))


def picked(call: OpCall) -> Labels:
    """gather, scatter, index_select and take_along_dim: by positions along a dimension."""
    source = call.argument("self", "input")
    index, dim = call.argument("index", "indices"), call.argument("dim")
    more = [call.label(one) for one in (call.argument("src", "value"),)]
    ours, theirs = call.label(source), call.label(index)
    if dim is None or any(label.kind in (Kind.TERMS, Kind.MIXED, Kind.UNKNOWN) for label in (ours, theirs, *more)):
        return call.mixed("picks samples")
    dim %= max(source.meta["val"].dim(), 1)
    if ours.kind is Kind.ROWS and ours.dim == dim:
        return call.mixed("picks samples")
    if ours.kind is Kind.FREE:
        if call.name == "index_select" or (call.name == "gather" and theirs.dim == dim):
            return call.shaped(theirs, "picks samples")
        return call.mixed("puts samples together in one tensor")
    if call.name == "index_select":
        return call.mixed("picks by every sample of every other") if theirs.kind is Kind.ROWS else call.shaped(ours)
    units = {label.unit for label in (ours, theirs, *more) if label.kind is Kind.ROWS and label.unit}
    places = {label.dim for label in (ours, theirs, *more) if label.kind is Kind.ROWS}
    if theirs.kind is not Kind.ROWS or len(units) > 1 or len(places) > 1:
        return call.mixed("picks by what belongs to no sample")
    return call.shaped(replace(ours, unit=units.pop() if units else 0), "picks samples")


def indexed(call: OpCall) -> Labels | None:
    """x[a, b, ...] with tensors."""
    source, indices = call.argument("self"), call.argument("indices")
    ours = call.label(source)
    given = [(place, one, call.label(one)) for place, one in enumerate(indices) if one is not None]
    if any(one.meta["val"].dtype in (torch.bool, torch.uint8) for _, one, _ in given):
        return None
    if ours.kind is Kind.FREE:
        labels = [label for _, _, label in given if label.kind is not Kind.FREE]
        if all(label.kind is Kind.ROWS for label in labels) and len({label.unit for label in labels} - {0}) <= 1:
            return call.shaped(labels[0], "picks samples")
        return call.mixed("picks samples")
    if ours.kind is not Kind.ROWS:
        return call.mixed("picks samples")
    at_rows = [(one, label) for place, one, label in given if place == ours.dim]
    if at_rows:
        (_, label) = at_rows[0]
        others = [label for place, _, label in given if place != ours.dim]
        aligned = all(other.kind in (Kind.ROWS, Kind.FREE) and not other.numbers for other in others)
        if label.numbers and aligned and ours.unit in (0, 1):
            return call.shaped(ours, "picks samples")
        return call.mixed("picks samples")
    if any(label.kind is not Kind.FREE for _, _, label in given):
        return call.mixed("picks by every sample of every other")
    return call.shaped(ours, "picks samples")


def put(call: OpCall) -> Labels:
    """x[arange(len(x)), a] = values."""
    ours, values = call.label(call.argument("self")), call.label(call.argument("values"))
    labels = [call.label(one) for one in call.argument("indices") if one is not None]
    aligned = all(label.numbers or label.kind in (Kind.ROWS, Kind.FREE) for label in labels)
    if ours.kind is not Kind.ROWS or ours.dim != 0 or not labels[0].numbers or not aligned:
        return call.mixed("writes to single samples")
    if values.kind not in (Kind.FREE, Kind.ROWS) or any(label.numbers for label in labels[1:]):
        return call.mixed("writes to single samples")
    return call.shaped(ours)


def has_regular_offsets(call: OpCall) -> bool:
    """Whether a call is embedding_bag of a matrix of indices: the offsets are multiples of the length of its rows."""
    offsets = call.argument("offsets")
    return call.name == "embedding_bag" and isinstance(offsets, fx.Node) and name_of(offsets) == "arange"


def bag(call: OpCall) -> Labels | None:
    """embedding_bag of equal rows, each a sample's."""
    indices = call.argument("indices")
    label = call.label(indices)
    weights = call.argument("per_sample_weights")
    regular = has_regular_offsets(call) and (weights is None or call.label(weights) == label)
    if label.kind is not Kind.ROWS or not regular or call.label(call.argument("weight")).kind is not Kind.FREE:
        return None
    length = call.flow.pair.lengths[1]
    first = call.node.meta["val"][0]
    if first.shape[0] != length or label.dim != 0 or indices.meta["val"].shape[0] != label.unit * length:
        return alike(call, call.mixed("takes samples together"))
    return (rows(0, 1, call.given), *(call.unknown() for _ in call.node.meta["val"][1:]))


def found_between(call: OpCall) -> Labels:
    """searchsorted and bucketize: each value's place between boundaries that are the same for all, or its sample's."""
    bounds, values = call.argument("sorted_sequence", "boundaries"), call.argument("self", "input")
    sorter = call.argument("sorter")
    ours, given = call.label(bounds), call.label(values)
    if given.kind is Kind.ROWS and ours.kind is call.label(sorter).kind is Kind.FREE:
        return call.shaped(given)
    alike_rows = ours.kind is given.kind is Kind.ROWS and (ours.dim, ours.unit) == (given.dim, given.unit)
    if alike_rows and sorter is None and ours.dim < bounds.meta["val"].dim() - 1:
        return call.shaped(given)
    return call.mixed("compares every sample with every other")
