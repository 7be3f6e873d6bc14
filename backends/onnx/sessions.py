"""Sessions of ONNX Runtime: loading a model, and running it on memory where it lies.

Inputs and outputs are bound by address (I/O binding), weights among them, so that nothing is copied in or out on the
CPU provider. Bindings are cached by the addresses that they bind, because those of slots and stash repeat from step to
step.

Invariant: a session computes with as many threads as it was made for, and none of them spins while it waits, for the
same cores run the host's tasks: spinning cost a third more processor time where it was measured, and gained nothing.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from backends.onnx.emit import Emitted
from backends.onnx.model import ELEMENT_TYPES, INDEX_BOUNDS
from backends.onnx.providers import Provider, attach, confirm, runtime
from hal.errors import CompileError, DeviceLost, HalError, Unsupported
from hal.random import RandomKey

_KEPT_BINDINGS = 1024
"""In a session. For a GPT-2 block one takes 12 kB and 50 microseconds to make, and 4 to find."""

_KEPT_CONSTANT = str(2**20)
"""Bytes up to which a value without inputs is computed once and stored in the session."""

_ERRORS_ONLY = 3
_AS_REQUESTED = 1
"""How an arena grows: by the requested size, not by powers of two."""

_LOST = re.compile(r"(CUDA|HIP) failure (?!2:)\d+|887A000[567]|device (was |has been )?(lost|removed)", re.IGNORECASE)
"""Words of providers whose device is gone, or answers nothing but errors from now on. CUDA's and HIP's 2 is want of
memory; the hexadecimal numbers are those of DirectX for a device removed, hung or reset."""

logger = logging.getLogger(__name__)


class Session:
    """A loaded model. `run` may be called from several threads."""

    def __init__(self, emitted: Emitted, provider: Provider, threads: int, title: str, device: str) -> None:
        ort = runtime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = _ERRORS_ONLY
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", _KEPT_CONSTANT)
        if provider.is_cpu and _share_memory():
            options.add_session_config_entry("session.use_env_allocators", "1")
        try:
            model = emitted.proto.SerializeToString()
            self._session = ort.InferenceSession(model, options, **attach(provider, options))
        except HalError:
            raise
        except Exception as failure:
            raise _explained(failure, emitted, title, device) from failure
        confirm(provider, self._session)
        self._emitted = emitted
        self._provider = provider
        self._title, self._device = title, device
        self._bindings: OrderedDict[tuple[int, ...], Any] = OrderedDict()
        self._lock = threading.Lock()

    def run(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], key: RandomKey | None) -> None:
        """Run on memory: tensors in the order of the program's ports, contiguous, of the right size.

        Raises DeviceLost where the provider reports that its device is gone, and IndexOutOfDomain for an index outside
        of its domain.
        """
        emitted = self._emitted
        targets = outputs
        if emitted.late:
            outputs = [
                torch.empty_like(memory) if position in emitted.late else memory
                for position, memory in enumerate(outputs)
            ]
        binding = self._binding(inputs, targets, outputs)
        drawn = [(draw, draw.function(key, *draw.arguments)) for draw in emitted.draws]
        for draw, numbers in drawn:
            _bind(binding.bind_input, draw, numbers)
        bounds = torch.empty(2 * len(emitted.domains), dtype=torch.int64)
        if emitted.domains:
            bounds_type = ELEMENT_TYPES[torch.int64]
            binding.bind_output(INDEX_BOUNDS, "cpu", 0, bounds_type, tuple(bounds.shape), bounds.data_ptr())
        if not self._provider.is_cpu:
            binding.synchronize_inputs()
        try:
            self._session.run_with_iobinding(binding)
        except Exception as failure:
            if _LOST.search(str(failure)):
                raise DeviceLost(
                    f"{self._title!r} failed on {self._device!r}: {failure}. The host is intact: save a checkpoint, "
                    "and open the device again."
                ) from failure
            raise
        if not self._provider.is_cpu:
            binding.synchronize_outputs()
        for domain, (low, high) in zip(emitted.domains, bounds.view(-1, 2).tolist(), strict=True):
            if not domain.holds(low, high):
                raise domain.error(self._title, low if low < domain.low else high)
        for position in emitted.late:
            targets[position].copy_(outputs[position])

    def _binding(
        self, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> Any:
        """A binding to these addresses. With temporary outputs it is not cached; draws are bound anew each time."""
        emitted = self._emitted
        passing = bool(emitted.late)
        addresses = tuple(memory.data_ptr() for memory in (*inputs, *outputs))
        if not passing:
            with self._lock:
                binding = self._bindings.get(addresses)
                if binding is not None:
                    self._bindings.move_to_end(addresses)
                    return binding
        binding = self._session.io_binding()
        for bound in emitted.inputs:
            _bind(binding.bind_input, bound, inputs[bound.port])
        for bound in emitted.previous_outputs:
            _bind(binding.bind_input, bound, targets[bound.port])
        for bound in emitted.outputs:
            _bind(binding.bind_output, bound, outputs[bound.port])
        if not passing:
            with self._lock:
                self._bindings[addresses] = binding
                if len(self._bindings) > _KEPT_BINDINGS:
                    self._bindings.popitem(last=False)
        return binding


@functools.cache
def _share_memory() -> bool:
    """Let all sessions of the process take their temporary values from one arena: only one computes at a time.

    False where ONNX Runtime has a shared allocator already; then each session has an arena of its own.
    """
    ort = runtime()
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    try:
        ort.create_and_register_allocator(memory, ort.OrtArenaCfg({"arena_extend_strategy": _AS_REQUESTED}))
    except Exception as refusal:  # ONNX Runtime has no class of its own for it
        logger.info("sessions of ONNX Runtime do not share their temporary memory: %s", refusal)
        return False
    return True


_NOTHING = torch.zeros(1)


def _bind(bind: Any, bound: Any, memory: torch.Tensor) -> None:
    # A tensor without elements has no address, and ONNX Runtime wants one.
    address = memory.data_ptr() or _NOTHING.data_ptr()
    bind(bound.name, "cpu", 0, ELEMENT_TYPES[bound.dtype], bound.shape, address)


def _explained(failure: Exception, emitted: Emitted, title: str, device: str) -> HalError:
    """ONNX Runtime's refusal of a model, in terms of the program: its messages quote the names of nodes."""
    text = str(failure)
    if "NOT_IMPLEMENTED" in text or "NotImplemented" in type(failure).__name__:
        named = re.search(r"node with name '([^'.]+)", text)
        op, dtype = emitted.ops.get(named[1] if named else "", ("", ""))
        return Unsupported(
            f"{title!r} needs the op {op or 'named below'}{f' for {dtype}' if dtype else ''}, for which {device!r} has "
            f"no kernel ({text}). Use another dtype, or a device that has it (the CPU has all).",
            op=op,
            dtype=dtype,
            device=device,
        )
    return CompileError(f"{title!r}: ONNX Runtime on {device!r} does not take the model", text)
