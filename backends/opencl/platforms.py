"""Finding OpenCL devices: one number each over all platforms, and why one does not work.

`opencl:N` is the N-th device in the order of the platforms; `opencl` is the first that passes its self-test. Several
platforms may have one name (two installations of PoCL, say), and a driver may be installed and dead: it lists its
device and cannot build a kernel. Devices are told apart by number and by reason, never by name.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from hal.errors import Unavailable

_STRANGER = "unknown target CPU"
"""The message of the PoCL of pip for processors that are newer than it."""

_TEST = "__kernel void twice(__global float* x) { const int i = get_global_id(0); x[i] = 2.0f * x[i]; }"


@dataclass(frozen=True)
class Found:
    """A device of a platform."""

    number: int
    device: Any
    platform: str
    twin: bool
    """Whether another platform has the same name."""

    @property
    def description(self) -> str:
        """As a person tells devices apart."""
        version = f" ({self.device.platform.version.strip()})" if self.twin else ""
        return f"{self.device.name.strip()} on {self.platform}{version}"


def find() -> list[Found]:
    """All devices. Raises Unavailable where there is no OpenCL, with what to do."""
    try:
        import pyopencl
    except Exception as failure:  # a damaged installation may fail in any way
        raise Unavailable(
            f"OpenCL needs the package pyopencl, which does not load ({type(failure).__name__}: {failure}). "
            'Install it with: pip install "pyopencl[pocl]"'
        ) from failure
    try:
        platforms = pyopencl.get_platforms()
    except Exception as failure:
        raise Unavailable(
            f"There is no OpenCL driver here ({failure}). Install your device's, or PoCL for the CPU: "
            'pip install "pyopencl[pocl]"'
        ) from failure
    names = [platform.name.strip() for platform in platforms]
    found: list[Found] = []
    for platform, name in zip(platforms, names, strict=True):
        try:
            devices = platform.get_devices()
        except Exception:  # a platform without devices raises, and others may have some
            continue
        for device in devices:
            found.append(Found(len(found), device, name, names.count(name) > 1))
    if not found:
        raise Unavailable(f"The OpenCL platforms here have no device: {', '.join(names) or 'there are none'}.")
    return found


def broken(found: Found) -> str:
    """Build a small kernel, run it and read it back: the reason why that fails, or an empty string."""
    import numpy as np
    import pyopencl

    numbers = np.arange(64, dtype=np.float32)
    try:
        context = pyopencl.Context([found.device])
        queue = pyopencl.CommandQueue(context)
        flags = pyopencl.mem_flags
        memory = pyopencl.Buffer(context, flags.READ_WRITE | flags.COPY_HOST_PTR, hostbuf=numbers)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pyopencl.CompilerWarning)
            program = pyopencl.Program(context, _TEST).build(cache_dir=False)  # type: ignore[arg-type]  # False is "no cache"
        pyopencl.Kernel(program, "twice")(queue, (64,), None, memory)
        back = np.empty_like(numbers)
        pyopencl.enqueue_copy(queue, back, memory)
        queue.finish()
    except Exception as failure:
        lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
        telling = [line for line in lines if "error:" in line.lower()] or lines or [type(failure).__name__]
        advice = ". Debian's PoCL knows more processors: apt-get install pocl-opencl-icd"
        return f"the driver is installed and does not work: {telling[0]}{advice if _STRANGER in telling[0] else ''}"
    if not np.array_equal(back, 2 * numbers):
        return "its self-test read back other numbers than a kernel should have written"
    return ""


def choose(selector: str) -> Found:
    """The device of a selector: a number, or nothing for the first that works. Raises Unavailable with reasons."""
    found = find()
    if not selector:
        reasons = []
        for device in found:
            reason = broken(device)
            if not reason:
                return device
            reasons.append(f"opencl:{device.number} ({device.description}): {reason}")
        raise Unavailable("No OpenCL device works. " + "; ".join(reasons))
    known = ", ".join(f"opencl:{device.number} ({device.description})" for device in found)
    if not selector.isdecimal() or int(selector) >= len(found):
        raise Unavailable(f"There is no device 'opencl:{selector}'. It is one of: {known}.")
    device = found[int(selector)]
    reason = broken(device)
    if reason:
        raise Unavailable(
            f"Device 'opencl:{selector}' ({device.description}) does not work: {reason}. There are: {known}."
        )
    return device
