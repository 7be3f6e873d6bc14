"""Ops that are given tensors of dtypes that their kernels refuse, found before anything runs.

Fake tensors let a matrix product of float64 and float32 pass, and labels of int32; the kernel then fails in the middle
of a step. A graph says what every op will be given. The rules are PyTorch's own, of the ops whose fake forms do not
check them; it converts nothing. Invariant: what is refused here, PyTorch's kernels refuse as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from hal.dtypes import HALVES
from relay.capture.norm_dtypes import NORMS
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
"""Ops whose tensors must all be of one dtype."""

_CLASSES: frozenset[Any] = frozenset({aten.nll_loss_forward.default, aten.nll_loss2d_forward.default})
"""Losses whose second tensor holds numbers of classes."""


def check_operands(graph: fx.Graph, module: nn.Module, inputs: Sequence[torch.Tensor], layer: str, loss: bool) -> None:
    """Raise CaptureError where an op of a segment's graph cannot take what it is given. `inputs` are the segment's,
    the targets among them where it ends in the `loss`."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        given = [one.meta["val"].dtype for one in node.args if isinstance(one, fx.Node) and _is_tensor(one)]
        where = f"layer {layer!r}" + (" (or the loss, which runs with it)" if loss else "")
        if node.target in _CLASSES and given[1] not in (torch.int64, torch.uint8):
            raise CaptureError(
                f"{where} gives {node.target} targets of {given[1]}, and it takes numbers of classes in torch.int64. "
                "Convert them: targets.long().",
                layer=layer,
                op=str(node.target),
            )
        if (node.target in _PRODUCTS and len(set(given)) > 1) or (node.target in NORMS and not _suits_norm(given)):
            raise CaptureError(
                f"{where} gives {node.target} tensors of {_listed(given)}, and it takes tensors of one dtype. Its "
                f"inputs are of {_listed([one.dtype for one in inputs])}, its parameters of "
                f"{_listed([one.dtype for one in module.parameters()]) or 'no dtype, as it has none'}: convert the "
                "batch (inputs.float(), say), or the layer.",
                layer=layer,
                op=str(node.target),
            )


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _suits_norm(given: Sequence[torch.dtype]) -> bool:
    """Norms take low-precision values with parameters and statistics in float32."""
    return len(set(given)) <= 1 or (given[0] in HALVES and set(given[1:]) == {torch.float32})


def _listed(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(dict.fromkeys(map(str, dtypes)))
