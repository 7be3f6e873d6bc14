"""Reductions and matrix products. Over the batch a sum or a mean is a term; anything else mixes samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relay.partition.batch_flow.labels import Count, Kind, Label, free, rows
from relay.partition.batch_flow.op_call import Labels, OpCall, alike

LINEAR_SUMS = {"sum", "mean", "nansum", "count_nonzero"}


def reduced(call: OpCall) -> Labels:
    """Reductions. Over the batch a sum or a mean is a term; anything else takes samples together."""
    source = call.operands[0]
    label = call.label(source)
    dims = call.dims(source)
    if source.meta["val"].numel() == 0 and not call.flow.pair.varying(call.node):
        return alike(call, free(call.given))
    if label.kind is Kind.TERMS:
        if call.name in ("sum", "mean"):
            return label.derived(call.given)
        return alike(call, call.mixed("is not a sum, of numbers that come from all of the batch"))
    if label.kind is not Kind.ROWS:
        return alike(call, call.mixed("goes over the batch"))
    if label.dim not in dims:
        return call.shaped(label, "goes over the batch")
    if call.name in LINEAR_SUMS:
        return call.term(Count.SAMPLES if call.name == "mean" else Count.SUM)
    return alike(call, call.mixed("goes over the batch"))


FACTORS = {
    "mm": (None, "self", "mat2"), "bmm": (None, "self", "mat2"), "matmul": (None, "self", "other"),
    "mv": (None, "self", "vec"), "dot": (None, "self", "tensor"), "addmm": ("self", "mat1", "mat2"),
    "baddbmm": ("self", "batch1", "batch2"), "addmv": ("self", "mat", "vec"), "linear": ("bias", "input", "weight"),
}  # fmt: skip


def product_of(call: OpCall) -> Labels:
    """Matrix products. Over the batch they are sums; of two batches they put every sample together with every other."""
    added, first, second = (call.arguments[name] if name else None for name in FACTORS[call.name])
    product = _product(call, first, second, added)
    more = call.label(added)
    if more.kind is Kind.FREE:
        return product
    if added is not None and isinstance(product, Label) and product.kind is more.kind is Kind.ROWS:
        # As where two tensors are added: each sample of the one to the same sample of the other.
        result, term = call.node.meta["val"], added.meta["val"]
        same_place = more.dim - term.dim() == product.dim - result.dim()
        if (
            same_place
            and term.shape[more.dim] == result.shape[product.dim]
            and (not more.unit or not product.unit or more.unit == product.unit)
        ):
            return replace(product, unit=product.unit or more.unit)
    return call.mixed("adds samples to a product")


def _product(call: OpCall, first: Any, second: Any, added: Any) -> Labels:
    """A product to which nothing of the batch is added."""
    one, two = call.label(first), call.label(second)
    if Kind.TERMS in (one.kind, two.kind):
        if {one.kind, two.kind} == {Kind.TERMS, Kind.FREE} and added is None:
            return Label(Kind.TERMS, given=call.given, terms=one.terms or two.terms)
        return call.mixed("multiplies numbers that come from all of the batch")
    places: list[tuple[bool, int]] = []
    factors: tuple[tuple[Label, Any, int], ...] = ((one, first, 0), (two, second, 1))
    for label, tensor, which in factors:
        if label.kind is Kind.FREE:
            continue
        count = tensor.meta["val"].dim()
        place = label.dim - count
        if call.name == "linear" and which == 1:
            place = {-1: -2, -2: -1}.get(place, place)
        summed = place == -1 if which == 0 or count == 1 else place == -2
        places.append((summed, place))
    if len(places) == 1:
        if places[0][0]:
            return call.mixed("sums over the batch, each sample with a factor of its own")
        return call.shaped(one if one.kind is Kind.ROWS else two, "takes samples together")
    (summed, place), (other_summed, other_place) = places
    if one.unit and two.unit and one.unit != two.unit:
        return call.mixed("puts every sample together with every other")
    if summed and other_summed:
        return call.term(Count.SUM) if added is None else call.mixed("adds to a sum over the batch")
    if summed or other_summed or place != other_place or place >= -2:
        return call.mixed("puts every sample together with every other")
    return call.shaped(replace(one, unit=one.unit or two.unit), "takes samples together")


def contracted(call: OpCall) -> Labels | None:
    """einsum: the batch's letter must be the same in all that has rows, and is kept or summed over."""
    equation, tensors = call.argument("equation").replace(" ", ""), call.argument("tensors")
    if "." in equation:
        return None
    given, arrow, result = equation.partition("->")
    letters = given.split(",")
    if not arrow:
        once = {letter for letter in given if letter != "," and given.count(letter) == 1}
        result = "".join(sorted(once))
    labels = [call.label(tensor) for tensor in tensors]
    if any(label.kind is Kind.TERMS for label in labels):
        terms = [label for label in labels if label.kind is not Kind.FREE]
        return terms[0].derived(call.given) if len(terms) == 1 else call.mixed(
            "multiplies numbers that come from all of the batch"
        )  # fmt: skip
    if any(label.numbers for label in labels):
        return call.mixed("makes a tensor from the batch's length")
    by_sample = [(own[label.dim], label) for own, label in zip(letters, labels, strict=True) if label.kind is Kind.ROWS]
    letter = by_sample[0][0]
    units = {label.unit for _, label in by_sample if label.unit}
    several = any(other != letter for other, _ in by_sample) or any(own.count(letter) > 1 for own in letters)
    if several or len(units) > 1:
        return call.mixed("puts every sample together with every other")
    if letter in result:
        return rows(result.index(letter), units.pop() if units else 0, call.given)
    for own, label, tensor in zip(letters, labels, tensors, strict=True):
        if label.kind is Kind.FREE and letter in own and tensor.meta["val"].shape[own.index(letter)] != 1:
            return call.mixed("sums over the batch, each sample with a factor of its own")
    return call.term(Count.SUM)


MATRIX_NUMBERS = {
    "det", "logdet", "slogdet", "linalg_det", "_linalg_det", "linalg_slogdet", "_linalg_slogdet", "linalg_svdvals",
    "linalg_svd", "_linalg_svd", "linalg_eigvalsh", "linalg_eigvals", "linalg_eigh", "_linalg_eigh", "linalg_qr",
    "linalg_cholesky", "linalg_cholesky_ex", "linalg_inv", "linalg_inv_ex", "linalg_pinv", "linalg_matrix_power",
    "matrix_exp", "linalg_matrix_exp",
}  # fmt: skip
"""Ops of whole matrices, which are the last two dimensions."""

SAMPLES_TOGETHER = {"histc", "histogram", "bincount", "pdist", "_pdist_forward", "cov", "corrcoef", "segment_reduce"}
"""Ops that count or compare over all that they are given."""


def of_matrices(call: OpCall) -> Labels:
    """Ops of whole matrices: the batch's dimension may stand before them."""
    source = call.operands[0]
    label = call.label(source)
    if label.kind is not Kind.ROWS or len(call.operands) > 1 or label.dim >= source.meta["val"].dim() - 2:
        return alike(call, call.mixed("takes the batch for a dimension of a matrix"))
    return call.shaped(label)


def together(call: OpCall) -> Labels:
    """What no sum over pieces gives."""
    return alike(call, call.mixed("counts or compares over the batch"))
