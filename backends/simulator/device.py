"""The simulated device: a description of hardware behind the HAL, on a virtual clock.

With numerics on, calls compute with torch what they would compute on the CPU, to the bit, in memory of the device's
own; with numerics off nothing is computed and no memory is taken, neither here nor on the host. In both the clock
and the accounts of memory are the same. It models one device on one host.

Memory can be poisoned: filled with bytes that are NaN as floats and out of range as indices, when it is allocated
and again when it is freed and the last call that uses it has run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backends.simulator.calls import Options, SimulatedCalls
from backends.simulator.cost import CostModel
from backends.simulator.host import SimulatedHost
from backends.simulator.memory import SimulatedBuffer, SimulatedView
from backends.simulator.queue import SimulatedKernel, SimulatedQueue
from backends.simulator.retiming import Tape
from hal.device import HOST_CORES, NATIVE, SIMULATED, UNIFIED, Buffer, DeviceInfo, View
from hal.dtypes import ALL, INTEGERS, check_ports
from hal.host import Host
from hal.kit.accounted_device import AccountedDevice
from hal.program import Kernel, Program
from hal.spec import Machine
from hal.spec.timeline import Timeline, VirtualDevice

_ALWAYS = INTEGERS | {torch.float32}
_KINDS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class SimulatedDevice(AccountedDevice[SimulatedQueue], VirtualDevice):
    """An opened machine; one of several whose `calls` share a clock, if these are given, the `number`-th of them."""

    def __init__(
        self,
        name: str,
        machine: Machine,
        capacity: int | None,
        options: Options,
        calls: SimulatedCalls | None = None,
        number: int = 0,
    ) -> None:
        spec = machine.device
        tags = {NATIVE, SIMULATED}
        tags |= {UNIFIED} if spec.unified else set()
        tags |= {HOST_CORES} if spec.host_cores else set()
        # A device whose matrix units know no float32 has vector units that do, as losses need.
        compute = _ALWAYS | frozenset(_KINDS[kind] for kind in _KINDS if spec.computes(kind))
        memory = int(spec["memory"] - spec["reserved"])
        info = DeviceInfo(name, f"simulated {spec.title}", frozenset(tags), ALL, compute, memory)
        super().__init__(info, memory if capacity is None else min(capacity, memory))
        self.machine = machine
        self.costs = CostModel(machine)
        self.calls = calls or SimulatedCalls([name], [machine], options, False)
        self.lock = self.calls.lock
        self.number = number

    # -- the device -------------------------------------------------------------------------------------------

    def make_buffer(self, size: int, what: str) -> Buffer:
        return SimulatedBuffer(self.account, self.calls, int(self.machine.device["granularity"]), size, what)

    def make_queue(self, name: str) -> SimulatedQueue:
        return SimulatedQueue(name, self.calls, self.costs, self.info.unified, self.number)

    def make_kernel(self, program: Program) -> Kernel:
        check_ports(program, self.info)
        return SimulatedKernel(program, self.costs)

    def host(self, capacity: int | None = None, pinned: int | None = None) -> Host:
        self.check_open()
        return SimulatedHost(self.machine, self.calls, self.costs, capacity)

    def adopt(self, tensor: torch.Tensor) -> View:
        self.check_unified()
        if not tensor.is_contiguous():
            raise ValueError(f"Only a contiguous tensor can be adopted; received strides {tensor.stride()}.")
        return SimulatedView(tensor, tuple(tensor.shape), tensor.dtype)

    def host_tensor(self, view: View) -> torch.Tensor:
        self.check_unified()
        if view.native is None:
            return torch.empty(view.shape, dtype=view.dtype, device="meta")
        tensor: torch.Tensor = view.native
        return tensor

    def close(self) -> None:
        if self.closed:
            return
        self.calls.close(self.number)
        super().close()

    def end_queues(self) -> None:
        """The queues have no threads to stop; `close` has run their calls."""

    # -- virtual time -----------------------------------------------------------------------------------------

    def timeline(self) -> Timeline:
        return self.calls.clock.timeline(self.number)

    def record(self) -> None:
        self.calls.clock.recording = True

    def keep_calls(self) -> None:
        self.calls.tape = Tape()

    def mark(self) -> None:
        assert self.calls.tape is not None, "keep_calls() comes first"
        self.calls.tape.mark()

    def retimed(self, machines: Sequence[Machine], one_link: bool = False) -> list[float]:
        assert self.calls.tape is not None, "keep_calls() comes first"
        return self.calls.tape.retimed(machines, one_link)
