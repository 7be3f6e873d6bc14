"""The backend `opencl`: kernels are generated from core programs, fused, and compiled by the driver.

`opencl:N` is a device by its number and `opencl` the first that works. Here live the device, its queues and kernels,
and the search for devices (`platforms`); the text of kernels is made in `backends.opencl.codegen`. pyopencl is not
imported before a device is opened or probed.

The registry imports it, by entry point, and tests may.
"""

from __future__ import annotations

from backends.opencl import platforms
from hal.device import Backend, Device, Probe
from hal.errors import HalError, Unavailable
from hal.kit.self_test import self_test

__all__ = ["OpenClBackend"]


class OpenClBackend(Backend):
    """`opencl` and `opencl:N`."""

    name = "opencl"

    def probe(self) -> list[Probe]:
        try:
            found = platforms.find()
        except HalError as failure:
            return [Probe("opencl", False, str(failure))]
        return [self._probe(device) for device in found]

    def _probe(self, found: platforms.Found) -> Probe:
        name = f"opencl:{found.number}"
        try:
            reason = platforms.broken(found)
            if reason:
                return Probe(name, False, reason, found.description)
        except Exception as failure:  # contract 10: probing reports the reason and never raises
            return Probe(name, False, f"{type(failure).__name__}: {failure}")
        return self_test(self, name)

    def open(self, selector: str, capacity: int | None = None) -> Device:
        from backends.opencl.device import OpenClDevice

        found = platforms.choose(selector)
        name = f"opencl:{selector}" if selector else "opencl"
        try:
            return OpenClDevice(name, found, capacity)
        except HalError:
            raise
        except Exception as failure:
            raise Unavailable(f"Device {name!r} ({found.description}) does not open: {failure}") from failure
