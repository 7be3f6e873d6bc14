"""Backends of third parties that misbehave, one fault each, over the CPU device.

`PROBES` are faults while a backend is loaded or probed, `RUNS` those of a device that was opened. Each is a class of
this module, so that an entry point can name it: `tests.support.stubs.misbehaving:ProbeHangs`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any, cast

import torch

from backends.cpu import CpuBackend, CpuDevice, CpuKernel, CpuQueue
from hal.device import Buffer, Device, KernelCall, Probe
from hal.errors import DeviceLost
from hal.kit.host_device import HostQueue
from hal.kit.self_test import self_test
from hal.memory import MemoryUse
from hal.program import Kernel, Program


class Healthy(CpuBackend):
    """It works, under a name of its own."""

    name = "healthy"

    def probe(self) -> list[Probe]:
        return [self_test(self, self.name)]

    def open(self, selector: str, capacity: int | None = None) -> Device:
        return CpuDevice(self.name, False, capacity)


def _probes(name: str, probe: Callable[[Any], Any], **attributes: Any) -> type[Healthy]:
    return type(name, (Healthy,), {"probe": probe, "__module__": __name__, **attributes})


def _raise(error: BaseException) -> Any:
    raise error


def _print_and_answer(self: Healthy) -> list[Probe]:
    print('[{"name": "another", "available": true}]', flush=True)
    os.write(1, b"noise from a driver\n")
    return [Probe("ProbePrints", False, "no card")]


PROBES: dict[str, tuple[type, str]] = {
    fault.__name__: (fault, reason)
    for fault, reason in (
        (_probes("ProbeRaises", lambda self: _raise(RuntimeError("probe boom"))), "RuntimeError: probe boom"),
        (_probes("ProbeExits", lambda self: _raise(SystemExit(7))), "SystemExit: 7"),
        (_probes("ProbeInterrupts", lambda self: _raise(KeyboardInterrupt("stop"))), "KeyboardInterrupt: stop"),
        (_probes("ProbeEndsTheProcess", lambda self: os._exit(0)), "ended with exit code 0"),
        (_probes("ProbeCrashes", lambda self: ctypes.string_at(0)), "ended with signal 11"),
        (_probes("ProbeIsKilled", lambda self: os.kill(os.getpid(), signal.SIGKILL)), "ended with signal 9"),
        (_probes("ProbeHangs", lambda self: time.sleep(1000)), "did not answer within"),
        (_probes("ProbeGivesNothing", lambda self: None), "returned None"),
        (_probes("ProbeGivesText", lambda self: ["badchip"]), "returned ['badchip']"),
        (_probes("ProbeGivesNoDevice", lambda self: []), "no device and no reason"),
        (_probes("ProbeNamesAnother", lambda self: [Probe("cpu", True)]), "names 'cpu'"),
        (_probes("ProbePrints", _print_and_answer), "no card"),
        (_probes("WrittenForTheNext", Healthy.probe, hal_version=(2, 0)), "for version 2.0 of the HAL"),
        (_probes("WrittenForALater", Healthy.probe, hal_version=(1, 99)), "for version 1.99 of the HAL"),
        (
            _probes("ConstructorRaises", Healthy.probe, __init__=lambda self: _raise(RuntimeError("no licence"))),
            "licence",
        ),
        (
            _probes("ConstructorExits", Healthy.probe, __init__=lambda self: _raise(SystemExit("bye"))),
            "SystemExit: bye",
        ),
        (type("NotABackend", (), {"__module__": __name__}), "not a hal.device.Backend"),
    )
}


class FaultyQueue(CpuQueue):
    """Its kernels have the device's fault."""

    def __init__(self, name: str, fault: str) -> None:
        super().__init__(name)
        self._fault = fault

    def prepare(self, call: KernelCall) -> Callable[[], None]:
        right = super().prepare(call)

        def run() -> None:
            if self._fault == "RunRaises":
                raise RuntimeError("NATIVE ERROR 0x13")
            if self._fault == "DeviceIsLost":
                raise DeviceLost("chip fell off the bus")
            if self._fault == "RunExits":
                raise SystemExit(3)
            if self._fault != "KernelDoesNothing":
                right()
            for output in call.outputs:
                if self._fault == "HalfTheBits" and output.dtype is torch.float32:
                    output.native.copy_(output.native.bfloat16().float())
                if self._fault == "HalfTheElements" and output.dtype is torch.float32 and output.native.numel() > 1:
                    output.native.view(-1)[output.native.numel() // 2 :].zero_()

        return run


class FaultyDevice(CpuDevice):
    """A device with one fault, named by its class of backend."""

    def __init__(self, fault: str, capacity: int | None) -> None:
        super().__init__("another" if fault == "OpenNamesAnother" else fault, False, capacity)
        self._fault = fault

    def make_queue(self, name: str) -> HostQueue:
        return FaultyQueue(name, self._fault)

    def make_kernel(self, program: Program) -> Kernel:
        if self._fault == "CompileRaises":
            raise KeyError("lowering table")
        return cast("Kernel", None) if self._fault == "CompileGivesNothing" else CpuKernel(program)

    def memory(self) -> MemoryUse:
        if self._fault == "MemoryRaises":
            raise RuntimeError("no counter")
        return super().memory()

    def alloc(self, size: int, what: str = "buffer") -> Buffer:
        if self._fault == "AllocationRaises":
            raise RuntimeError("cuMalloc failed")
        return cast("Buffer", None) if self._fault == "AllocationGivesNothing" else super().alloc(size, what)

    def close(self) -> None:
        super().close()
        if self._fault == "CloseRaises":
            raise RuntimeError("cannot close")


class FaultyBackend(Healthy):
    """Opens the device with the fault of its class."""

    def probe(self) -> list[Probe]:
        return [self_test(self, type(self).__name__)]

    def open(self, selector: str, capacity: int | None = None) -> Device:
        fault = type(self).__name__
        if fault == "OpenRaises":
            raise OSError("no /dev/bad0")
        if fault == "OpenExits":
            raise SystemExit(4)
        return cast("Device", None) if fault == "OpenGivesNothing" else FaultyDevice(fault, capacity)


RUNS: dict[str, tuple[type[FaultyBackend], str]] = {
    name: (type(name, (FaultyBackend,), {"__module__": __name__}), reason)
    for name, reason in {
        "OpenRaises": "no /dev/bad0",
        "OpenExits": "SystemExit: 4",
        "OpenGivesNothing": "must give a hal.device.Device",
        "OpenNamesAnother": "'another'",
        "CompileRaises": "lowering table",
        "CompileGivesNothing": "None",
        "AllocationRaises": "cuMalloc failed",
        "AllocationGivesNothing": "None",
        "MemoryRaises": "no counter",
        "RunRaises": "NATIVE ERROR 0x13",
        "RunExits": "SystemExit",
        "DeviceIsLost": "chip fell off the bus",
        "CloseRaises": "cannot close",
        "KernelDoesNothing": "wrong numbers",
        "HalfTheBits": "wrong numbers",
        "HalfTheElements": "wrong numbers",
    }.items()
}
globals().update({name: fault for name, (fault, _) in {**PROBES, **RUNS}.items()})
