"""ONNX Runtime's devices: memory, queues and kernels by the contracts of `hal.device`.

All devices of this backend work in host memory and are tagged UNIFIED, so weights, gradients and stash are used where
they lie. On `onnx:cpu` nothing is copied. Other execution providers have ONNX Runtime carry each run's inputs
to their device and its outputs back: every provider works the same and correctly, and one with a memory of its own
pays for the transfers (NVIDIA's GPUs are served faster by the devices `cuda` and `cupy`).

Storage is every dtype of the relay's; arithmetic is float32, float64, integers and booleans, half precision being
rounded to in a model and computed with in float32. ONNX Runtime has no kernels in float64 for a few ops (convolutions,
erf, atan2), which are refused when compiling.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from backends.onnx.emit import emit, emitted_of
from backends.onnx.exporting import export
from backends.onnx.model import ELEMENT_TYPES, Model, compute_dtype
from backends.onnx.providers import Provider, choose, known, runtime
from backends.onnx.sessions import Session
from hal.device import HOST_CORES, UNIFIED, Backend, Device, DeviceInfo, KernelCall, Probe
from hal.errors import HalError, Unavailable
from hal.kit.host_device import HostDevice, HostQueue, describe_processor, memory_size
from hal.kit.self_test import self_test
from hal.known_gaps import KnownGap
from hal.ops import check
from hal.program import Kernel, Program

_STORAGE = frozenset(ELEMENT_TYPES)
_COMPUTE = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.bool})


class OnnxKernel(Kernel):
    """A program's sessions, one for each pattern of accumulation and number of threads.

    The session without accumulation is made at once, so that what the provider lacks is known when compiling.
    """

    def __init__(self, program: Program, provider: Provider, device: str) -> None:
        super().__init__(program)
        self._provider = provider
        self._device = device
        self._sessions: dict[tuple[tuple[bool, ...], int], Session] = {}
        self._lock = threading.Lock()
        self.session((), torch.get_num_threads())

    def session(self, accumulate: tuple[bool, ...], threads: int) -> Session:
        """The session for a pattern."""
        if not any(accumulate):
            accumulate = ()
        with self._lock:
            session = self._sessions.get((accumulate, threads))
            if session is None:
                emitted = emit(self.program, accumulate)
                session = Session(emitted, self._provider, threads, self.program.name, self._device)
                self._sessions[(accumulate, threads)] = session
            return session


class OnnxQueue(HostQueue):
    """A worker thread that runs sessions."""

    def prepare(self, call: KernelCall) -> Callable[[], None]:
        assert isinstance(call.kernel, OnnxKernel)
        session = call.kernel.session(call.accumulate, torch.get_num_threads())
        given: list[torch.Tensor] = [view.native for view in call.inputs]
        wanted: list[torch.Tensor] = [view.native for view in call.outputs]
        key = call.key
        # The session's threads are the caller's by its making; the host's tasks beside it are given them here.
        return self.as_its_caller(lambda: session.run(given, wanted, key))


class OnnxDevice(HostDevice):
    """An opened execution provider."""

    def __init__(self, provider: Provider, capacity: int | None) -> None:
        name = f"onnx:{provider.short}" + (f":{provider.number}" if provider.number else "")
        tags = {UNIFIED, HOST_CORES} if provider.is_cpu else {UNIFIED}
        description = f"ONNX Runtime {runtime().__version__}, {provider.full}, {describe_processor()}"
        super().__init__(DeviceInfo(name, description, frozenset(tags), _STORAGE, _COMPUTE, memory_size()), capacity)
        self._provider = provider

    def make_queue(self, name: str) -> HostQueue:
        return OnnxQueue(name)

    def make_kernel(self, program: Program) -> Kernel:
        check(program, self.info)
        return OnnxKernel(program, self._provider, self.info.name)

    def workspace(self, kernel: Kernel) -> int:
        """Half precision and small integers are computed in wider dtypes; charged as if all values were."""
        program = kernel.program
        ports = (*program.inputs, *program.outputs)
        widest = max((compute_dtype(port.dtype).itemsize / port.dtype.itemsize for port in ports), default=1.0)
        return math.ceil(program.workspace * widest)


KNOWN_GAPS = tuple(
    KnownGap(
        f"test_ops.py::test_an_op_gives_what_the_oracle_gives[aten.{op}.default-float64]",
        f"ONNX Runtime has no kernel for {kernel} in float64, and refuses it when compiling",
        device="onnx:cpu",
    )
    for op, kernel in (
        ("erf", "Erf"),
        ("gelu", "Erf"),
        ("atan2", "Atan"),
        ("convolution", "Conv"),
        ("convolution_backward", "ConvTranspose"),
    )
)


class OnnxBackend(Backend):
    """`onnx:PROVIDER`, for every execution provider of the ONNX Runtime that is installed."""

    name = "onnx"
    known_gaps = KNOWN_GAPS

    def probe(self) -> list[Probe]:
        try:
            names = list(known())
        except HalError as failure:
            return [Probe("onnx", False, str(failure))]
        except Exception as failure:  # contract 10: probing reports the reason and never raises
            return [Probe("onnx", False, f"{type(failure).__name__}: {failure}")]
        return [self_test(self, f"onnx:{name}") for name in names]

    def open(self, selector: str, capacity: int | None = None) -> Device:
        provider = choose(selector)
        _prove(provider)
        return OnnxDevice(provider, capacity)

    def export(
        self,
        program: Program,
        path: Path,
        inputs: Sequence[str],
        outputs: Sequence[str],
        weights: Mapping[str, torch.Tensor],
    ) -> Path:
        try:
            return export(program, path, inputs, outputs, weights)
        except ImportError as missing:
            raise Unavailable(f"Writing ONNX needs the package onnx: pip install onnx ({missing})") from missing


def _prove(provider: Provider) -> None:
    """Add two numbers on a provider. Raises Unavailable where that fails, be it listed or not."""
    model = Model("proof")
    number = model.bind_input(0, (1,), torch.float32)
    model.asking = "sum"
    model.bind_output(0, model.call("Add", number, number), (1,), torch.float32)
    title = f"the trial of {provider.full}"
    given, found = torch.tensor([1.5]), torch.zeros(1)
    try:
        session = Session(emitted_of(model), provider, 1, title, f"onnx:{provider.short}")
        session.run([given], [found], None)
    except Unavailable:
        raise
    except Exception as failure:
        raise Unavailable(f"{provider.full} is listed and does not work: {failure}") from failure
    if found.item() != 3.0:
        raise Unavailable(f"{provider.full} does not work: it computes 1.5 + 1.5 as {found.item()}.")
