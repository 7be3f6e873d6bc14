"""What a trainer may not do over several processes: be used in a forked child, copied, or train alone unseen.

A trainer holds threads, a device and the memory of a store. None of them exists in a forked child, nor in a copy. The
functions here find out and raise or warn; they change nothing.
"""

from __future__ import annotations

import os
import warnings
from typing import NoReturn

import torch.distributed

from relay.errors import RelayError

_warned_alone = False


def refuse_in_child(process: int) -> None:
    """Raise RelayError if the current process is not `process`, the one that made the trainer."""
    if os.getpid() != process:
        raise RelayError(
            f"This trainer was made in process {process}, and is used in process {os.getpid()}, a forked child of it. "
            "The trainer's threads and its device do not exist in a child. Create the trainer in the child, or start "
            "the child with multiprocessing.get_context('spawn') and create the trainer there. The model itself can be "
            "used in the child: it holds the weights as they were at the fork."
        )


def refuse_copy(what: str, instead: str) -> NoReturn:
    """Raise TypeError for an object that copy, deepcopy and pickle cannot reproduce."""
    raise TypeError(
        f"{what} cannot be copied or pickled: it belongs to the threads, the device and the memory of one trainer. "
        f"{instead}"
    )


def warn_if_alone() -> None:
    """Warn, once in a process, where a launcher started several processes and none of them has a process group."""
    global _warned_alone
    count = os.environ.get("WORLD_SIZE", "")
    if _warned_alone or not count.isdecimal() or int(count) <= 1:
        return
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    _warned_alone = True
    warnings.warn(
        f"WORLD_SIZE={count} in the environment: a launcher such as torchrun started {count} processes, but no process "
        "group is initialised. This trainer trains alone: the processes exchange no gradients, and each of them trains "
        "a model of its own. To train together, call torch.distributed.init_process_group('gloo') before the trainer "
        "is built. Otherwise start one process, or give each process a model, data and folders of its own.",
        stacklevel=6,
    )
