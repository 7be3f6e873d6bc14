"""Launches recorded once and replayed: CUDA graphs, one for a kernel bound to the same addresses again and again.

The memory of slots never moves, so layer after layer a kernel is launched with the very same addresses. The first
launch is plain, which warms up what libraries allocate; the second is recorded, and all later ones are one call of
the driver instead of one for each op. Nothing else changes: the same kernels run, in the same order.

What is recorded must neither draw random numbers nor wait for the host, and must be worth its memory: temporaries of
recorded launches lie in a pool of their own, shared by all of one queue (they never outlive their launch, and a queue
runs one launch at a time), which is accounted. An error while recording is logged once and ends recording on
that queue; the launch is then made without recording, because nothing of it has run.

It does not know CUDA; how a call is recorded is the accelerator's (`Recorder`). Invariant: a replay does what the call
would have done, since its key is the function and every address that it was given.
"""

from __future__ import annotations

import abc
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hal.errors import OutOfMemory
from hal.memory import MemoryAccount
from hal.program import Program

logger = logging.getLogger(__name__)

RECORDS = "records-launches"
"""Tag: launches on the same addresses are recorded and replayed."""

LIMIT = 512
"""Recordings that one queue keeps. A recording costs some tens of kilobytes."""

REST = 16 * LIMIT
"""Launches after which a recording that was not replayed is replaced by another."""

_Key = tuple[Callable[..., Any], tuple[int, ...]]


class Recorder(abc.ABC):
    """How an accelerator records. One for each queue, as the memory of recordings is."""

    @abc.abstractmethod
    def record(self, stream: Any, call: Callable[[], Any]) -> Callable[[], Any]:
        """Record what `call` gives the stream, which runs none of it; returns what replays it on the current stream.

        Raises the error of the recording; the stream is then as usable as before.
        """


def reason_against(program: Program) -> str:
    """Why a program's launches cannot be recorded; empty where they can."""
    if program.draws:
        return "it draws random numbers, with a key that changes from launch to launch"
    for node in program.graph.nodes:
        if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload):
            tags = getattr(node.target, "tags", ())
            if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
                return f"{node.target} waits for the host"
            if isinstance(node.target, torch._ops.OpOverload) and node.target.name().startswith("aten::_to_copy"):
                device = node.kwargs.get("device")
                if device is not None and torch.device(device).type == "cpu":
                    return "it sends a value to the host"
        elif getattr(node.target, "__module__", "") != "_operator":
            return f"it calls Python ({node.target})"
    return ""


class Recordings:
    """The recordings of one queue. All but `forget` are called on the queue's thread."""

    def __init__(self, recorder: Recorder, stream: Any, account: MemoryAccount, limit: int = LIMIT) -> None:
        self._recorder: Recorder | None = recorder
        self._stream = stream
        self._account = account
        self._limit = limit
        self._seen: OrderedDict[_Key, None] = OrderedDict()
        self._replays: OrderedDict[_Key, tuple[Callable[[], Any], int]] = OrderedDict()
        self._launches = 0
        self._pool = 0
        self._lock = threading.Lock()
        self.replayed = 0

    def launch(self, program: Program, function: Callable[..., Any], arguments: Sequence[torch.Tensor]) -> None:
        """Run `function(*arguments)` on the queue's stream, which is the current one, recorded where it can be."""
        key = (function, tuple(tensor.data_ptr() for tensor in arguments))
        with self._lock:
            self._launches += 1
            found = self._replays.get(key)
            if found is None and self._second_time(key):
                found = self._recorded(key, program, lambda: function(*arguments))
            if found is not None:
                replay, _ = found
                self._replays[key] = (replay, self._launches)
                self._replays.move_to_end(key)
                self.replayed += 1
                replay()
                return
        function(*arguments)

    def forget(self, settle: Callable[[], None]) -> bool:
        """Give up all recordings and their memory, after `settle`, which waits for the queue; whether there were any.

        They are not made again, because the memory will be needed again.
        """
        with self._lock:
            had = bool(self._replays) or self._pool > 0
            settle()
            self._recorder = None
            self._seen.clear()
            self._replays.clear()
            self._account.release(self._pool)
            self._pool = 0
        return had

    def _second_time(self, key: _Key) -> bool:
        """Whether the key was met before and is to be recorded now."""
        if self._recorder is None:
            return False
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > 8 * self._limit:
                self._seen.popitem(last=False)
            return False
        if len(self._replays) >= self._limit:
            # A cycle longer than the limit would record all anew in each turn: only unused recordings are dropped.
            _, (_, last) = next(iter(self._replays.items()))
            if self._launches - last < REST:
                return False
            self._replays.popitem(last=False)
        return True

    def _recorded(self, key: _Key, program: Program, call: Callable[[], Any]) -> tuple[Callable[[], Any], int] | None:
        assert self._recorder is not None
        growth = max(0, program.workspace - self._pool)
        try:
            self._account.charge(growth, f"temporaries of recorded launches of {program.name}")
        except OutOfMemory as failure:
            self._stop(program, str(failure))
            return None
        try:
            replay = self._recorder.record(self._stream, call)
        except Exception as failure:
            self._account.release(growth)
            self._stop(program, f"{type(failure).__name__}: {failure}".splitlines()[0])
            return None
        self._pool += growth
        self._seen.pop(key, None)
        return replay, self._launches

    def _stop(self, program: Program, why: str) -> None:
        self._recorder = None
        logger.warning("launches are not recorded any more, since that of %s could not be: %s", program.name, why)
