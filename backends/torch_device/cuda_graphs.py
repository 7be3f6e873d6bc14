"""Launches recorded once and replayed: CUDA graphs, one for a kernel bound to the same addresses again and again.

The memory of slots never moves, so layer after layer a kernel is launched with the very same addresses. The first
launch is plain, which warms up what libraries allocate; the second is recorded, and all later ones are one call of
the driver instead of one for each op. Nothing else changes: the same kernels run, in the same order.

What is recorded must neither draw random numbers nor wait for the host, and must be worth its memory: temporaries of
recorded launches lie in a pool of their own, shared by all of one queue (they never outlive their launch, and a queue
runs one launch at a time), which is accounted. An error while recording is logged once for the program, whose launches
are then made without recording, because nothing of the failed one has run; other programs are recorded as before. With
a kernel that nothing refers to any more its recordings go, and with the largest of a pool the pool.

It does not know CUDA; how a call is recorded is the accelerator's (`Recorder`). Invariant: a replay does what the call
would have done, since its key is the function, every address that it was given, and the settings of PyTorch that
choose kernels (`settings`).
"""

from __future__ import annotations

import abc
import functools
import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


class _Key(NamedTuple):
    """What a launch is: the token of its function, its addresses, and the settings."""

    token: int
    addresses: tuple[int, ...]
    settings: tuple[Any, ...]


class _Recording(NamedTuple):
    """What replays a launch, the workspace of its program, and the number of the launch that used it last."""

    replay: Callable[[], Any]
    workspace: int
    last: int


def settings() -> tuple[Any, ...]:
    """The settings of PyTorch by which an op chooses its kernel. A recording holds the kernels of its time."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        torch.get_float32_matmul_precision(),
        cuda.matmul.allow_tf32,
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cudnn.enabled,
        cudnn.allow_tf32,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


class Recorder(abc.ABC):
    """How an accelerator records. One for each queue, as the memory of recordings is."""

    @abc.abstractmethod
    def record(self, stream: Any, call: Callable[[], Any]) -> Callable[[], Any]:
        """Record what `call` gives the stream, which runs none of it; returns what replays it on the current stream.

        Raises the error of the recording; stream and allocator are then as usable as before.
        """

    @abc.abstractmethod
    def forget(self) -> None:
        """Give back the memory of all recordings, which have been dropped."""


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
    """The recordings of one queue. All but `forget` are called on the queue's thread.

    Args:
        recorder: how the accelerator records.
        stream: the queue's stream.
        account: the account of the device, which the pool of temporaries is charged to.
        settle: waits until the device has ended the queue's work.
        limit: the most recordings at once.
    """

    def __init__(
        self,
        recorder: Recorder,
        stream: Any,
        account: MemoryAccount,
        settle: Callable[[], None],
        limit: int = LIMIT,
    ) -> None:
        self._recorder: Recorder | None = recorder
        self._stream = stream
        self._account = account
        self._settle = settle
        self._limit = limit
        self._seen: OrderedDict[_Key, None] = OrderedDict()
        self._replays: OrderedDict[_Key, _Recording] = OrderedDict()
        self._tokens: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next_token = 0
        self._refused: set[int] = set()
        self._dead: deque[int] = deque()  # tokens of functions that are gone; appended to by any thread
        self._launches = 0
        self._pool = 0
        self._lock = threading.Lock()
        self.replayed = 0

    def launch(self, program: Program, function: Callable[..., Any], arguments: Sequence[torch.Tensor]) -> None:
        """Run `function(*arguments)` on the queue's stream, which is the current one, recorded where it can be."""
        with self._lock:
            self._drop_dead()
            key = _Key(self._token(function), tuple(tensor.data_ptr() for tensor in arguments), settings())
            self._launches += 1
            found = self._replays.get(key)
            if found is None and self._second_time(key):
                found = self._recorded(key, program, functools.partial(function, *arguments))
            if found is not None:
                self._replays[key] = found._replace(last=self._launches)
                self._replays.move_to_end(key)
                self.replayed += 1
                found.replay()
                return
        function(*arguments)

    def forget(self) -> bool:
        """Give up all recordings and their memory; whether there were any.

        They are not made again, because the memory will be needed again.
        """
        with self._lock:
            had = bool(self._replays) or self._pool > 0
            self._empty()
            self._recorder = None
        return had

    def _token(self, function: Callable[..., Any]) -> int:
        """A number for a function, which is not used again after the function is gone."""
        owner = _owner(function)
        token = self._tokens.get(owner)
        if token is None:
            token = self._tokens[owner] = self._next_token
            self._next_token += 1
            weakref.finalize(owner, self._dead.append, token).atexit = False
        return token

    def _drop_dead(self) -> None:
        """Drop the recordings of functions that are gone, and the pool if it is larger than the others need."""
        if not self._dead:
            return
        dead = set()
        while self._dead:
            dead.add(self._dead.popleft())
        self._refused -= dead
        for keys in (self._seen, self._replays):
            for key in [key for key in keys if key.token in dead]:
                del keys[key]  # type: ignore[attr-defined]
        if self._pool > max((recording.workspace for recording in self._replays.values()), default=0):
            self._empty()  # a pool has one size: what is left is recorded again, in a smaller one

    def _empty(self) -> None:
        self._settle()
        self._seen.clear()
        self._replays.clear()
        if self._recorder is not None and self._pool:
            self._recorder.forget()
        self._account.release(self._pool)
        self._pool = 0

    def _second_time(self, key: _Key) -> bool:
        """Whether the key was met before and is to be recorded now."""
        if self._recorder is None or key.token in self._refused:
            return False
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > 8 * self._limit:
                self._seen.popitem(last=False)
            return False
        if len(self._replays) >= self._limit:
            # A cycle longer than the limit would record all anew in each turn: only unused recordings are dropped.
            oldest = next(iter(self._replays.values()))
            if self._launches - oldest.last < REST:
                return False
            self._replays.popitem(last=False)
        return True

    def _recorded(self, key: _Key, program: Program, call: Callable[[], Any]) -> _Recording | None:
        assert self._recorder is not None
        growth = max(0, program.workspace - self._pool)
        try:
            self._account.charge(growth, f"temporaries of recorded launches of {program.name}")
        except OutOfMemory as failure:
            self._refuse(key, program, str(failure))
            return None
        try:
            replay = self._recorder.record(self._stream, call)
        except Exception as failure:
            self._account.release(growth)
            self._refuse(key, program, f"{type(failure).__name__}: {failure}".splitlines()[0])
            return None
        self._pool += growth
        self._seen.pop(key, None)
        return _Recording(replay, program.workspace, self._launches)

    def _refuse(self, key: _Key, program: Program, why: str) -> None:
        self._refused.add(key.token)
        self._seen.pop(key, None)
        logger.warning("launches of %s are not recorded, since one could not be: %s", program.name, why)


def _owner(function: Callable[..., Any]) -> Any:
    """What lives as long as a function: the object of a bound method, which itself is made anew at each look."""
    return getattr(function, "__self__", None) or function
