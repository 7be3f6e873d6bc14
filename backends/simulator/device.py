"""The simulated device: a description of hardware behind the HAL, on a virtual clock.

With numerics on, calls compute with torch what they would compute on the CPU, to the bit, in memory of the device's
own; with numerics off nothing is computed and no memory is taken, neither here nor on the host. In both the clock
and the accounts of memory are the same. It models one device on one host.

Memory can be poisoned: filled with bytes that are NaN as floats and out of range as indices, when it is allocated
and again when it is freed and the last call that uses it has run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from backends.simulator.clock import COMPUTE, DOWN, HOST, NOTHING, UP, Clock, Cost, Owner, SimulatedEvent
from backends.simulator.cost import CostModel, Work
from backends.simulator.foreign_events import Arrivals, await_those_of, stand_in
from backends.simulator.host import POISON, SimulatedHost
from backends.simulator.orders import make_order
from backends.torch_device.program import lower
from hal.device import (
    HOST_CORES,
    NATIVE,
    SIMULATED,
    UNIFIED,
    Buffer,
    DeviceInfo,
    KernelCall,
    Queue,
    View,
    check_transfer,
)
from hal.dtypes import ALL, INTEGERS, check_ports
from hal.errors import HalError
from hal.event import Event
from hal.host import Host, HostWork
from hal.kit.accounted_device import AccountedDevice
from hal.kit.pattern_kernel import PatternKernel
from hal.program import Kernel, Program
from hal.spec import Machine
from hal.spec.timeline import Timeline, VirtualDevice

_ALWAYS = INTEGERS | {torch.float32}
_KINDS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Options:
    """How a machine is simulated: whether numbers are computed, in which `order` (with its `seed`), and poisoned."""

    numerics: bool = True
    order: str = "eager"
    seed: int = 0
    poison: bool = False


@dataclass(eq=False)
class SimulatedView(View):
    """A view that knows its buffer, or None for host memory that was adopted."""

    buffer: SimulatedBuffer | None = None


class SimulatedBuffer(Buffer):
    """Device memory, accounted in the allocator's granularity, and there only where numbers are computed."""

    def __init__(self, device: SimulatedDevice, size: int, what: str) -> None:
        granularity = int(device.machine.device["granularity"])
        if size < 0:
            raise ValueError(f"{what} cannot have {size} bytes")
        self._charged = -(-size // granularity) * granularity
        device.account.charge(self._charged, what)
        self.size = size
        self.users: list[SimulatedEvent] = []
        self._device = device
        self._freed = False
        self._memory: torch.Tensor | None = None
        if device.options.numerics:
            try:
                self._memory = torch.empty(size, dtype=torch.uint8)
            except RuntimeError as failure:
                raise device.account.refused(self._charged, what) from failure
            if device.options.poison:
                self._memory.fill_(POISON)

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> View:
        if self._freed:
            raise HalError("this buffer was freed; allocate a new one")
        view = SimulatedView(None, tuple(shape), dtype, self)
        view.check_place(offset, self.size)
        if self._memory is not None:
            view.native = self._memory[offset : offset + view.size].view(dtype).view(view.shape)
        return view

    def free(self) -> None:
        if self._freed:
            return
        self._freed = True
        self._device.account.release(self._charged)
        memory, self._memory = self._memory, None
        if memory is not None and self._device.options.poison:
            self._device.poison(memory, [event for event in self.users if not event.ran])
        self.users = []


class SimulatedKernel(PatternKernel[Callable[..., Any]]):
    """A program with its cost for each pattern of accumulation, lowered only where numbers are computed."""

    def __init__(self, program: Program, model: CostModel, unified: bool) -> None:
        super().__init__(program)
        self._model = model
        self._plain = model.of(program)
        self._unified = unified
        self._costs: dict[tuple[bool, ...], Cost] = {}

    def cost(self, accumulate: tuple[bool, ...]) -> Cost:
        cost = self._costs.get(accumulate)
        if cost is None:
            sizes = [port.size for port, adds in zip(self.program.outputs, accumulate, strict=False) if adds]
            more = self._model.added(sizes) if sizes else Work(0.0, 0.0, 0.0, 0.0)
            moved = self._plain.moved + more.moved
            cost = self._costs[accumulate] = Cost(
                seconds=self._plain.seconds + more.seconds,
                host_bytes=moved if self._unified else 0.0,
                device_bytes=moved,
                launch=self._plain.launch + more.launch,
                flops=self._plain.flops,
            )
        return cost

    def make(self, accumulate: tuple[bool, ...]) -> Callable[..., Any]:
        return lower(self.program, accumulate)


class SimulatedQueue(Queue):
    """Calls in order; the lane a call takes is that of what it does."""

    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self.name = name
        self._device = device
        self._last: SimulatedEvent | None = None

    def write(self, target: View, source: torch.Tensor, wait: Sequence[Event] = ()) -> Event:
        check_transfer("write", target, source)
        return self._transfer(DOWN, "write", target, target.native, source, wait)

    def read(self, target: torch.Tensor, source: View, wait: Sequence[Event] = ()) -> Event:
        check_transfer("read", target, source)
        return self._transfer(UP, "read", source, target, source.native, wait)

    def copy(self, target: View, source: View, wait: Sequence[Event] = ()) -> Event:
        check_transfer("copy", target, source)
        call = _copying(target.native, source.native) if self._device.options.numerics else None
        cost = self._device.moving(2 * target.size)
        return self._submit(COMPUTE, "copy", cost, wait, call, (target, source))

    def fill(self, target: View, value: float, wait: Sequence[Event] = ()) -> Event:
        tensor = target.native
        call = (lambda: tensor.fill_(value)) if self._device.options.numerics else None
        return self._submit(COMPUTE, "fill", self._device.moving(target.size), wait, call, (target,))

    def run(self, call: KernelCall, wait: Sequence[Event] = ()) -> Event:
        kernel = call.kernel
        assert isinstance(kernel, SimulatedKernel)
        cost, name = kernel.cost(call.accumulate), kernel.program.name
        if not self._device.options.numerics:
            return self._submit(COMPUTE, name, cost, wait, None, ())
        function, arguments = kernel.function(call.accumulate), call.arguments()
        return self._submit(COMPUTE, name, cost, wait, lambda: function(*arguments), [*call.inputs, *call.outputs])

    def _transfer(
        self, lane: int, label: str, view: View, target: Any, source: Any, wait: Sequence[Event]
    ) -> SimulatedEvent:
        device = self._device
        call = None
        cost = device.crossing(lane, view.size)
        if device.info.unified and target is not None and source is not None:
            aliased = target.data_ptr() == source.data_ptr() if not target.is_meta else True
            if aliased:
                return self._submit(lane, label, NOTHING, wait, None, ())
        if device.options.numerics:
            call = _copying(target, source)
        return self._submit(lane, label, cost, wait, call, (view,))

    def _submit(
        self,
        lane: int,
        label: str,
        cost: Cost,
        wait: Sequence[Event],
        call: Callable[[], Any] | None,
        views: Sequence[View],
    ) -> SimulatedEvent:
        device = self._device
        with device.lock:
            event = device.submit(lane, label, cost, wait, call, self._last)
            self._last = event
        if device.options.poison:
            for view in views:
                if isinstance(view, SimulatedView) and view.buffer is not None:
                    users = view.buffer.users
                    users.append(event)
                    if len(users) > 64:
                        users[:] = [user for user in users if not user.ran]
        return event


class SimulatedDevice(AccountedDevice[SimulatedQueue], VirtualDevice, Owner):
    """An opened machine."""

    def __init__(self, name: str, machine: Machine, capacity: int | None, options: Options) -> None:
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
        self.options = options
        self.clock = Clock(_rates(machine), spec.host_cores)
        self.model = CostModel(machine)
        self._order = make_order(options.order, options.seed)
        self._number = 0
        self._arrivals = Arrivals(self._order)
        self._strangers = False
        self._costs: dict[tuple[int, int], Cost] = {}

    # -- the device -------------------------------------------------------------------------------------------

    def make_buffer(self, size: int, what: str) -> Buffer:
        return SimulatedBuffer(self, size, what)

    def make_queue(self, name: str) -> SimulatedQueue:
        return SimulatedQueue(self, name)

    def make_kernel(self, program: Program) -> Kernel:
        check_ports(program, self.info)
        return SimulatedKernel(program, self.model, self.info.unified)

    def host(self, capacity: int | None = None, pinned: int | None = None) -> Host:
        self.check_open()
        return SimulatedHost(self, capacity)

    def adopt(self, tensor: torch.Tensor) -> View:
        self.check_unified()
        if not tensor.is_contiguous():
            raise ValueError(f"only contiguous memory can be adopted, got strides {tensor.stride()}")
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
        self._arrivals.await_all()
        with self.lock:
            self._arrivals.take_in()
            self._order.finish()
            self.clock.run_out()
            super().close()

    def end_queues(self) -> None:
        """They have no threads."""

    # -- virtual time -----------------------------------------------------------------------------------------

    def timeline(self) -> Timeline:
        return self.clock.timeline()

    def record(self) -> None:
        self.clock.recording = True

    def submit(
        self,
        lane: int,
        label: str,
        cost: Cost,
        wait: Sequence[Event],
        call: Callable[[], Any] | None,
        after: SimulatedEvent | None,
    ) -> SimulatedEvent:
        """Take a call in: after the events of `wait` and after the call before it on its queue."""
        with self.lock:
            self.check_open()
            self._arrivals.take_in()
            event = SimulatedEvent(self, self._numbered(), lane, label, cost)
            if after is not None and after.told and after.told == list(wait):
                # Told to wait for what the call before it waits for still: that one's end says all. Chunks of a layer
                # are many such calls, each with many waits.
                parents, pending = after.told, [after]
                awaited = [*parents, after]
            else:
                parents = [
                    one if isinstance(one, SimulatedEvent) and one.owner is self else self._stand_in(one)
                    for one in wait
                ]
                awaited = parents if after is None else [*parents, after]
                pending = [one for one in awaited if not one.finished]
            event.parents = parents
            if after is not None:
                event.before, event.queue = after, after.queue
            if pending:
                event.told = parents
            self.clock.submit(event, awaited, pending)
            # Without numbers a call has run at once, unless it waits for something that may still fail.
            unsure = self._strangers and any(not one.ran or one.error is not None for one in awaited)
            if self.options.numerics or unsure:
                event.call = call
                self._order.submitted(event)
            else:
                event.ran = True
                event.parents = ()
                event.before = None
            return event

    def poison(self, memory: torch.Tensor, users: Sequence[SimulatedEvent]) -> None:
        """Spoil freed memory once the last call that uses it has run."""
        if not self.closed:
            self.submit(COMPUTE, "poison of freed memory", NOTHING, users, lambda: memory.fill_(POISON), None)

    def _numbered(self) -> int:
        self._number += 1
        return self._number

    def _stand_in(self, event: Event) -> SimulatedEvent:
        """One of this device's events that stands for one from elsewhere."""
        self._strangers = True
        one = stand_in(event, self, self._numbered(), self.clock.now)
        self._arrivals.expect(one)
        return one

    def demand(self, event: SimulatedEvent) -> None:
        if not event.ran:
            with self.lock:
                needed = event.needed()
            await_those_of(needed)
        with self.lock:
            self._arrivals.take_in()
            if not event.ran:
                self._order.demand(event)
            if not event.finished:
                self.clock.run_until(event)

    def crossing(self, lane: int, size: int) -> Cost:
        """The cost of a transfer of that many bytes."""
        cost = self._costs.get((lane, size))
        if cost is None:
            link = self.machine.link
            seconds = link["latency"] + size / link["down" if lane == DOWN else "up"]
            cost = self._costs[(lane, size)] = Cost(seconds, size, size, size)
        return cost

    def moving(self, size: int) -> Cost:
        """The cost of bytes moved within the device."""
        cost = self._costs.get((COMPUTE, size))
        if cost is None:
            launch = self.machine.device["launch"]
            shared = size if self.info.unified else 0
            seconds = launch + size / self.model.bandwidth
            cost = self._costs[(COMPUTE, size)] = Cost(seconds, shared, size, 0, launch)
        return cost

    def host_cost(self, work: HostWork | None) -> Cost:
        """The cost of a task on the host."""
        size = 0 if work is None else work.bytes
        cost = self._costs.get((HOST, size))
        if cost is None:
            host = self.machine.host
            cost = self._costs[(HOST, size)] = Cost(host["task"] + size / host["optimizer_bandwidth"], size)
        return cost


def _rates(machine: Machine) -> tuple[float, float, float]:
    return machine.host["bandwidth_achieved"], machine.device["bandwidth_achieved"], machine.link["both"]


def _copying(target: torch.Tensor, source: torch.Tensor) -> Callable[[], Any]:
    flat, other = target.view(-1), source.view(-1)
    return lambda: flat.copy_(other)
