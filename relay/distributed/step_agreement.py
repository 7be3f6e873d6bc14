"""What all ranks agree on in a training step, by small messages: its loss, its norm and decision, and its end.

Gradients and weights are exchanged in `relay.distributed.parameter_server`. Invariant: each function is called on every
rank at the same message of the step, whatever has failed before on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from relay.distributed.block_norms import block_count, joined
from relay.distributed.ownership import Ownership
from relay.distributed.ranks import Ranks
from relay.distributed.step_progress import StepProgress
from relay.errors import NonFiniteLoss, RankFailed, RankLost, RelayError

_HEAD = 2  # of a message of norms: its status, and whether a gradient overflowed before it was clipped by value


def agree_on_loss(
    ranks: Ranks,
    progress: StepProgress,
    error: BaseException | None,
    losses: Callable[[], list[float]],
    number: int,
) -> None:
    """Join the losses of all ranks. Raises NonFiniteLoss on all of them if any rank's check refused its losses.

    `error` is that of the check on this rank.
    """
    refused = error is not None and isinstance(error.__cause__, NonFiniteLoss)
    failed = error is not None and not refused
    records = ranks.control.gather({"failed": failed, "refused": refused, "losses": [] if failed else losses()})
    progress.check([record["failed"] for record in records], error)
    progress.losses = [loss for record in records for loss in record["losses"]]
    if any(record["refused"] for record in records):
        raise progress.stop(NonFiniteLoss(sum(progress.losses), number))


def agree_on_norm(
    ranks: Ranks,
    progress: StepProgress,
    ownership: Ownership,
    sizes: Mapping[str, int],
    names: Sequence[str],
    error: BaseException | None,
    overflowed: bool,
) -> tuple[torch.Tensor, bool]:
    """The norm of all gradients (float32), and whether any rank found an overflow.

    `names` are the parameters that the step updates, in the model's order, and `sizes` the elements of each.
    """
    of_rank = [
        [block_count(stop - start, sizes[name]) for name in names for start, stop in [ownership.ranges(name)[rank]]]
        for rank in range(ranks.count)
    ]
    messages = [torch.zeros(_HEAD + sum(each), dtype=torch.float64) for each in of_rank]
    mine = messages[ranks.rank]
    mine[0], mine[1] = float(error is not None), float(overflowed)
    start = _HEAD
    for name, count in zip(names, of_rank[ranks.rank], strict=True):
        if count and name in progress.norms:
            mine[start : start + count] = progress.norms[name]
        start += count
    ranks.control.exchange([mine] * ranks.count, messages)
    progress.check([bool(message[0]) for message in messages], error)
    parts = [torch.split(message[_HEAD:], each) for message, each in zip(messages, of_rank, strict=True)]
    by_parameter = [joined(torch.cat(column)) for column in zip(*parts, strict=True)]
    total = joined(torch.stack(by_parameter)) if by_parameter else torch.zeros((), dtype=torch.float64)
    return total.float(), any(bool(message[1]) for message in messages)


def agree_on_end(ranks: Ranks, error: BaseException | None, updating: bool) -> tuple[BaseException | None, bool]:
    """The error that a step raises on this rank, and whether any rank had begun to update when a step failed.

    `error` is what ended the step here. The first cause is that of the lowest rank that has one of its own.
    """
    cause = error.__cause__ if error is not None and isinstance(error.__cause__, RelayError) else error
    if isinstance(cause, RankLost):
        return cause, updating
    own = None if cause is None or isinstance(cause, RankFailed) else f"{type(cause).__name__}: {cause}"
    try:
        records = ranks.control.gather_now({"error": own, "updating": updating})
    except RankLost as lost:
        return lost, updating
    failed = [rank for rank, record in enumerate(records) if record["error"] is not None]
    if not failed:
        return error, updating
    ranks.control.hear_out()
    updating = any(record["updating"] for record in records)
    if own is not None:
        return error, updating
    return RankFailed(failed[0], ranks.name(failed[0]), records[failed[0]]["error"]), updating
