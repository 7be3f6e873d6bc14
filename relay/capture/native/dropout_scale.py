"""Dropout's scale, as the CPU's kernel rounds it.

Plain PyTorch on the CPU multiplies by a mask that it has divided by 1 - p in the dtype of the values. A trace has
`native_dropout` there, which multiplies by 1 / (1 - p), rounded from double. One p in four makes another number of it
(0.15 does). So forward and backward are given the kernel's number.

Other devices keep theirs: their eager dropout is `native_dropout` itself. It draws no mask; `random_ops` does.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten


def correct_dropout_scale(graph: fx.Graph) -> None:
    """Give every dropout of a graph for the CPU the scale that it has in eager PyTorch, as `meta["scale"]`."""
    for node in graph.nodes:
        if node.target is not aten.native_dropout.default:
            continue
        node.meta["scale"] = scale = kernel_scale(float(node.args[1]), node.args[0].meta["val"].dtype)
        for mask in node.users:
            for user in list(mask.users):
                if user.target is aten.native_dropout_backward.default and user.args[1] is mask:
                    user.update_arg(2, scale)


def kernel_scale(probability: float, dtype: torch.dtype) -> float:
    """What a kept value is multiplied by, in plain PyTorch on the CPU."""
    if probability == 1.0:
        return 0.0
    with _disable_current_modes():
        return torch.ones((), dtype=dtype).div_(1.0 - probability).item()
