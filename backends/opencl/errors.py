"""What OpenCL's errors are to the relay: the driver's codes as the few classes of `hal.errors`."""

from __future__ import annotations

from typing import Any

from hal.errors import CompileError, DeviceLost, HalError, OutOfMemory

_NO_MEMORY = {-4: "MEM_OBJECT_ALLOCATION_FAILURE", -6: "OUT_OF_HOST_MEMORY", -61: "INVALID_BUFFER_SIZE"}
_LOST = {-2: "DEVICE_NOT_AVAILABLE", -5: "OUT_OF_RESOURCES", -36: "INVALID_COMMAND_QUEUE", -33: "INVALID_DEVICE"}


def code_of(failure: BaseException) -> int:
    """OpenCL's error code, 0 where there is none."""
    code: Any = getattr(failure, "code", 0)
    return int(code() if callable(code) else code)


def translated(failure: BaseException, what: str, device: str) -> HalError:
    """The error to raise, chained to the driver's."""
    if isinstance(failure, HalError):
        return failure
    code = code_of(failure)
    if code in _NO_MEMORY or isinstance(failure, MemoryError):
        error: HalError = OutOfMemory(
            f"{what} on device {device!r}", 0, 0, 0, f"The driver refused memory: {_NO_MEMORY.get(code, failure)}."
        )
    elif code in _LOST:
        error = DeviceLost(
            f"Device {device!r} stopped answering in {what} ({_LOST[code]}). The parameters on the host are intact: "
            "save them, and open the device again."
        )
    elif code in (-11, -15, -17):
        error = CompileError(f"Device {device!r} could not compile {what}.", str(failure))
    else:
        error = HalError(f"{what} failed on device {device!r}: {type(failure).__name__}: {failure}")
    error.__cause__ = failure
    return error


def failed_status(status: int, what: str, device: str) -> HalError:
    """The error of a call that ended with that negative status."""
    native = RuntimeError(f"OpenCL execution status {status}")
    native.code = status  # type: ignore[attr-defined]
    return translated(native, what, device)
