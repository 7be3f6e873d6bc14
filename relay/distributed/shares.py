"""A rank's share of a batch that has no samples: how it is recognised, and what its programs are compiled for instead.

The stand-in has one sample of zeros. It is compiled and never run. Invariant: a batch with samples is not empty.
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


def stand_in(batch: Any) -> Any:
    """The batch with one sample of zeros."""
    tensors, tree = tensor_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    filled = [torch.zeros((1, *tensor.shape[1:]), dtype=tensor.dtype) if tensor.dim() else tensor for tensor in tensors]
    return tree.fill(filled)
