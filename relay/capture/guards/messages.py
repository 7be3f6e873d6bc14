"""Error messages for failed captures: which layer, which op, and what to do.

Errors are made here and raised by the callers. Whether a layer that cannot be traced runs eagerly is decided in
`relay.capture.capture`.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator

from relay.errors import CaptureError, PartitionError, RelayError


class NotAGraph(Exception):
    """A trace holds an op that PyTorch does not describe well enough to cut it up into programs: `why`."""

    def __init__(self, op: str, why: str) -> None:
        super().__init__(op)
        self.op = op
        self.why = why


_NO_DERIVATIVE = re.compile(r"derivative for '?(?:aten::)?(\w+)")
_DATA_DEPENDENT = re.compile(r"(aten[.:]+\w+(?:\.\w+)?)")


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """While open, PyTorch does not log that an op failed on fake tensors. Relay reports the consequences itself."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def in_short(failure: Exception) -> str:
    """The class of an exception and the first line of its message."""
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0] if lines else ''}"


def operation(failure: Exception) -> str:
    """The name of the op at which a trace failed, or an empty string if the exception does not name it."""
    named = getattr(failure, "func", None)
    if named is not None:
        return str(named)
    found = _DATA_DEPENDENT.search(str(failure))
    return found.group(1) if found else ""


def explain(failure: Exception, layer: str) -> RelayError:
    """The error to raise for a failed trace of `layer`. A RelayError is returned unchanged."""
    if isinstance(failure, RelayError):
        return failure
    kind = type(failure).__name__
    underived = _NO_DERIVATIVE.search(str(failure))
    if underived:
        return CaptureError(
            f"layer {layer!r} needs a gradient through aten.{underived[1]}, for which PyTorch has no derivative "
            f"({in_short(failure)}). Detach the arguments of the op (x.detach()) if no gradient should flow through "
            "it, or use another op.",
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
            "repeated layers, which then runs eagerly. If a random number decides which layers run (layerdrop), "
            "set that to 0 and choose them with step(batch, active_layers=...).",
            layer=layer,
            op=op,
            by_data=True,
        )
    return CaptureError(f"layer {layer!r} cannot be captured: {in_short(failure)}", layer=layer, op=op)


def reason(failure: Exception, layer: str) -> str | None:
    """The reason why a layer could not be captured, in words that follow "since"; None for a RelayError."""
    if isinstance(failure, RelayError):
        return None
    if isinstance(failure, NotAGraph):
        return f"{failure.op} {failure.why}"
    explained = explain(failure, layer)
    if isinstance(explained, CaptureError) and explained.by_data:
        return f"{explained.op or 'an op'} makes its shapes or its control flow depend on the data"
    return f"it cannot be captured ({in_short(failure)})"


def in_words(failure: RelayError) -> str:
    """Why code could not be traced, in words that follow "since"."""
    if isinstance(failure, CaptureError) and failure.by_data:
        return f"{failure.op or 'an op'} makes its shapes or its control flow depend on the data"
    return str(failure).split(". ")[0].split(": ", 1)[-1]


def explain_eager(failure: Exception, layer: str, why: str) -> RelayError:
    """The error for a layer that cannot be traced, and that fails on made-up numbers as well. `why` is the reason."""
    if isinstance(failure, RelayError) or _NO_DERIVATIVE.search(str(failure)):
        return explain(failure, layer)
    return CaptureError(
        f"layer {layer!r} cannot be captured, since {why}. It cannot run eagerly either: on made-up inputs (small "
        f"random numbers, zeros for integers), used to find the shapes of its outputs, it fails: {in_short(failure)}",
        layer=layer,
    )


def described_layer(layer: str, ends_in_loss: bool) -> str:
    """A layer in the subject of an error. The error may also come from the loss, if the layer ends in it."""
    return f"layer {layer!r}" + (" (or the loss, which runs with it)" if ends_in_loss else "")


_KINDS = {"joint": "forward, loss and backward", "loss": "forward and loss"}


def name_of_program(layer: str, kind: str) -> str:
    """The name of a layer's program in errors."""
    return f"layer {layer!r} {_KINDS.get(kind, kind)}"


def own_name(name: str) -> str:
    """The name of a parameter in the model's layer, given its name in a segment."""
    return name.removeprefix("module.").removeprefix("block.").replace("__", ".")


def drawn_outside(model: str) -> PartitionError:
    """The error for a model whose code around the layers draws by Python or numpy what it computes."""
    return PartitionError(
        f"random numbers that {model} draws from Python's or numpy's generator, outside of its repeated layers, decide "
        "what it computes (which layers run, or which positions are masked), so a program would keep those of its "
        "first batch. Turn that off and choose the layers of each step by step(batch, active_layers=...), give what is "
        "drawn as part of the batch, draw inside a layer, or use torch's own (torch.rand, dropout) without branching."
    )


def changed_parameter(layer: str, parameter: str) -> CaptureError:
    """The error for a layer whose forward writes to its own parameter."""
    return CaptureError(
        f"layer {layer!r} changes its parameter {own_name(parameter)!r} in its forward (an embedding with max_norm "
        "does). Only the optimizer may change parameters, since a forward may run twice in a step, and on copies. "
        "Change the parameter between steps instead (with torch.no_grad(): weight.copy_(...)); torch.renorm limits "
        "the norm of an embedding's rows.",
        layer=layer,
    )


def changed_input(layer: str) -> CaptureError:
    """The error for code that writes to what it is given, where it cannot be given a copy."""
    return CaptureError(
        f"layer {layer!r} changes one of its inputs in place, but the recompute needs the input unchanged. Clone the "
        "input before changing it (value = value.clone()).",
        layer=layer,
    )


def sparse_gradient(layer: str, parameter: str) -> CaptureError:
    """The error for a parameter whose gradient is a sparse tensor."""
    return CaptureError(
        f"layer {layer!r} makes a sparse gradient for {own_name(parameter)!r} (an embedding with sparse=True). "
        "Relay supports dense gradients only. Build the embedding with sparse=False, or set its .sparse to False. "
        "Under SGD without momentum the result is the same; optimizers for sparse gradients (SparseAdam) update only "
        "the rows that occur.",
        layer=layer,
    )
