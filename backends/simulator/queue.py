"""Queues and kernels of a simulated device: what a call costs on the clock, and what it computes.

A queue submits to `backends.simulator.calls`, which decides when a call runs; it has no thread. Invariant: a call costs
the same whether its numbers are computed or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from backends.simulator.calls import SimulatedCalls
from backends.simulator.clock import COMPUTE, DOWN, NOTHING, UP, Cost, SimulatedEvent, lane_of
from backends.simulator.cost import CostModel
from backends.simulator.memory import SimulatedView
from backends.torch_device.program import lower
from hal.device import KernelCall, Queue, View, check_transfer
from hal.event import Event
from hal.kit.pattern_kernel import PatternKernel
from hal.program import Program


class SimulatedKernel(PatternKernel[Callable[..., Any]]):
    """A program with its cost for each pattern of accumulation, lowered only where numbers are computed."""

    def __init__(self, program: Program, model: CostModel) -> None:
        """Raises Unsupported for arithmetic that the device does not have."""
        super().__init__(program)
        self._model = model
        model.of(program)
        self._costs: dict[tuple[bool, ...], Cost] = {}

    def cost(self, accumulate: tuple[bool, ...]) -> Cost:
        cost = self._costs.get(accumulate)
        if cost is None:
            cost = self._costs[accumulate] = self._model.kernel(self.program, accumulate)
        return cost

    def make(self, accumulate: tuple[bool, ...]) -> Callable[..., Any]:
        return lower(self.program, accumulate)


class SimulatedQueue(Queue):
    """Calls that run one after another, each on the lane of what it does: a direction of the link, or the compute lane.

    Args:
        name: the name of the queue.
        calls: the calls of the machine.
        costs: what calls cost on the machine.
        unified: whether the device works in host memory, so that a transfer onto itself costs nothing.
        device: the number of the device on its host.
    """

    def __init__(self, name: str, calls: SimulatedCalls, costs: CostModel, unified: bool, device: int = 0) -> None:
        self.name = name
        self._calls = calls
        self._costs = costs
        self._unified = unified
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
        call = _copying(target.native, source.native) if self._calls.options.numerics else None
        cost = self._costs.within_device(2 * target.size)
        return self._submit(COMPUTE, "copy", cost, wait, call, (target, source))

    def fill(self, target: View, value: float, wait: Sequence[Event] = ()) -> Event:
        tensor = target.native
        call = (lambda: tensor.fill_(value)) if self._calls.options.numerics else None
        return self._submit(COMPUTE, "fill", self._costs.within_device(target.size), wait, call, (target,))

    def run(self, call: KernelCall, wait: Sequence[Event] = ()) -> Event:
        kernel = call.kernel
        assert isinstance(kernel, SimulatedKernel)
        cost, name = kernel.cost(call.accumulate), kernel.program.name
        if not self._calls.options.numerics:
            return self._submit(COMPUTE, name, cost, wait, None, ())
        function, arguments = kernel.function(call.accumulate), call.arguments()
        return self._submit(COMPUTE, name, cost, wait, lambda: function(*arguments), [*call.inputs, *call.outputs])

    def _transfer(
        self, lane: int, label: str, view: View, target: Any, source: Any, wait: Sequence[Event]
    ) -> SimulatedEvent:
        call = None
        cost = self._costs.transfer(lane, view.size)
        if self._unified and target is not None and source is not None:
            aliased = target.data_ptr() == source.data_ptr() if not target.is_meta else True
            if aliased:
                return self._submit(lane, label, NOTHING, wait, None, ())
        if self._calls.options.numerics:
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
        with self._calls.lock:
            event = self._calls.submit(lane_of(self._device, lane), label, cost, wait, call, self._last)
            self._last = event
        if self._calls.options.poison:
            for view in views:
                if isinstance(view, SimulatedView) and view.buffer is not None:
                    users = view.buffer.users
                    users.append(event)
                    if len(users) > 64:
                        users[:] = [user for user in users if not user.ran]
        return event


def _copying(target: torch.Tensor, source: torch.Tensor) -> Callable[[], Any]:
    flat, other = target.view(-1), source.view(-1)
    return lambda: flat.copy_(other)
