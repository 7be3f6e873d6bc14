"""The eager param-server at work: gradients come in layer by layer, and each layer is updated as soon as it may be.

A parameter is updated once a step, when its last gradient has arrived: all micro-batches, and all segments that
use it. Where several segments use one parameter their gradients are summed first, in the order of arrival
(backward order, as autograd sums them).

There are two ways. *Eager*, without global clipping or a loss scale: a layer is updated during backward, as soon as
it is whole. *Held*: gradients stay on the host until the last has arrived; then the global norm is known, one
decision is made for all layers (clip factor, or skip), and they are updated in forward order, while the next
step's forward is already under way: its loads wait each for its own layer.

In both every update waits for the verdict on the loss, so a step whose loss is not finite changes nothing. It
decides no order of layers and touches no device but through the slot it is handed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hal.device import Device, Queue
from hal.event import Event
from hal.host import Host, HostWork
from hal.slot import DeviceSlot
from relay.eps.optimizer_state import BoundOptimizer
from relay.eps.snapshot import Snapshot
from relay.eps.store import LayerStore
from relay.errors import GradientOverflow

STAGING = "gradients in transit"
TIED_SUMS = "gradient sums of tied parameters"


@dataclass(eq=False)
class GradientPlan:
    """What to do with one segment's gradients: `updates` complete here, `partial` wait for other segments' uses.

    Numbers are places in the segment's list of gradients. `joined` are those of `updates` that have a sum waiting,
    `first_arrivals` those that are the first of a step for their parameter.
    """

    name: str
    names: tuple[str, ...]
    updates: tuple[int, ...]
    partial: tuple[int, ...]
    joined: tuple[int, ...]
    first_arrivals: tuple[int, ...]
    presence: GradientPresence | None = None


class GradientPresence(Protocol):
    """Of a segment in which data decide which parameters are reached: those that a step did reach."""

    def reached(self) -> frozenset[int]:
        """Places among the segment's gradients."""


@dataclass
class StepRecord:
    """A step's host work: its events, the gradient norms by parameter, and what was decided.

    `touched` is set before the first parameter changes: until then a step that fails has changed nothing.
    """

    arrivals: list[Event] = field(default_factory=list)
    updates: list[Event] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    drains: list[Event] = field(default_factory=list)
    norms: dict[str, torch.Tensor] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)
    decision: Event | None = None
    total_norm: float = 0.0
    overflowed: bool = False
    skipped: bool = False
    factor: torch.Tensor | None = None
    touched: bool = False


@dataclass(frozen=True)
class Clipping:
    """How gradients are clipped: by the global 2-norm, or each element, as torch.nn.utils does; None is not at all."""

    norm: float | None = None
    value: float | None = None


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
        updates = tuple(place for place in places if last_arrival[names[place]] == index)
        plans[segment] = GradientPlan(
            name=segment,
            names=tuple(names),
            updates=updates,
            partial=tuple(place for place in places if place not in updates),
            joined=tuple(place for place in updates if first_arrival[names[place]] != index),
            first_arrivals=tuple(place for place in places if first_arrival[names[place]] == index),
        )
    return plans


class ParameterServer:
    """Takes gradients from slots and updates the store. `group_of` gives each parameter's group by name."""

    def __init__(
        self,
        device: Device,
        host: Host,
        store: LayerStore,
        optimizer: BoundOptimizer,
        group_of: Mapping[str, int],
        order: Sequence[str],
        clipping: Clipping,
        scaled: bool,
    ) -> None:
        self._device = device
        self._host = host
        self._store = store
        self.optimizer = optimizer
        self.snapshot: Snapshot | None = None
        self._group_of = group_of
        self._order = order
        self._clipping = clipping
        self._scaled = scaled
        self.held = clipping.norm is not None or scaled
        self._sums: dict[str, torch.Tensor] = {}
        self._staging: list[torch.Tensor] = []
        self._staging_free: list[list[Event]] = [[], []]
        self._turn = 0

    def allocate(self, plans: Sequence[GradientPlan], groups: Sequence[Mapping[str, Any]], largest: int) -> None:
        """Make what a step needs: optimizer state, sums of tied gradients, and staging for `largest` bytes twice."""
        for plan in plans:
            for place in plan.partial:
                name = plan.names[place]
                if name not in self._sums:
                    parameter = self._store[name]
                    flat = self._host.alloc(parameter.numel(), parameter.dtype, TIED_SUMS)
                    self._sums[name] = flat.view(parameter.shape)
            for number, places in self._by_group(plan).items():
                self.optimizer.allocate([plan.names[place] for place in places], groups[number])
        staged = not self.held and not self._device.info.unified
        if staged and (not self._staging or self._staging[0].numel() < largest):
            for old in self._staging:
                self._host.free(old, STAGING)
            self._staging = [self._host.alloc(largest, torch.uint8, STAGING, crosses=True) for _ in range(2)]

    def collect(
        self,
        plan: GradientPlan,
        slot: DeviceSlot,
        queue: Queue,
        verdict: Event,
        groups: Sequence[Mapping[str, Any]],
        unscale: float,
        record: StepRecord,
    ) -> None:
        """Submit the drain of a slot's gradients and what follows it: the update, or keeping them."""
        content = slot.content
        assert content is not None
        turn = self._turn = 1 - self._turn
        device, views = self._device, slot.gradients
        passing: torch.Tensor | None = None  # where gradients pass through that have no place of their own
        if device.info.unified:
            arrived = list(slot.computed)
        else:
            pieces: Sequence[tuple[int, torch.Tensor]] = content.gradient_pieces
            wait: Sequence[Event] = ()
            if not pieces:
                passing = self._staging[turn][: content.gradient_size]
                pieces, wait = [(0, passing)], self._staging_free[turn]
            arrived = slot.drain(queue, slot.flat_gradients(pieces), wait)
            record.drains += arrived

        def arrive() -> None:
            gradients: Sequence[torch.Tensor] = content.gradient_tensors
            if device.info.unified:
                gradients = [device.host_tensor(view) for view in views]
            elif passing is not None:
                gradients = content.gradients_in(passing)
            self._arrive(plan, gradients, unscale, record)
            if not self.held:
                if unscale != 1.0 and not all(
                    bool(torch.isfinite(record.norms[plan.names[place]])) for place in plan.updates
                ):
                    raise GradientOverflow(plan.name, 1.0 / unscale)
                self._update(plan, gradients, groups, None if unscale == 1.0 else torch.tensor(unscale), record)

        # Host tasks run in order, so sums that other segments started are there.
        label = f"{'arrival' if self.held else 'update'} of {plan.name}"
        work = self._work(plan, content.gradient_sizes, True, not self.held)
        done = self._host.run(arrive, [*arrived, verdict], label, work)
        record.arrivals.append(done)
        if self._device.info.unified:
            slot.hold_gradients([done])
        elif not self.held:
            self._staging_free[turn] = [done]
        if not self.held:
            self._note(plan, done, record)

    def follow(self, device: Device) -> None:
        """Work beside another device from now on."""
        self._device = device
        self.settle()

    def rename(self, names: Mapping[str, str | None], group_of: Mapping[str, int], order: Sequence[str]) -> None:
        """The model's tensors have new names; `group_of` and `order` are those of the new model."""
        self.optimizer.rename(names)
        self._group_of = group_of
        self._order = order
        for total in self._sums.values():
            self._host.free(total.view(-1), TIED_SUMS)
        self._sums.clear()

    def settle(self) -> None:
        """Everything submitted has ended."""
        self._staging_free = [[], []]

    def conclude(
        self,
        plans: Sequence[GradientPlan],
        gradients: Sequence[Sequence[torch.Tensor]],
        groups: Sequence[Mapping[str, Any]],
        unscale: float,
        record: StepRecord,
    ) -> None:
        """After the last `collect`: the norm, and for held gradients the decision and the updates in forward order."""

        def decide() -> None:
            norms = [record.norms[name] for name in self._order if name in record.norms]
            total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
            record.total_norm = float(total)
            if not self.held:
                return
            record.skipped = record.overflowed or not bool(torch.isfinite(total))
            factor = torch.tensor(unscale)
            if self._clipping.norm is not None:
                # As torch.nn.utils.clip_grad_norm_ computes it, to the bit.
                factor = factor * torch.clamp(self._clipping.norm / (total + 1e-6), max=1.0)
            record.factor = factor

        record.decision = self._host.run(decide, list(record.arrivals), "decision on the step")
        if not self.held:
            return
        for plan, tensors in zip(plans, gradients, strict=True):
            if plan.updates:
                done = self._host.run(
                    self._held_update(plan, tensors, groups, record),
                    [record.decision],
                    f"update of {plan.name}",
                    self._work(plan, [_size(tensor) for tensor in tensors], False, True),
                )
                self._note(plan, done, record)

    def _held_update(
        self,
        plan: GradientPlan,
        gradients: Sequence[torch.Tensor],
        groups: Sequence[Mapping[str, Any]],
        record: StepRecord,
    ) -> Any:
        def update() -> None:
            if not record.skipped:
                self._update(plan, gradients, groups, record.factor, record)

        return update

    def _work(self, plan: GradientPlan, sizes: Sequence[int], arrives: bool, updates: bool) -> HostWork:
        """The host memory that `_arrive` and `_update` read and write: each operand once each way.

        `sizes` are the bytes of the segment's gradients.
        """
        moved = 0
        if arrives:
            for place in plan.partial:
                moved += (2 if place in plan.first_arrivals else 3) * sizes[place]
            moved += sum(3 * sizes[place] for place in plan.joined)
            moved += sum(sizes[place] for place in plan.updates)
        if updates:
            for place in plan.updates:
                name = plan.names[place]
                moved += sizes[place] + 2 * _size(self._store[name])
                moved += sum(_size(copy) for copy in self._store.rounded(name))
                moved += 2 * self.optimizer.state_bytes(name)
        return HostWork(moved)

    def _note(self, plan: GradientPlan, done: Event, record: StepRecord) -> None:
        record.updates.append(done)
        record.updated.append(plan.name)
        for place in plan.updates:
            self._store.updated[plan.names[place]] = done

    def _arrive(
        self, plan: GradientPlan, gradients: Sequence[torch.Tensor], unscale: float, record: StepRecord
    ) -> None:
        """Sum the uses of tied parameters, and take the norms of what is complete."""
        with torch.no_grad():
            for place in plan.partial:
                total = self._sums[plan.names[place]]
                if place in plan.first_arrivals:
                    total.copy_(gradients[place])
                else:
                    total.add_(gradients[place])
            for place in plan.joined:
                gradients[place].add_(self._sums[plan.names[place]])
            # PyTorch leaves a parameter without a gradient alone; one of zeros would be decayed. A tied one may have
            # its gradient from any of its uses.
            reached = None if plan.presence is None else plan.presence.reached()
            record.reached.update(name for place, name in enumerate(plan.names) if reached is None or place in reached)
            for place in plan.updates:
                if self._clipping.value is not None:
                    # Clipping makes infinities finite: an overflow has to be noticed before it.
                    if self._scaled and not bool(torch.isfinite(torch.linalg.vector_norm(gradients[place], torch.inf))):
                        record.overflowed = True
                    gradients[place].clamp_(-self._clipping.value / unscale, self._clipping.value / unscale)
                norm = torch.linalg.vector_norm(gradients[place])
                record.norms[plan.names[place]] = norm if unscale == 1.0 else norm * unscale

    def _update(
        self,
        plan: GradientPlan,
        gradients: Sequence[torch.Tensor],
        groups: Sequence[Mapping[str, Any]],
        factor: torch.Tensor | None,
        record: StepRecord,
    ) -> None:
        with torch.no_grad():
            for number, places in self._by_group(plan).items():
                if plan.presence is not None:
                    places = [place for place in places if plan.names[place] in record.reached]
                    self.optimizer.allocate([plan.names[place] for place in places], groups[number])
                    if not places:
                        continue
                names = [plan.names[place] for place in places]
                if self.snapshot is not None:
                    self.snapshot.before_update(names)
                record.touched = True
                self.optimizer.update(names, [gradients[place] for place in places], groups[number], factor)

    def _by_group(self, plan: GradientPlan) -> dict[int, list[int]]:
        """The places of a plan's updates by parameter group."""
        by_group: dict[int, list[int]] = {}
        for place in plan.updates:
            by_group.setdefault(self._group_of[plan.names[place]], []).append(place)
        return by_group


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
