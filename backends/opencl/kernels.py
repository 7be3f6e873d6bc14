"""A program as a sequence of OpenCL kernels, compiled once for a device and shared by all programs that need them.

`Library` keeps the device's kernels by their text: identical layers share everything, and different layers share
what they have in common. What has to be compiled is compiled in one program; drivers keep the binaries on disk, and
so does pyopencl. `OpenClKernel` knows which memory each launch is given.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from backends.opencl.codegen.emit import Argument, Launch
from backends.opencl.codegen.loops import Traits
from backends.opencl.codegen.plan import plan
from backends.opencl.codegen.prelude import PRELUDE
from backends.opencl.errors import translated
from hal.errors import HalError
from hal.ops.index_domains import IndexDomain
from hal.program import Kernel, Program
from hal.random import RandomKey, stream_words

Memory = tuple[Any, int]
"""A cl.Buffer, and where in it a view starts, in bytes."""


class Library:
    """The compiled kernels of a device, by name: a name is a hash of the text."""

    def __init__(self, context: Any, device: Any, name: str) -> None:
        self._context, self._device, self._name = context, device, name
        self._programs: dict[str, Any] = {}
        self._options = ["-cl-std=CL1.2"]
        if "cl_khr_fp64" in device.extensions:
            self._options.append("-DHAS_DOUBLE")
        self.lock = threading.RLock()
        self.built = 0
        """Kernels compiled so far."""

    def kernels(self, launches: Sequence[Launch], what: str) -> list[Any]:
        """A cl.Kernel for each launch, for this caller alone. Raises CompileError with the compiler's log."""
        import pyopencl

        with self.lock:
            new = {launch.name: launch.source for launch in launches if launch.name not in self._programs}
            if new:
                try:
                    built = pyopencl.Program(self._context, PRELUDE + "\n".join(new.values()))
                    with warnings.catch_warnings():  # compilers that have something to say of code that is right
                        warnings.simplefilter("ignore", pyopencl.CompilerWarning)
                        built.build(self._options, [self._device])
                except Exception as failure:
                    raise translated(failure, what, self._name) from failure
                for name in new:
                    self._programs[name] = built
                self.built += len(new)
            return [pyopencl.Kernel(self._programs[launch.name], launch.name) for launch in launches]


class Fault:
    """The first index of a run that is outside of its domain: on the device, and on the host after the run.

    Args:
        program: the name of the program, for the error.
        checked: what the kernel's checks check, by their numbers.
    """

    def __init__(self, program: str, checked: Sequence[IndexDomain]) -> None:
        self._program, self._checked = program, checked
        self.found = np.zeros(2, dtype=np.int64)
        """The number of the failed check, counted from 1, and the index."""

    def upload(self, context: Any) -> Any:
        """The same, on the device."""
        import pyopencl

        flags = pyopencl.mem_flags
        return pyopencl.Buffer(context, flags.READ_WRITE | flags.COPY_HOST_PTR, hostbuf=self.found)

    def error(self) -> HalError | None:
        """The error of the failed check, if one failed."""
        number, index = (int(value) for value in self.found)
        return self._checked[number - 1].error(self._program, index) if number else None


class OpenClKernel(Kernel):
    """A program as one OpenCL device runs it."""

    def __init__(self, program: Program, traits: Traits, library: Library) -> None:
        super().__init__(program)
        made = plan(program, traits)
        self.launches = [launch for launch in made.launches if min(launch.size, default=1) > 0]
        self.workspace = made.size
        self._offsets = made.offsets
        self._library = library
        self._checked = made.checked
        self._kernels = library.kernels(self.launches, repr(program.name))
        self._constants: dict[str, Memory] = {}

    def upload(self, context: Any) -> None:
        """Put the program's constants onto the device."""
        import pyopencl

        for name, tensor in self.program.constants.items():
            data = tensor.detach().contiguous().view(-1)
            if not data.numel():
                continue
            host = data.view(torch.uint8).numpy()
            flags = pyopencl.mem_flags
            self._constants[name] = (
                pyopencl.Buffer(context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=host),
                0,
            )

    def enqueue(
        self,
        queue: Any,
        workspace: Any,
        inputs: Sequence[Memory],
        outputs: Sequence[Memory],
        accumulate: tuple[bool, ...],
        key: RandomKey | None,
        wait: Sequence[Any],
        fault: Fault | None,
    ) -> tuple[Any, Any]:
        """Queue all launches. Returns the events of the first and of the last, or a marker's twice.

        `fault` is `new_fault`'s, which holds the outcome of the kernel's checks when the last event has ended.
        """
        import pyopencl

        first = last = None
        memory = fault.upload(queue.context) if fault is not None else None
        with self._library.lock:  # arguments are set on shared objects
            for launch, kernel in zip(self.launches, self._kernels, strict=True):
                arguments: list[Any] = []
                for argument in launch.arguments:
                    arguments += self._given(argument, workspace, inputs, outputs, accumulate, key, memory)
                kernel.set_args(*arguments)
                group = launch.group or None
                event = pyopencl.enqueue_nd_range_kernel(
                    queue, kernel, launch.size, group, wait_for=list(wait) if first is None else None
                )
                first, last = first or event, event
        if first is None or last is None:
            first = last = pyopencl.enqueue_marker(queue, wait_for=list(wait) or None)
        if fault is not None and memory is not None:
            last = pyopencl.enqueue_copy(queue, fault.found, memory, wait_for=[last], is_blocking=False)
        return first, last

    def new_fault(self) -> Fault | None:
        """What the checks of one run write to, or None if the kernel has no checks."""
        return Fault(self.program.name, self._checked) if self._checked else None

    def _given(
        self,
        argument: Argument,
        workspace: Any,
        inputs: Sequence[Memory],
        outputs: Sequence[Memory],
        accumulate: tuple[bool, ...],
        key: RandomKey | None,
        fault: Any,
    ) -> list[Any]:
        if argument.kind == "fault":
            return [fault]
        if argument.kind == "flag":
            return [np.int32(bool(accumulate) and accumulate[argument.index])]
        if argument.kind == "number":
            return [np.int64(argument.index)]
        if argument.kind == "words":
            assert key is not None
            return [np.uint32(word) for word in stream_words(key, argument.index)]
        buffer = argument.buffer
        assert buffer is not None
        if buffer.kind == "workspace":
            memory, start = workspace, self._offsets[buffer]
        elif buffer.kind == "constant":
            memory, start = self._constants[buffer.name]
        else:
            memory, start = (inputs if buffer.kind == "input" else outputs)[buffer.index]
        return [memory, np.uint64(start // buffer.dtype.itemsize)]
