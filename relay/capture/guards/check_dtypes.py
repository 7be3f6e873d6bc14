"""Finding ops whose kernels refuse the dtypes of their arguments, before anything runs.

Fake tensors accept a matrix product of float64 and float32, or labels of int32, for which the kernel fails in the
middle of a step. The graph holds the dtypes of all arguments, so PyTorch's rules are checked on it, for the ops whose
fake implementations do not check them. Nothing is converted. Invariant: what is refused here, PyTorch's kernels refuse
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from hal.dtypes import HALVES
from relay.capture.guards.messages import described_layer
from relay.capture.norm_dtypes import NORMS
from relay.capture.request import CaptureRequest
from relay.errors import CaptureError

aten = torch.ops.aten

_PRODUCTS: frozenset[Any] = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten.convolution_backward.default,
    }
)
"""Ops whose tensors must all have one dtype."""

_CLASSES: frozenset[Any] = frozenset({aten.nll_loss_forward.default, aten.nll_loss2d_forward.default})
"""Losses whose second tensor holds class indices."""


def check_operands(graph: fx.Graph, request: CaptureRequest) -> None:
    """Raise CaptureError if an op in the graph of a segment cannot take the dtypes of its arguments."""
    layer, where = request.name, described_layer(request.name, request.ends_in_loss)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        given = [value.meta["val"].dtype for value in node.args if isinstance(value, fx.Node) and _is_tensor(value)]
        if node.target in _CLASSES and given[1] not in (torch.int64, torch.uint8):
            raise CaptureError(
                f"{where} calls {node.target} with targets of {given[1]}, but it takes class indices of torch.int64. "
                "Convert them: targets.long().",
                layer=layer,
                op=str(node.target),
            )
        if (node.target in _PRODUCTS and len(set(given)) > 1) or (node.target in NORMS and not _suits_norm(given)):
            raise CaptureError(
                f"{where} calls {node.target} with tensors of {_listed(given)}, but it takes tensors of one dtype. The "
                f"inputs of the layer are of {_listed([tensor.dtype for tensor in request.inputs])}, its parameters of "
                f"{_listed([tensor.dtype for tensor in request.module.parameters()]) or 'no dtype (it has none)'}. "
                "Convert the batch, for example with inputs.float(), or the layer.",
                layer=layer,
                op=str(node.target),
            )


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _suits_norm(given: Sequence[torch.dtype]) -> bool:
    """Whether a norm takes these dtypes: all equal, or values in bfloat16 or float16 and the rest in float32."""
    return len(set(given)) <= 1 or (given[0] in HALVES and set(given[1:]) == {torch.float32})


def _listed(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(dict.fromkeys(map(str, dtypes)))
