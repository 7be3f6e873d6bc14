"""What several processes cannot do yet: options that are refused by name, before the first step, and models.

Invariant: nothing that is refused here has changed anything.
"""

from __future__ import annotations

from collections.abc import Iterable

from relay.errors import PartitionError
from relay.options import TrainOptions


def refuse_options(options: TrainOptions) -> None:
    """Raise ValueError for an option that one process has and several do not."""
    refused = (
        ("loss_over", options.loss_over == "batch", "The head would have to see the samples of all ranks."),
        ("on_device_lost", options.on_device_lost == "retry", "Use torchrun --max-restarts and checkpoints instead."),
        ("sparse_rows", options.sparse_rows is True, "Leave it out: whole tables are sent."),
    )
    for name, is_given, advice in refused:
        if is_given:
            raise ValueError(f"{name}={getattr(options, name)!r} is not possible with several processes. {advice}")


def refuse_changing_buffers(names: Iterable[str]) -> None:
    """Raise PartitionError for buffers that the forward changes: each rank would have statistics of its own."""
    for name in names:
        raise PartitionError(
            f"The forward changes the buffer {name!r}, as BatchNorm changes its running statistics, and each process "
            "would have its own. Use a norm without running statistics, put the module in eval mode, or "
            "train in one process."
        )
