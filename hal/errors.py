"""The errors a device can raise: one class for each decision that a caller can take.

They are few on purpose. Native errors (torch's, a driver's) are always chained (`raise ... from native`), never
shown bare. Invariant: every error that leaves `hal` or a backend is a `HalError`, except programming errors
(`TypeError`, `ValueError`) raised at the call that made them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any


class HalError(RuntimeError):
    """Something went wrong on a device or in reaching one. Base of all device errors."""


class Unavailable(HalError):
    """A device with the given name cannot be opened. The message gives the reason.

    What to do: choose another device, or install what the reason names.
    """


class Unsupported(HalError):
    """The device cannot do what a program asks: an op or a dtype it lacks. Raised at compile time.

    What to do: run this segment on another device, or use another precision.
    """

    def __init__(self, message: str, *, op: str = "", dtype: str = "", device: str = "") -> None:
        super().__init__(message)
        self.op = op
        self.dtype = dtype
        self.device = device


class OutOfMemory(HalError):
    """An allocation would pass the capacity of a device or of the host.

    `requested`, `in_use` and `capacity` are bytes. What to do: raise the capacity, or need less (fewer slots,
    more micro-batches, stash on the host).
    """

    def __init__(self, what: str, requested: int, in_use: int, capacity: int, advice: str = "") -> None:
        self.what = what
        self.requested = requested
        self.in_use = in_use
        self.capacity = capacity
        self.advice = advice
        message = (
            f"{what} does not fit: {requested:,} bytes requested, {in_use:,} in use, capacity {capacity:,}"
            f" ({requested + in_use - capacity:,} bytes too many)."
        )
        super().__init__(f"{message} {advice}".rstrip())


class CompileError(HalError):
    """A program could not be made into a kernel. `log` holds the compiler's own output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(f"{message}\n{log}".rstrip())
        self.log = log


class DeviceLost(HalError):
    """The device stopped answering. What lives on the host is intact; what was on the device is gone."""


class IndexOutOfDomain(HalError, IndexError):
    """A program computed an index that is outside of what it indexes. The message names layer, op and value.

    What to do: correct the layer that computes the index, or enlarge what is indexed.
    """


def name_native_errors(device_class: type, results: Mapping[str, type]) -> None:
    """Make what is raised by a device's methods, native errors included, a HalError that names the device and the call.

    Args:
        device_class: a class of devices, each with its `info`. Methods that it does not define itself stay as they are.
        results: the names of the methods, each with the type of what it must return.
    """
    for name, result in results.items():
        method = vars(device_class).get(name)
        if method is not None and not getattr(method, "__isabstractmethod__", False):
            setattr(device_class, name, _named(method, name, result))


def _named(method: Callable[..., Any], name: str, result: type) -> Callable[..., Any]:
    kind = CompileError if name == "compile" else HalError
    passed = (HalError,) if name == "compile" else (HalError, TypeError, ValueError)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        subject = getattr(args[0], "name", "") if args else ""  # the program, which has its layer's name
        what = f"`{name}` of device {self.info.name!r}" + (f", asked for {subject!r}," if subject else "")
        try:
            returned = method(self, *args, **options)
        except passed:
            raise
        except (Exception, SystemExit) as failure:
            raise kind(f"{what} failed: {type(failure).__name__}: {failure}. {_ADVICE}") from failure
        if not isinstance(returned, result):
            raise kind(f"{what} returned {returned!r}; it must return a {result.__name__}. {_ADVICE}")
        return returned

    return call


_ADVICE = "This is a fault of the device's driver or backend: `relay conformance` shows what it does wrong."
