"""What is refused when ranks build their trainers: options that several processes cannot have, and differences.

Software, options, and the model with its weights must be equal on all ranks.

Differences are found here and named; what the ranks send each other is `relay.distributed.channel`'s. Invariant: every
rank finds the same difference.
"""

from __future__ import annotations

import platform
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from relay.errors import RanksDiffer
from relay.options import TrainOptions

OWN = ("device", "capacity", "host_memory", "pinned_memory", "resident_layers", "slots", "stall_timeout")
"""Options in which ranks may differ: they change where a rank's work is done, and no result."""
ELSEWHERE = ("param_groups",)
"""Options that are compared by what follows from them."""

Record = Mapping[str, Any]


def describe(model: nn.Module, options: TrainOptions, groups: Sequence[Mapping[str, Any]]) -> Record:
    """What is compared of a rank, in plain values: a value, or a mapping of values, by what it is called."""
    chosen = {
        name: _without_addresses(value)
        for name, value in msgspec.structs.asdict(options).items()
        if name not in OWN + ELSEWHERE
    }
    return {
        "software": {"python": platform.python_version(), "torch": torch.__version__, "bytes": sys.byteorder},
        "options": chosen,
        "model": {name: _describe(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())},
        "parameter groups": {  # after the model, whose number of parameters they have
            str(number): f"{len(group['params'])} parameters, {_without_parameters(group)}"
            for number, group in enumerate(groups)
        },
    }


def refuse_differences(records: Sequence[Record], names: Sequence[str]) -> None:
    """Raise RanksDiffer for the first difference between the first rank and another one."""
    first = records[0]
    for rank, record in enumerate(records[1:], 1):
        for part in first:
            ours, theirs = first[part], record[part]
            for key in (*ours, *(key for key in theirs if key not in ours)):
                if ours.get(key) != theirs.get(key):
                    raise RanksDiffer(
                        f"All ranks must train the same model with the same options. They differ in the {part}, in "
                        f"{key!r}: {names[0]} has {_show(ours.get(key))}, {names[rank]} has {_show(theirs.get(key))}. "
                        f"{_ADVICE[part]}"
                    )


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


_ADVICE = {
    "software": "Install the same versions on all hosts.",
    "options": "Give every rank the same options.",
    "parameter groups": "Give every rank the same param_groups.",
    "model": "Build the model from the same seed on every rank (torch.manual_seed before it), or load the same weights "
    "into it.",
}


def _describe(tensor: torch.Tensor) -> str:
    trained = ", trained" if tensor.requires_grad else ""
    return f"{tensor.dtype}{list(tensor.shape)}{trained}, checksum {_checksum(tensor):08x}"


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


def checksum_of_states(states: Mapping[str, Mapping[str, Any]]) -> str:
    """A checksum of optimizer states, by parameter and label."""
    parts = [
        (name, label, _describe(value.detach().cpu()) if isinstance(value, torch.Tensor) else repr(value))
        for name, state in states.items()
        for label, value in state.items()
    ]
    return f"{len(states)} parameters, checksum {zlib.crc32(repr(parts).encode()):08x}"


def _without_addresses(value: Any) -> str:
    """A value in words, without the addresses that functions and objects have in a process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _without_parameters(group: Mapping[str, Any]) -> str:
    return repr({key: value for key, value in group.items() if key not in ("params", "param_names")})


def _show(value: Any) -> str:
    return "nothing there" if value is None else str(value)
