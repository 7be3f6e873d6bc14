"""numpy as a device: the reference. Core programs run op by op in numpy, on the host's cores.

`numpy` computes in float32 and `numpy:float64` in float64, whatever is stored: the oracle that other backends are
checked against. Its memory is its own, like an accelerator's: what crosses is copied. It is not there to be fast.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from backends.arrays.dtypes import Arrays, stored_dtype
from backends.arrays.program import lower
from hal import random as counter_random
from hal.device import Backend, Device, DeviceInfo, Probe, View
from hal.dtypes import ALL, INTEGERS
from hal.errors import Unavailable
from hal.kit.host_device import HostDevice, HostQueue, describe_processor, memory_size, self_test
from hal.known_gaps import Gap
from hal.numba_cache import compiled
from hal.ops import check
from hal.program import Kernel, Program
from hal.random import RandomKey

_ADVICE = {torch.float64: "Use 'numpy:float64', which does, or float32."}


def as_array(tensor: torch.Tensor) -> Any:
    """The tensor's memory as numpy sees it, bf16 as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _erf(values: Any) -> Any:
    """The error function, which numpy has not: the C library's, over an array."""
    flat = np.ascontiguousarray(values).reshape(-1)
    result = np.empty_like(flat)
    _compiled_erf()(flat, result)
    return result.reshape(values.shape)


@functools.cache
def _compiled_erf() -> Callable[..., None]:
    import numba

    arrays = [numba.types.float32[::1], numba.types.float64[::1]]
    return compiled(_fill_erf, [numba.types.void(array, array) for array in arrays])


def _fill_erf(values: Any, result: Any) -> None:
    for place in range(values.size):
        result[place] = math.erf(values[place])


def _draw(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda *args: function(*args).numpy()


def numpy_arrays(real: type[np.floating[Any]]) -> Arrays:
    """The op table over numpy, with arithmetic in that dtype. Sums are float64 always: numpy's own are naive."""
    draws = {name: _draw(getattr(counter_random, name)) for name in ("keep_mask", "uniform", "normal")}
    return Arrays(np, _erf, draws, np.dtype(real), np.dtype(np.float64))


class NumpyKernel(Kernel):
    """A program as Python over arrays, once for each pattern of accumulation."""

    def __init__(self, program: Program, arrays: Arrays) -> None:
        super().__init__(program)
        self._arrays = arrays
        self._constants = {
            name: arrays.load(as_array(constant.detach().contiguous()), constant.dtype)
            for name, constant in program.constants.items()
        }
        self._functions: dict[tuple[bool, ...], Callable[..., None]] = {}

    def function(self, accumulate: tuple[bool, ...]) -> Callable[..., None]:
        """The function of (inputs..., [key], outputs...) for a pattern."""
        function = self._functions.get(accumulate)
        if function is None:
            function = lower(self.program, self._arrays, self._constants, accumulate)
            self._functions[accumulate] = function
        return function


class NumpyQueue(HostQueue):
    """A worker thread that runs numpy."""

    def prepare(
        self,
        kernel: Kernel,
        inputs: Sequence[View],
        outputs: Sequence[View],
        accumulate: tuple[bool, ...],
        key: RandomKey | None,
    ) -> Callable[[], None]:
        assert isinstance(kernel, NumpyKernel)
        function = kernel.function(accumulate)
        arguments: list[Any] = [as_array(view.native) for view in inputs]
        if kernel.program.draws:
            arguments.append(key)
        arguments += [as_array(view.native) for view in outputs]

        def call() -> None:
            # Infinities and NaN are results like any other; who trains looks at the loss.
            with np.errstate(all="ignore"):
                function(*arguments)

        return call


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
        """Floating-point values are held wider than the program says: charged as if all of them were."""
        program = kernel.program
        dtypes = {port.dtype for port in (*program.inputs, *program.outputs) if port.dtype.is_floating_point}
        widest = max((self._arrays.real.itemsize / stored_dtype(dtype).itemsize for dtype in dtypes), default=1.0)
        return math.ceil(program.workspace * max(widest, 1.0))


GAPS = (
    Gap(
        "test_programs.py::test_half_precision_is_rounded_after_each_op*",
        "the oracle rounds nothing before it is stored",
        device="numpy:float64",
    ),
)

_REAL: dict[str, type[np.floating[Any]]] = {"": np.float32, "float64": np.float64}


class NumpyBackend(Backend):
    """`numpy` and `numpy:float64`."""

    name = "numpy"
    gaps = GAPS

    def probe(self) -> list[Probe]:
        return [self_test(self, "numpy"), self_test(self, "numpy:float64")]

    def open(self, selector: str, capacity: int | None = None) -> Device:
        if selector not in _REAL:
            raise Unavailable(f"There is no device 'numpy:{selector}'. It is 'numpy' or 'numpy:float64'.")
        return NumpyDevice(f"numpy:{selector}" if selector else "numpy", _REAL[selector], capacity)
