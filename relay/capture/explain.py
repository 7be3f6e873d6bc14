"""Why a capture failed, in words: which layer, which op, and what to do about it."""

from __future__ import annotations

import re

from relay.errors import CaptureError, RelayError

_DATA_DEPENDENT = re.compile(r"(aten[.:]+\w+(?:\.\w+)?)")


def explain(failure: Exception, layer: str) -> RelayError:
    """The error to raise for a failed trace of `layer`; the relay's own errors pass as they are."""
    if isinstance(failure, RelayError):
        return failure
    kind = type(failure).__name__
    operation = getattr(failure, "func", None)
    op = str(operation) if operation is not None else ""
    if not op:
        found = _DATA_DEPENDENT.search(str(failure))
        op = found.group(1) if found else ""
    by_data = kind in (
        "DynamicOutputShapeException",
        "DataDependentOutputException",
        "GuardOnDataDependentSymNode",
        "UserError",
        "PendingUnbackedSymbolNotFound",
    )
    if by_data:
        return CaptureError(
            f"layer {layer!r} cannot be captured: {op or 'an op'} makes shapes or control flow depend on the data "
            f"({kind}). Use a form with fixed shapes (masking instead of selecting), or put it inside one of the "
            "repeated layers, which then runs eagerly. Where a random number decides which layers run (layerdrop), "
            "set that to 0 and choose them with step(batch, active=...).",
            layer=layer,
            op=op,
            by_data=True,
        )
    text = str(failure).strip().splitlines()
    return CaptureError(
        f"layer {layer!r} cannot be captured: {kind}: {text[0] if text else ''}", layer=layer, op=op
    )


def reason(failure: Exception, layer: str) -> str | None:
    """In a few words why a layer could not be captured; None where it is an error of ours, which stands."""
    if isinstance(failure, RelayError):
        return None
    explained = explain(failure, layer)
    if isinstance(explained, CaptureError) and explained.by_data:
        return f"{explained.op or 'an op'} makes its shapes or its control flow depend on the data"
    text = str(failure).strip().splitlines()
    return f"it cannot be captured ({type(failure).__name__}: {text[0] if text else ''})"


def sparse_gradient(layer: str, parameter: str) -> CaptureError:
    """The error for a parameter whose gradient is a sparse tensor, before any step is taken."""
    own_name = parameter.removeprefix("module.").removeprefix("block.").replace("__", ".")
    return CaptureError(
        f"layer {layer!r} makes a sparse gradient for {own_name!r} (an embedding with sparse=True). Gradients have a "
        "place of fixed size here, and optimizers for sparse ones (SparseAdam) update only rows that occur. Make the "
        "embedding with sparse=False, or set its .sparse to False: under SGD without momentum it trains the same.",
        layer=layer,
    )
