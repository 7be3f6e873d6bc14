"""Ops that make tensors of shapes alone, and ops that work element by element.

Invariant: operands that have rows have them in the same place, or samples are put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from relay.partition.batch_flow.labels import Count, Kind, Label, Term, free, rows
from relay.partition.batch_flow.op_call import Labels, OpCall, alike

BY_SHAPE = {
    "zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones",
    "new_full", "new_empty", "rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "normal", "uniform",
    "exponential", "zero", "empty_strided", "new_empty_strided", "scalar_tensor", "log_normal", "cauchy", "geometric",
}  # fmt: skip
EXPANDING = {"expand", "expand_as", "broadcast_to", "broadcast_tensors", "repeat", "tile", "fill", "copy"}
NUMBERED = {"arange", "linspace", "eye", "tril_indices", "triu_indices", "randperm"}
LIKE_ANOTHER = {"type_as", "view_as", "reshape_as", "expand_as"}


def by_shape(call: OpCall) -> Labels:
    """The same for all rows, or drawn for each."""
    for place, small, large in call.flow.pair.literals(call.node):
        if isinstance(large, float) and small != large:
            return call.mixed("makes a tensor from the batch's length") if call.flow.inside else patched(call, place)
    drawn = torch.Tag.nondeterministic_seeded in getattr(call.node.target, "tags", ())
    filled = call.argument("fill_value", "value")
    given = not drawn and (not isinstance(filled, fx.Node) or call.given)
    dims = call.flow.pair.varying(call.node)
    if not dims:
        return free(given)
    size = call.node.meta["val"].shape[dims[0]]
    if len(dims) > 1 or size % call.flow.pair.lengths[1]:
        return Label(
            Kind.MIXED, given=given, cause=call.flow.cause(call.node, "makes a tensor from the batch's length")
        )
    # A fill of `full` may be a number of the batch's own length.
    fills = [1 for _, small, large in call.flow.pair.literals(call.node) if small != large]
    if call.name in ("full", "new_full") and len(fills) > 1 and isinstance(filled, int):
        return Label(Kind.MIXED, given=given, cause=call.flow.cause(call.node, "is filled with the batch's length"))
    return rows(dims[0], 0, given)


def patched(call: OpCall, place: int) -> Label:
    call.flow.literals[call.node, place] = None
    return free(False)


def numbered(call: OpCall) -> Labels:
    """arange and the like."""
    dims = call.flow.pair.varying(call.node)
    if not dims and not any(small != large for _, small, large in call.flow.pair.literals(call.node)):
        return free(True)
    start, step = call.argument("start", default=0), call.argument("step", default=1)
    plain = call.name == "arange" and start == 0 and step == 1
    size = call.node.meta["val"].shape[0] if dims else 0
    label = call.mixed("makes a tensor from the batch's length")
    return replace(label, dim=0, numbers=plain and size == call.flow.pair.lengths[1])


def from_free(call: OpCall) -> Labels:
    """Of operands free of the batch: a dimension of the batch's length holds the same for all rows, or is not one."""
    if not call.flow.pair.varying(call.node):
        return alike(call, free(call.given))
    if call.name in EXPANDING:
        return by_shape(call)
    return alike(call, call.mixed("makes a tensor from the batch's length"))


LINEAR = {"add", "sub", "rsub", "neg", "mul", "div", "true_divide", "multiply", "divide", "subtract", "where"}
SAME = {
    "to", "_to_copy", "clone", "contiguous", "detach", "alias", "type_as", "lift_fresh_copy", "lift_fresh", "positive",
    "real", "imag",
    "_conj", "resolve_conj", "resolve_neg",
}  # fmt: skip


def elementwise(call: OpCall) -> Labels:
    """Operands are broadcast against each other: all must have their rows in the same place."""
    varying = [
        (place, small, large)
        for place, small, large in call.flow.pair.literals(call.node)
        if small != large and not isinstance(large, bool)
    ]
    taken = [(operand, call.label(operand)) for operand in call.operands]
    if call.name == "copy":
        taken = [(operand, label) for operand, label in taken if operand is call.node.args[1]]
    if any(label.kind is Kind.TERMS for _, label in taken):
        return of_terms(call, [label for _, label in taken], varying)
    numbers = [label for _, label in taken if label.numbers]
    if numbers:
        return call.shaped(numbers[0]) if call.name in SAME else call.mixed("makes a tensor from the batch's length")
    if varying:
        if call.flow.inside or call.given:
            return call.mixed("computes with the batch's length")
        for place, _, _ in varying:
            call.flow.literals[call.node, place] = None
    found: tuple[int, int] | None = None
    unit = 0
    for operand, label in taken:
        if label.kind is Kind.ROWS:
            tensor = operand.meta["val"]
            where = (label.dim - tensor.dim(), tensor.shape[label.dim])
            if (found is not None and where != found) or (unit and label.unit and unit != label.unit):
                return call.mixed("puts every sample together with every other")
            found, unit = where, unit or label.unit
    if found is None:
        return from_free(call)
    val = call.node.meta["val"]
    tensor = val[0] if isinstance(val, (tuple, list)) else val
    return alike(call, rows(found[0] + tensor.dim(), unit, call.given))


def of_terms(call: OpCall, taken: Sequence[Label], varying: Sequence[tuple[int, Any, Any]]) -> Label:
    """What keeps a sum of terms one: sums of such, and what multiplies or divides it by what is free of the batch."""
    if any(label.kind is Kind.ROWS for label in taken):
        return call.mixed("puts a number from all of the batch together with each sample")
    terms = tuple(dict.fromkeys(term for label in taken for term in label.terms))
    first, second = call.argument("self", "input"), call.argument("other")
    in_first, in_second = (call.label(one).kind is Kind.TERMS for one in (first, second))
    same = Label(Kind.TERMS, given=call.given, terms=terms)
    if call.name in SAME or call.name in ("neg", "negative"):
        return same
    if call.name in ("add", "sub", "rsub", "subtract"):
        if varying:
            return call.mixed("computes with the batch's length")
        if not (in_first and in_second):
            position = 0 if in_second else 1
            if (second if position else first) not in (0, 0.0):
                same = replace(same, terms=(*terms, Term(call.node, Count.SAMPLES, position)))
        return same
    if call.name in ("mul", "multiply", "div", "divide", "true_divide"):
        dividing = call.name[0] in "dt"
        if (in_first and in_second) or (dividing and in_second) or call.argument("rounding_mode") is not None:
            return call.mixed("multiplies or divides numbers that come from all of the batch")
        if not varying:
            return same
        (place, small, large) = varying[0]
        grows = call.flow.pair.proportional(small, large) if dividing else call.flow.pair.proportional(large, small)
        if len(varying) == 1 and grows and all(term.count is Count.SUM for term in terms):
            return call.term(Count.SAMPLES)
        if call.flow.inside or call.given:
            return call.mixed("computes with the batch's length")
        call.flow.literals[call.node, place] = None
        return same
    if call.name == "where" and call.label(call.argument("condition")).kind is Kind.FREE:
        values = [call.argument("self"), call.argument("other")]
        places = [place for place, one in enumerate(values, 1) if call.label(one).kind is not Kind.TERMS]
        return replace(same, terms=(*terms, *(Term(call.node, Count.SAMPLES, place) for place in places)))
    return call.mixed("is not a sum, of numbers that come from all of the batch")
