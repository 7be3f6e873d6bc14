"""The buffers that a step's forward changes, such as the running statistics of BatchNorm, on all ranks.

Each rank's forward changes its own. After the step all have those of one rank, as with torch's
DistributedDataParallel. Gradients and weights are not exchanged here. Invariant: after a step that was applied all
ranks have equal buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from relay.distributed.ranks import Ranks


def share_buffers(ranks: Ranks, source: int, buffers: Sequence[torch.Tensor]) -> None:
    """Give these buffers the values that they have on the rank `source`, called on all ranks."""
    sizes = [buffer.numel() * buffer.itemsize for buffer in buffers]
    if not sum(sizes):
        return
    nothing = torch.empty(0, dtype=torch.uint8)
    none = [nothing] * ranks.count
    if ranks.rank == source:
        data = torch.cat([buffer.contiguous().view(-1).view(torch.uint8) for buffer in buffers])
        ranks.control.exchange_now([data] * ranks.count, none)
        return
    data = torch.empty(sum(sizes), dtype=torch.uint8)
    ranks.control.exchange_now(none, [data if rank == source else nothing for rank in range(ranks.count)])
    for buffer, part in zip(buffers, torch.split(data, sizes), strict=True):
        buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))  # a copy is aligned for its dtype
