"""Why a capture failed, in words: which layer, which op, and what to do about it.

It makes errors and raises none; whether a layer that cannot be captured may run eagerly is decided in `joint`.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator

from relay.errors import CaptureError, RelayError


class HasEffect(Exception):
    """A trace holds an op that does something besides its results, such as raising an error by what it finds."""

    def __init__(self, op: str) -> None:
        super().__init__(op)
        self.op = op


_NO_DERIVATIVE = re.compile(r"derivative for '?(?:aten::)?(\w+)")
_DATA_DEPENDENT = re.compile(r"(aten[.:]+\w+(?:\.\w+)?)")


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Within it PyTorch does not log that an op failed on fake tensors: what became of that, we say ourselves."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def in_short(failure: Exception) -> str:
    """Its kind and the first line that it says."""
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0] if lines else ''}"


def operation(failure: Exception) -> str:
    """The op at which a trace failed; empty where the failure does not say."""
    named = getattr(failure, "func", None)
    if named is not None:
        return str(named)
    found = _DATA_DEPENDENT.search(str(failure))
    return found.group(1) if found else ""


def explain(failure: Exception, layer: str) -> RelayError:
    """The error to raise for a failed trace of `layer`; the relay's own errors pass as they are."""
    if isinstance(failure, RelayError):
        return failure
    kind = type(failure).__name__
    underived = _NO_DERIVATIVE.search(str(failure))
    if underived:
        return CaptureError(
            f"layer {layer!r} needs a gradient through aten.{underived[1]}, for which PyTorch has none (its own "
            f"backward fails too: {failure}) Detach what the op is given (x.detach()) where no gradient is meant to "
            "flow through it, or use another op.",
            layer=layer,
            op=f"aten.{underived[1]}",
        )
    op = operation(failure)
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
            "set that to 0 and choose them with step(batch, active_layers=...).",
            layer=layer,
            op=op,
            by_data=True,
        )
    return CaptureError(f"layer {layer!r} cannot be captured: {in_short(failure)}", layer=layer, op=op)


def reason(failure: Exception, layer: str) -> str | None:
    """In a few words why a layer could not be captured; None where it is an error of ours, which stands."""
    if isinstance(failure, RelayError):
        return None
    if isinstance(failure, HasEffect):
        return f"{failure.op} does more than give a result (it raises an error by what it finds, say)"
    explained = explain(failure, layer)
    if isinstance(explained, CaptureError) and explained.by_data:
        return f"{explained.op or 'an op'} makes its shapes or its control flow depend on the data"
    return f"it cannot be captured ({in_short(failure)})"


def explain_eager(failure: Exception, layer: str, why: str) -> RelayError:
    """The error for a layer that cannot be captured, and that PyTorch does not run on made-up numbers either."""
    if isinstance(failure, RelayError) or _NO_DERIVATIVE.search(str(failure)):
        return explain(failure, layer)
    return CaptureError(
        f"layer {layer!r} cannot be captured, since {why}; and run eagerly on small numbers and zeros of the right "
        f"shapes, to learn the shapes that come out, it fails: {in_short(failure)}",
        layer=layer,
    )


def described_layer(layer: str, ends_in_loss: bool) -> str:
    """A layer in the subject of an error. The error may also come from the loss, if the layer ends in it."""
    return f"layer {layer!r}" + (" (or the loss, which runs with it)" if ends_in_loss else "")


_KINDS = {"joint": "forward, loss and backward", "loss": "forward and loss"}


def name_of_program(layer: str, kind: str) -> str:
    """What a layer's program is called in errors."""
    return f"layer {layer!r} {_KINDS.get(kind, kind)}"


def own_name(name: str) -> str:
    """A parameter's name as its owner has it, from that within a segment."""
    return name.removeprefix("module.").removeprefix("block.").replace("__", ".")


def changed_parameter(layer: str, parameter: str) -> CaptureError:
    """The error for a layer whose forward writes to its own parameter."""
    return CaptureError(
        f"layer {layer!r} changes its parameter {own_name(parameter)!r} in its forward (an embedding with max_norm "
        "does). The optimizer alone changes parameters here: its forward may run twice in a step, and on copies. "
        "Change the parameter between steps instead (with torch.no_grad(): weight.copy_(...)); an embedding's rows "
        "can be brought to their norm by torch.renorm.",
        layer=layer,
    )


def sparse_gradient(layer: str, parameter: str) -> CaptureError:
    """The error for a parameter whose gradient is a sparse tensor, before any step is taken."""
    return CaptureError(
        f"layer {layer!r} makes a sparse gradient for {own_name(parameter)!r} (an embedding with sparse=True). "
        "Gradients have a place of fixed size here, and optimizers for sparse ones (SparseAdam) update only rows that "
        "occur. Make the embedding with sparse=False, or set its .sparse to False: under SGD without momentum it "
        "trains the same.",
        layer=layer,
    )
