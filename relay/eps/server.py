"""The eager param-server at work: gradients come in layer by layer, and each layer is updated as soon as it is whole.

A parameter is updated once a step, when its last gradient has arrived: all micro-batches, and all segments that
use it. Where several segments use one parameter their gradients are summed first, in the order of arrival
(backward order, as autograd sums them). Every update waits for the verdict on the step's loss, so a step whose
loss is not finite changes nothing.

It decides no order of layers and touches no device but through the slot it is handed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hal.device import Device, Queue
from hal.event import Event
from hal.host import Host
from hal.slot import DeviceSlot
from relay.eps.optimizers import BoundOptimizer
from relay.eps.store import LayerStore

STAGING = "gradients in transit"
TIED_SUMS = "gradient sums of tied parameters"


@dataclass(eq=False)
class GradientPlan:
    """What to do with one segment's gradients: `updates` complete here, `partial` wait for other segments' uses.

    Numbers are places in the segment's list of gradients. `joined` are those of `updates` that have a sum waiting.
    """

    name: str
    names: tuple[str, ...]
    updates: tuple[int, ...]
    partial: tuple[int, ...]
    joined: tuple[int, ...]
    first_arrivals: tuple[int, ...] = ()


@dataclass
class StepRecord:
    """The events of a step's host work, and the squared gradient norms by parameter."""

    updates: list[Event] = field(default_factory=list)
    drains: list[Event] = field(default_factory=list)
    norms: dict[str, torch.Tensor] = field(default_factory=dict)


def plan_gradients(segments: Sequence[tuple[str, Sequence[str]]]) -> dict[str, GradientPlan]:
    """Plans by segment, from (segment, names of its gradients) in forward order; gradients arrive in reverse."""
    last_arrival: dict[str, int] = {}
    first_arrival: dict[str, int] = {}
    for index, (_, names) in enumerate(segments):
        for name in names:
            last_arrival.setdefault(name, index)
            first_arrival[name] = index
    plans = {}
    for index, (segment, names) in enumerate(segments):
        places = range(len(names))
        plans[segment] = GradientPlan(
            name=segment,
            names=tuple(names),
            updates=tuple(place for place in places if last_arrival[names[place]] == index),
            partial=tuple(place for place in places if last_arrival[names[place]] != index),
            joined=tuple(
                place
                for place in places
                if last_arrival[names[place]] == index and first_arrival[names[place]] != index
            ),
            first_arrivals=tuple(place for place in places if first_arrival[names[place]] == index),
        )
    return plans


class ParameterServer:
    """Takes gradients from slots and updates the store. `group` gives the hyperparameters of a parameter."""

    def __init__(self, device: Device, host: Host, store: LayerStore, optimizer: BoundOptimizer) -> None:
        self._device = device
        self._host = host
        self._store = store
        self._optimizer = optimizer
        self._sums: dict[str, torch.Tensor] = {}
        self._staging: list[torch.Tensor] = []
        self._staging_free: list[list[Event]] = []
        self._turn = 0

    def allocate(self, plans: Sequence[GradientPlan], largest: int) -> None:
        """Make what a step needs: optimizer state, sums of tied gradients, and staging for `largest` bytes twice."""
        for plan in plans:
            for place in plan.partial:
                name = plan.names[place]
                if name not in self._sums:
                    parameter = self._store[name]
                    flat = self._host.alloc(parameter.numel(), parameter.dtype, TIED_SUMS)
                    self._sums[name] = flat.view(parameter.shape)
            self._optimizer.allocate([plan.names[place] for place in plan.updates])
        if not self._device.info.unified and (not self._staging or self._staging[0].numel() < largest):
            for old in self._staging:
                self._host.free(old, STAGING)
            self._staging = [self._host.alloc(largest, torch.uint8, STAGING) for _ in range(2)]
            self._staging_free = [[], []]

    def collect(
        self,
        plan: GradientPlan,
        slot: DeviceSlot,
        queue: Queue,
        verdict: Event,
        group: dict[str, Any],
        record: StepRecord,
    ) -> None:
        """Submit the drain of a slot's gradients and the update that follows it."""
        assert slot.content is not None
        if self._device.info.unified:
            gradients = [self._device.host_tensor(view) for view in slot.gradients]
            arrived = list(slot.computed)
        else:
            turn = self._turn = (self._turn + 1) % len(self._staging)
            flat = self._staging[turn][: slot.content.gradient_size]
            arrived = slot.drain(queue, [(flat, slot.flat_gradients(slot.content))], self._staging_free[turn])
            record.drains += arrived
            gradients = []
            for place in slot.content.gradient_fields:
                count = place.dtype.itemsize
                for extent in place.shape:
                    count *= extent
                gradients.append(flat[place.offset : place.offset + count].view(place.dtype).view(place.shape))

        def task() -> None:
            self._apply(plan, gradients, group, record.norms)

        # Host tasks run in order, so sums that other segments started are there.
        done = self._host.run(task, [*arrived, verdict], f"update of {plan.name}")
        record.updates.append(done)
        if self._device.info.unified:
            slot.hold_gradients([done])
        else:
            self._staging_free[self._turn] = [done]
        for place in plan.updates:
            self._store.updated[plan.names[place]] = done

    def settle(self) -> None:
        """Everything submitted has ended."""
        self._staging_free = [[] for _ in self._staging]

    def _apply(
        self,
        plan: GradientPlan,
        gradients: list[torch.Tensor],
        group: dict[str, Any],
        norms: dict[str, torch.Tensor],
    ) -> None:
        with torch.no_grad():
            for place in plan.partial:
                total = self._sums[plan.names[place]]
                if place in plan.first_arrivals:
                    total.copy_(gradients[place])
                else:
                    total.add_(gradients[place])
            for place in plan.joined:
                gradients[place].add_(self._sums[plan.names[place]])
            names = [plan.names[place] for place in plan.updates]
            complete = [gradients[place] for place in plan.updates]
            for name, gradient in zip(names, complete, strict=True):
                norms[name] = torch.linalg.vector_norm(gradient)
            if names:
                self._optimizer.update(names, complete, group)
