"""numpy as a device: the reference. Core programs run op by op in numpy, on the host's cores.

`numpy` computes in float32 and `numpy:float64` in float64, for any dtype in memory: the oracle that other backends are
checked against. Its memory is its own, like an accelerator's: what crosses is copied. It is not there to be fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hal.device import Backend, Device, DeviceInfo, KernelCall, Probe
from hal.dtypes import ALL, INTEGERS
from hal.errors import Unavailable
from hal.kit.arrays.dtypes import Arrays, stored_dtype
from hal.kit.arrays.numpy_arrays import as_array, numpy_arrays, numpy_constants
from hal.kit.arrays.program import lower
from hal.kit.host_device import HostDevice, HostQueue, describe_processor, memory_size
from hal.kit.pattern_kernel import PatternKernel
from hal.kit.self_test import self_test
from hal.known_gaps import KnownGap
from hal.ops import check
from hal.program import Kernel, Program

_ADVICE = {torch.float64: "Use 'numpy:float64', which does, or float32."}


class NumpyKernel(PatternKernel[Callable[..., None]]):
    """A program as Python functions of (inputs..., [key], outputs...) over numpy arrays."""

    def __init__(self, program: Program, arrays: Arrays) -> None:
        super().__init__(program)
        self._arrays = arrays
        self._constants = numpy_constants(arrays, program.constants)

    def make(self, accumulate: tuple[bool, ...]) -> Callable[..., None]:
        return lower(self.program, self._arrays, self._constants, accumulate)


class NumpyQueue(HostQueue):
    """A worker thread that runs numpy."""

    def prepare(self, call: KernelCall) -> Callable[[], None]:
        assert isinstance(call.kernel, NumpyKernel)
        function = call.kernel.function(call.accumulate)
        arguments = call.arguments(lambda view: as_array(view.native))

        def run() -> None:
            # Infinities and NaN are results like others: no warnings.
            with np.errstate(all="ignore"):
                function(*arguments)

        return run


class NumpyDevice(HostDevice):
    """The opened reference device."""

    def __init__(self, name: str, real: type[np.floating[Any]], capacity: int | None) -> None:
        self._arrays = numpy_arrays(real)
        compute = INTEGERS | {torch.float64 if real is np.float64 else torch.float32}
        description = f"numpy {np.__version__} in {np.dtype(real).name}, {describe_processor()}"
        super().__init__(DeviceInfo(name, description, frozenset(), ALL, compute, memory_size()), capacity)

    def make_queue(self, name: str) -> HostQueue:
        return NumpyQueue(name)

    def make_kernel(self, program: Program) -> Kernel:
        check(program, self.info, advice=_ADVICE)
        return NumpyKernel(program, self._arrays)

    def workspace(self, kernel: Kernel) -> int:
        """Values in half precision are computed in a wider dtype; charged as if all values were."""
        program = kernel.program
        dtypes = {port.dtype for port in (*program.inputs, *program.outputs) if port.dtype.is_floating_point}
        widest = max((self._arrays.real.itemsize / stored_dtype(dtype).itemsize for dtype in dtypes), default=1.0)
        return math.ceil(program.workspace * max(widest, 1.0))


KNOWN_GAPS = (
    KnownGap(
        "test_programs.py::test_half_precision_is_rounded_after_each_op*",
        "the oracle rounds nothing before it is stored",
        device="numpy:float64",
    ),
)

_REAL: dict[str, type[np.floating[Any]]] = {"": np.float32, "float64": np.float64}


class NumpyBackend(Backend):
    """`numpy` and `numpy:float64`."""

    name = "numpy"
    known_gaps = KNOWN_GAPS

    def probe(self) -> list[Probe]:
        return [self_test(self, "numpy"), self_test(self, "numpy:float64")]

    def open(self, selector: str, capacity: int | None = None) -> Device:
        if selector not in _REAL:
            raise Unavailable(f"There is no device 'numpy:{selector}'. It is 'numpy' or 'numpy:float64'.")
        return NumpyDevice(f"numpy:{selector}" if selector else "numpy", _REAL[selector], capacity)
