"""The ranks of a run: the process group that the user's script made, and the channels between its processes.

`torch.distributed` must be initialised before the trainer is built, by the script or by the command; nothing here
starts processes. Invariant: every rank makes the same channels in the same order.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch import distributed

from relay.distributed.channel import Channel
from relay.errors import RankLost

_LOST = "relay/first rank lost"


class Ranks:
    """All processes that train together, seen from one of them.

    Attributes:
        rank, count: this process, and how many there are.
        control: the channel of small records.
        bulk: the channel of gradients and weights.
    """

    def __init__(self) -> None:
        self.rank = distributed.get_rank()
        self.count = distributed.get_world_size()
        self._names = [f"rank {rank}" for rank in range(self.count)]
        self._groups: list[Any] = [distributed.new_group(backend="gloo") for _ in range(2)]
        self.control = Channel(self._groups[0], "control messages", self._lost)
        self.bulk = Channel(self._groups[1], "gradients and weights", self._lost)
        self._checkpoints: Channel | None = None
        hosts = self.control.gather_now({"host": socket.gethostname(), "process": os.getpid()})
        self._names = [
            f"rank {rank} of {self.count} (process {one['process']} on {one['host']})" for rank, one in enumerate(hosts)
        ]

    @property
    def checkpoints(self) -> Channel:
        """The channel of checkpoints, which are written while training continues. All ranks ask for it at once."""
        if self._checkpoints is None:
            self._groups.append(distributed.new_group(backend="gloo"))
            self._checkpoints = Channel(self._groups[-1], "checkpoints", self._lost)
        return self._checkpoints

    def name(self, rank: int) -> str:
        """A rank in words, with its process and host."""
        return self._names[rank]

    def _lost(self, rank: int, reason: str) -> RankLost:
        """The error for a rank that cannot be reached: the first such rank that any of the others has noticed.

        A rank that ends because another one has ended is not the cause.
        """
        with suppress(Exception):  # the store may have ended with the rank that held it
            store = distributed.distributed_c10d._get_default_store()
            store.set_timeout(timedelta(seconds=5))
            rank = int(store.compare_set(f"{_LOST}, attempt {_attempt()}", "", str(rank)))
        return RankLost(rank, self.name(rank), reason)

    def close(self) -> None:
        """End the channels, when all that was submitted has ended."""
        for channel in (self._checkpoints, self.control, self.bulk):
            if channel is not None:
                channel.close()
        for group in self._groups:
            with suppress(Exception):  # a group that has lost a rank, or that the script has destroyed already
                distributed.destroy_process_group(group)


def ranks_of_this_run() -> Ranks | None:
    """The ranks, where a process group of several processes has been initialised; None for a process alone.

    It is called by all ranks at once.
    """
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return None
    return Ranks()


def launched() -> tuple[int, int]:
    """The rank of this process and the number of processes, as torchrun has started them; (0, 1) without it."""
    rank, count = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(count)) if rank.isdecimal() and count.isdecimal() else (0, 1)


def restarted() -> bool:
    """Whether torchrun --max-restarts has started this process again after a failure."""
    return _attempt() not in ("", "0")


def _attempt() -> str:
    """How many times torchrun has started the processes again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


@contextmanager
def joined_group() -> Iterator[None]:
    """A context with a process group of what torchrun has started. A group that is there is left alone.

    Each attempt of torchrun --max-restarts has keys of its own in torchrun's store, where a rank would otherwise find
    the addresses of the attempt before.
    """
    if launched()[1] <= 1 or distributed.is_initialized():
        yield
        return
    store, rank, count = next(distributed.rendezvous("env://"))
    own = distributed.PrefixStore(f"relay, attempt {_attempt()}", store)
    distributed.init_process_group("gloo", store=own, rank=rank, world_size=count)
    try:
        yield
    finally:
        with suppress(Exception):  # after a failure others may be gone
            distributed.destroy_process_group()


def local_device(device: str | Sequence[str]) -> str | Sequence[str]:
    """The device of this process: a name without a number gets that of LOCAL_RANK, which torchrun sets."""
    number = os.environ.get("LOCAL_RANK", "")
    return f"{device}:{number}" if device in ("cuda", "cupy", "opencl") and number.isdecimal() else device
