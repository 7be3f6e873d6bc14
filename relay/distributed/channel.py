"""Messages between all ranks of a process group, in one order that is the same on every rank.

A channel has a process group of its own (gloo, so tensors in host memory) and one thread, which runs what is submitted
in order. Every message goes from each rank to each other one, so a rank that has ended is noticed by all of them.
Nothing is summed here. Invariant: calls of all ranks on one channel match one by one, or an error is raised.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import distributed

from hal.errors import HalError
from hal.event import Event
from hal.worker import Worker
from relay.errors import RankLost

FIRST_PART = 2048
"""Bytes of a record that are sent at once, without knowing how long the records of the others are."""
_LENGTH = 8


class Channel:
    """Messages in order between the ranks of a process group.

    Args:
        group: a process group whose backend is gloo.
        purpose: what the messages are for, for errors and the thread's name.
        lost: makes the error for a rank that cannot be reached, from its number and the reason.
    """

    def __init__(self, group: Any, purpose: str, lost: Callable[[int, str], RankLost]) -> None:
        self._group = group
        self.rank = distributed.get_rank(group)
        self.count = distributed.get_world_size(group)
        self._lost = lost
        self._purpose = purpose
        self._failure: RankLost | None = None
        self._worker = Worker(f"ranks, {purpose}")

    def submit(self, call: Callable[[], None], wait: Sequence[Event], label: str) -> Event:
        """Run a call, which may send messages, in order with the others. It is not run if an event of `wait` failed."""
        return self._worker.submit(call, wait, label)

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        """Send `outgoing[r]` to each other rank r, and receive `incoming[r]` from it. Called on the channel's thread.

        Nothing is sent where a tensor has no elements.
        Raises RankLost. After that every exchange raises it.
        """
        if self._failure is not None:
            raise self._failure
        senders = [rank for rank in range(self.count) if rank != self.rank and incoming[rank].numel()]
        receivers = [rank for rank in range(self.count) if rank != self.rank and outgoing[rank].numel()]
        pending: list[tuple[int, Any]] = []
        failed: tuple[int, RuntimeError] | None = None
        rank = self.rank
        try:
            for rank in senders:
                pending.append((rank, distributed.irecv(incoming[rank], rank, group=self._group)))
            for rank in receivers:
                pending.append((rank, distributed.isend(outgoing[rank], rank, group=self._group)))
        except RuntimeError as problem:
            failed = rank, problem
        for rank, work in pending:
            if failed is not None:
                break
            try:
                work.wait()
            except RuntimeError as problem:
                failed = rank, problem
        if failed is not None:
            self._failure = self._lost(failed[0], f"{in_plain_words(failed[1])} ({self._purpose}).")
            raise self._failure from failed[1]

    def collect_now(self, to: int, sent: torch.Tensor | None, received: Mapping[int, torch.Tensor]) -> None:
        """Send a tensor to one rank, which receives `received` from the others. From any thread; called on all ranks.

        The ranks that send are those in `received`, on every rank.
        """

        def collect() -> None:
            if self._failure is not None:
                raise self._failure
            work: list[tuple[int, Any]] = []
            rank = to
            try:
                if self.rank == to:
                    for rank, part in received.items():
                        work.append((rank, distributed.irecv(part, rank, group=self._group)))
                elif self.rank in received and sent is not None:
                    work.append((to, distributed.isend(sent, to, group=self._group)))
                for rank, one in work:  # noqa: B007  (named in the error)
                    one.wait()
            except RuntimeError as problem:
                self._failure = self._lost(rank, f"{in_plain_words(problem)} ({self._purpose}).")
                raise self._failure from problem

        self._now(collect, f"{self._purpose} to rank {to}")

    def gather(self, record: Any) -> list[Any]:
        """The records of all ranks, in rank order. A record is a value that JSON holds. On the channel's thread."""
        data = json.dumps(record).encode()
        sizes = len(data).to_bytes(_LENGTH, "little")
        first = _as_tensor((sizes + data)[:FIRST_PART].ljust(FIRST_PART, b"\0"))
        heads = [torch.empty(FIRST_PART, dtype=torch.uint8) for _ in range(self.count)]
        self.exchange([first] * self.count, heads)
        heads[self.rank] = first
        found = [head.numpy().tobytes() for head in heads]
        lengths = [int.from_bytes(head[:_LENGTH], "little") for head in found]
        within = FIRST_PART - _LENGTH
        if max(lengths) > within:
            own = _as_tensor(data[within:] or b"\0")
            tails = [torch.empty(max(length - within, 1), dtype=torch.uint8) for length in lengths]
            self.exchange([own] * self.count, tails)
            tails[self.rank] = own
            found = [head + tail.numpy().tobytes() for head, tail in zip(found, tails, strict=True)]
        return [
            json.loads(one[_LENGTH : _LENGTH + length].decode()) for one, length in zip(found, lengths, strict=True)
        ]

    def gather_now(self, record: Any) -> list[Any]:
        """The same from any thread, after everything that was submitted."""
        found: list[Any] = []
        self._now(lambda: found.extend(self.gather(record)), f"{self._purpose} between ranks")
        return found

    def exchange_now(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        """`exchange` from any thread, after everything that was submitted."""
        self._now(lambda: self.exchange(outgoing, incoming), f"{self._purpose} between ranks")

    def _now(self, call: Callable[[], None], label: str) -> None:
        """Run a call after everything that was submitted, and raise its error as it is."""
        try:
            self.submit(call, (), label).wait()
        except HalError as failure:
            raise failure.__cause__ or failure from None

    def hear_out(self) -> None:
        """Wait until all ranks have read what was sent: before an error that may end this process, and its connections.

        Ranks that have ended already are no error.
        """
        with suppress(RankLost):
            self.gather_now(None)

    def close(self) -> None:
        """End the thread, when all that was submitted has ended."""
        self._worker.close()


def in_plain_words(problem: RuntimeError) -> str:
    """What gloo's error means. Its text names lines of gloo's source; it stays the cause of the error."""
    text = str(problem).lower()
    if "timed out" in text or "timeout" in text:
        return "it has not answered within the time limit of the process group"
    if any(words in text for words in ("closed", "reset by peer", "broken pipe")):
        return "its connection was closed"
    return "the connection to it failed"


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
