"""Runs `relay train` on a device of which a kernel hangs in the third step, for tests of Ctrl-C.

The device is the CPU's, under the name `hangs`. Arguments are those of `relay train`. It prints `hanging` on standard
error as the kernel begins to hang.
"""

import itertools
import sys
import time
from collections.abc import Callable
from importlib.metadata import EntryPoint

from backends.cpu import CpuBackend, CpuDevice, CpuQueue
from hal import probing, registry
from hal.device import Device, KernelCall
from hal.kit.host_device import HostQueue
from relay import cli

CALLS = itertools.count()
HANGS_AT = 260


class HangingQueue(CpuQueue):
    def prepare(self, call: KernelCall) -> Callable[[], None]:
        return hang if next(CALLS) == HANGS_AT else super().prepare(call)


class HangingDevice(CpuDevice):
    def make_queue(self, name: str) -> HostQueue:
        return HangingQueue(name)


class HangingBackend(CpuBackend):
    name = "hangs"

    def open(self, selector: str, capacity: int | None = None) -> Device:
        return HangingDevice("hangs", False, capacity)


def hang() -> None:
    print("hanging", file=sys.stderr, flush=True)
    time.sleep(1000)


if __name__ == "__main__":
    registry.entry_points = lambda *, group: [EntryPoint("hangs", f"{__name__}:HangingBackend", probing.GROUP)]  # type: ignore
    cli.main(sys.argv[1:])
