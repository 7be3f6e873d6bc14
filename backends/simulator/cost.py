"""What a program costs on a described device: seconds for each op, summed, and the bytes it moves.

An op takes `launch + max((flops + ramp) / sustained, bytes / bandwidth)`: `ramp` is what makes small matrix products
slow; a kernel takes `call` besides. Attention has an efficiency of its own beside the matrix products'. Everything
else moves bytes only, of which `pointwise` is the share that reaches memory where software fuses such ops. Views cost
nothing.

Figures come from shapes; nothing is run. Sustained rates are those of large products, measured where anybody did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from backends.simulator.clock import COMPUTE, DOWN, HOST, Cost
from hal.errors import Unsupported
from hal.host import HostWork
from hal.ops.cost import OpWork, work_of
from hal.program import Program
from hal.spec import Machine, SpecError

_KINDS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Work:
    """A program's demands: `seconds` of compute, of which `launch` is neither arithmetic nor bytes."""

    seconds: float
    launch: float
    flops: float
    moved: float


_known: WeakKeyDictionary[Program, tuple[tuple[OpWork, str], ...]] = WeakKeyDictionary()
"""What was found out of programs, which are many machines' and many runs'."""


def _ops_of(program: Program) -> tuple[tuple[OpWork, str], ...]:
    """The work of a program's ops in order, each with the op's name."""
    found = _known.get(program)
    if found is None:
        works = [(work_of(node), str(node.target)) for node in program.graph.nodes]
        found = _known[program] = tuple((work, target) for work, target in works if work is not None)
    return found


class CostModel:
    """Costs of programs on one machine."""

    def __init__(self, machine: Machine) -> None:
        device = machine.device
        self._device = device
        self._pointwise = machine.pointwise
        self._launch = device["launch"]
        self._call = device["call"]
        self._ramp = device["ramp"]
        self._link = machine.link
        self._host = machine.host
        self.bandwidth = device["bandwidth_achieved"]
        self._costs: dict[tuple[int, int], Cost] = {}
        self._works: WeakKeyDictionary[Program, Work] = WeakKeyDictionary()

    def of(self, program: Program) -> Work:
        """The work of a program. Raises Unsupported for arithmetic that the device does not have."""
        work = self._works.get(program)
        if work is None:
            work = self._works[program] = self._work_of(program)
        return work

    def _work_of(self, program: Program) -> Work:
        launch = moved = flops = 0.0
        seconds = self._call
        for op, target in _ops_of(program):
            op_bytes = op.moved
            launch += self._launch
            flops += op.flops
            if op.flops:
                rate = self._rate(op, target, program) * (self._device["attention"] if op.attention else 1.0)
                busy = max((op.done + self._ramp) / rate, op_bytes / self.bandwidth)
            else:
                op_bytes *= self._pointwise
                busy = op_bytes / self.bandwidth
            moved += op_bytes
            seconds += self._launch + busy
        return Work(seconds, launch + self._call, flops, moved)

    def added(self, sizes: Sequence[int]) -> Work:
        """What it costs to add outputs of these sizes to what is there: two reads and a write, each an op."""
        launch = self._launch * len(sizes)
        moved = 3.0 * sum(sizes)
        return Work(launch + moved / self.bandwidth, launch, 0.0, moved)

    def kernel(self, program: Program, accumulate: tuple[bool, ...]) -> Cost:
        """The cost of a program that adds to those of its outputs."""
        plain = self.of(program)
        sizes = [port.size for port, adds in zip(program.outputs, accumulate, strict=False) if adds]
        more = self.added(sizes) if sizes else Work(0.0, 0.0, 0.0, 0.0)
        moved = plain.moved + more.moved
        return Cost(
            seconds=plain.seconds + more.seconds,
            host_bytes=moved if self._device.unified else 0.0,
            device_bytes=moved,
            launch=plain.launch + more.launch,
            flops=plain.flops,
            again=lambda other: other.kernel(program, accumulate),
        )

    def transfer(self, lane: int, size: int) -> Cost:
        """The cost of a transfer of `size` bytes over the link, in the direction of `lane`: DOWN or UP."""
        cost = self._costs.get((lane, size))
        if cost is None:
            seconds = self._link["latency"] + size / self._link["down" if lane == DOWN else "up"]
            cost = self._costs[(lane, size)] = Cost(
                seconds, size, size, size, again=lambda other: other.transfer(lane, size)
            )
        return cost

    def within_device(self, size: int) -> Cost:
        """The cost of reading and writing `size` bytes of device memory, as one kernel."""
        cost = self._costs.get((COMPUTE, size))
        if cost is None:
            shared = size if self._device.unified else 0
            seconds = self._launch + size / self.bandwidth
            cost = self._costs[(COMPUTE, size)] = Cost(
                seconds, shared, size, 0, self._launch, again=lambda other: other.within_device(size)
            )
        return cost

    def host_task(self, work: HostWork | None) -> Cost:
        """The cost of a task on the host; None is a task that moves no bytes."""
        size = 0 if work is None else work.bytes
        cost = self._costs.get((HOST, size))
        if cost is None:
            seconds = self._host["task"] + size / self._host["optimizer_bandwidth"]
            cost = self._costs[(HOST, size)] = Cost(seconds, size, again=lambda other: other.host_task(work))
        return cost

    def _rate(self, op: OpWork, target: str, program: Program) -> float:
        kind = _KINDS.get(op.dtype, "fp32")
        try:
            return self._device.sustained(kind)
        except SpecError as missing:
            raise Unsupported(
                f"{program.name}: {missing}", op=target, dtype=kind, device=self._device.name
            ) from missing
