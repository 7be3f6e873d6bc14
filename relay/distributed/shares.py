"""A rank's share of a batch that has no samples: how it is recognised, and what its programs are compiled for instead.

The stand-in has samples of zeros. It is compiled and never run. Invariant: a batch with samples is not empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from relay.graph.pytree import tensor_leaves


def is_empty(batch: Any) -> bool:
    """Whether all tensors of a batch (of those with dimensions) have length 0, and there is one."""
    tensors, _ = tensor_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    with_samples = [tensor for tensor in tensors if tensor.dim()]
    return bool(with_samples) and all(len(tensor) == 0 for tensor in with_samples)


def stand_in(batch: Any, microbatches: int) -> Any:
    """The batch with two samples of zeros for each micro-batch: BatchNorm does not take one."""
    tensors, tree = tensor_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    count = 2 * microbatches
    filled = [
        torch.zeros((count, *tensor.shape[1:]), dtype=tensor.dtype) if tensor.dim() else tensor for tensor in tensors
    ]
    return tree.fill(filled)
