"""Runs a function on several ranks: processes of one gloo group, each with one thread, started from a fork server.

The server has imported the relay, so a rank starts in a fraction of a second. A rank's error is a result too.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import distributed

LONGEST = 120.0
"""Seconds after which ranks that have not ended are killed, and the test fails."""

PRELOADED = ["relay.trainer", "backends.cpu", "torch._dynamo", "torch._inductor", "torch._higher_order_ops", "sympy"]

_numbers = itertools.count()


class Ranks:
    """Processes that run a function, each with its rank. `results` waits for them."""

    def __init__(self, count: int, function: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / f"store-{next(_numbers)}")
        self.processes = []
        self._pipes: list[Connection] = []
        for rank in range(count):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run, args=(rank, count, store, theirs, pickle.dumps((function, args))), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def kill(self, rank: int) -> None:
        """End a rank without warning, as a lost host would."""
        os.kill(self.processes[rank].pid or 0, signal.SIGKILL)

    def results(self, longest: float = LONGEST) -> list[Any]:
        """What each rank returned, or the text of its error. A rank that was killed gives None."""
        deadline = monotonic() + longest
        found: list[Any] = []
        try:
            for rank, pipe in enumerate(self._pipes):
                if not pipe.poll(max(0.0, deadline - monotonic())):
                    raise AssertionError(f"Rank {rank} has not ended after {longest} seconds.")
                try:
                    found.append(pickle.loads(pipe.recv_bytes()))
                except EOFError:
                    found.append(None)
            for rank, process in enumerate(self.processes):
                process.join(30)
                assert process.exitcode is not None, f"Rank {rank} has a result and does not exit."
        finally:
            for process in self.processes:
                process.kill()
            self._folder.cleanup()
        return found


def run_ranks(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(rank, count, *args)` returns on each rank, or the text of its error."""
    return Ranks(count, function, *args).results()


def _run(rank: int, count: int, store: str, pipe: Connection, job: bytes) -> None:
    function, args = pickle.loads(job)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    try:
        result = function(rank, count, *args)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    pipe.send_bytes(pickle.dumps(result))
    pipe.close()
    distributed.destroy_process_group()
