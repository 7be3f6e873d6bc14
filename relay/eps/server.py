"""The eager param-server: it takes in gradients layer by layer and updates each layer as early as it may.

A parameter is updated once a step, when its last gradient has arrived: from all micro-batches, and from all segments
that use it. Gradients of a parameter that several segments use are summed first, in the order of arrival (backward
order, as autograd sums them).

Updates run in one of two modes:

* *Eager*, without global clipping and without a dynamic loss scale: a layer is updated during backward, as soon as its
  gradients are complete.
* *Deferred*: gradients stay on the host until the last has arrived. Then the global norm is known, one decision (the
  clipping factor, or to skip the step) is made for all layers, and the layers are updated in forward order. With
  `defer_updates=True` the next step's forward already runs meanwhile: the load of a layer waits for its update.

In both modes every update waits for the check of the loss, so a step whose loss is refused changes nothing. The server
decides no order of layers, and reaches the device only through the slot that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hal.device import Device, Queue
from hal.event import Event
from hal.host import Host, HostWork
from hal.slot.device_slot import DeviceSlot, GradientRegion
from hal.slot.layout import SlotContent
from relay.eps.gradient_plan import GradientPlan
from relay.eps.optimizer_state import BoundOptimizer
from relay.eps.rows import WholeGradients
from relay.eps.step_record import StepAgreement, SubmittedStep
from relay.eps.store import LayerStore
from relay.eps.updates.updater import Updater
from relay.errors import GradientOverflow

STAGING = "gradients in transit"
TIED_SUMS = "gradient sums of tied parameters"


@dataclass(frozen=True)
class Clipping:
    """How gradients are clipped, as torch.nn.utils does: by the global 2-norm, or element by element. None: not."""

    norm: float | None = None
    value: float | None = None


class ParameterServer(StepAgreement):
    """Takes gradients from slots and updates the store.

    Args:
        device: the device that the gradients come from.
        host: where tasks run and memory is accounted.
        store: the parameters.
        optimizer: updates parameters, and holds their optimizer states.
        group_of: the number of each parameter's group, by the parameter's name.
        order: the names of all parameters, in the model's order. Norms are combined in this order.
        clipping: how gradients are clipped.
        scaled: whether there is a dynamic loss scale.
    """

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
        self.store = store
        self._order = order
        self._clipping = clipping
        self._scaled = scaled
        self.deferred = clipping.norm is not None or scaled
        self._sums: dict[str, torch.Tensor] = {}
        self._whole = WholeGradients(host)
        self._staging: list[torch.Tensor] = []
        self._staging_free: list[list[Event]] = [[], []]
        self._turn = 0
        self.updater = Updater(device, host, store, optimizer, group_of)

    @property
    def optimizer(self) -> BoundOptimizer:
        """What updates parameters, and holds their optimizer states."""
        return self.updater.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: BoundOptimizer) -> None:
        self.updater.optimizer = optimizer

    @property
    def keeps_gradients(self) -> bool:
        """Whether each gradient waits in host memory of its own for the end of the backward pass."""
        return self.deferred

    @property
    def keeps_narrow_gradients(self) -> bool:
        """Whether gradients that wait may be stored in the half precision that they were computed in.

        The fused optimizers read them as they are; values are clipped in float32.
        """
        return self.deferred and self._clipping.value is None and self.optimizer.reads_half

    def allocate(
        self, plans: Sequence[GradientPlan], groups: Sequence[Mapping[str, Any]], contents: Sequence[SlotContent]
    ) -> None:
        """Allocate what a step needs: optimizer states, sums of tied gradients, and two stagings for gradients.

        `contents` are what the slots hold. What is there already is kept. Raises OutOfMemory.
        """
        for plan in plans:
            for index in plan.partial:
                name = plan.names[index]
                if name not in self._sums:
                    parameter = self.store[name]
                    flat = self._host.alloc(parameter.numel(), self.store.dtype(name), TIED_SUMS)
                    self._sums[name] = flat.view(parameter.shape)
        for plan, content in zip(plans, contents, strict=bool(plans)):
            self.updater.allocate(plan, content, groups, self.owned)
        largest = max((content.gradient_size for content in contents), default=0)
        copied = any(content.kept_gradients for content in contents)
        in_transit = not self.keeps_gradients and not self._device.info.unified
        staged = in_transit or (copied and not self._device.info.unified)
        if staged and (not self._staging or self._staging[0].numel() < largest):
            for old in self._staging:
                self._host.free(old, STAGING)
            self._staging = [self._host.alloc(largest, torch.uint8, STAGING, crosses=True) for _ in range(2)]
        for plan in plans:
            # torch.optim may compute with a gradient in place.
            in_place = self.optimizer.kind.startswith("torch.")
            self._whole.allocate(plan.rows, self.store, self._staging[0].numel() if in_transit else 0, in_place)

    def collect(
        self,
        plan: GradientPlan,
        slot: DeviceSlot,
        queue: Queue,
        groups: Sequence[Mapping[str, Any]],
        unscale: float,
        submitted: SubmittedStep,
    ) -> None:
        """Submit the transfer of a slot's gradients to the host and the task that takes them in.

        An eager update is part of that task. `groups` are the optimizer's parameter groups as they are now, and
        `unscale` is the factor that removes the loss scale from a gradient. The step's verdict must be submitted.
        """
        content, verdict = slot.content, submitted.verdict
        assert content is not None
        assert verdict is not None
        turn = self._turn = 1 - self._turn
        device, views = self._device, slot.gradients
        staging: torch.Tensor | None = None  # for gradients that have no memory of their own on the host
        if device.info.unified or not content.gradient_size:
            arrived = list(slot.computed)
        else:
            pieces: Sequence[tuple[int, torch.Tensor]] = content.gradient_pieces
            wait: Sequence[Event] = ()
            if not pieces:
                staging = self._staging[turn][: content.gradient_size]
                pieces, wait = [(0, staging)], self._staging_free[turn]
            arrived = slot.drain(queue, slot.flat_gradients(pieces), wait)
            submitted.drains += arrived

        split = None if self.deferred else self.updater.halves(plan, content, slot.region, groups)
        if split is not None:
            submitted.halves[plan] = split

        # Rows come through one staging, and the other one may take the whole gradient: its last reader came before.
        whole = self._whole.of(plan.rows, self.store, self._staging[1 - turn] if staging is not None else None)

        def arrive() -> None:
            gradients = list(content.gradient_tensors)
            if device.info.unified:
                gradients = [device.host_tensor(view) for view in views]
            elif staging is not None:
                gradients = content.gradients_in(staging)
            gradients = [*gradients, *(self._sums[name] for name in plan.names[len(gradients) :])]
            for index, rows in plan.rows.items():
                gradients[index] = whole[index].fill(rows, gradients[index])
            self._receive(plan, content, gradients, groups, unscale, submitted)

        # Host tasks run in order, so sums that other segments started are there.
        label = f"{'arrival' if self.deferred else 'update'} of {plan.name}"
        late = [_size(self._sums[name]) for name in plan.names[len(plan.names) - plan.late :]]
        filled = sum(3 * content.gradient_sizes[index] for index in whole)
        sizes = [*content.gradient_sizes, *late]
        for index, gradient in whole.items():
            sizes[index] = _size(gradient.memory)
            filled += gradient.cleared
        if content.kept_gradients:
            filled += sum(content.gradient_sizes) + sum(_size(kept) for kept in content.kept_gradients)
        moved = filled + self._moved(plan, sizes)
        if not self.deferred:
            moved += self.updater.moved(plan, sizes, split)
        done = self._host.run(arrive, [*arrived, verdict], label, HostWork(moved))
        submitted.arrivals.append(done)
        if self._device.info.unified:
            slot.hold_gradients([done])
        elif staging is not None:
            self._staging_free[turn] = [done]
            if whole:
                self._staging_free[1 - turn] = [done]
        self._arrived(plan, done, groups, unscale, submitted)

    def conclude(
        self,
        plans: Sequence[GradientPlan],
        contents: Sequence[SlotContent],
        regions: Sequence[GradientRegion],
        groups: Sequence[Mapping[str, Any]],
        unscale: float,
        submitted: SubmittedStep,
    ) -> None:
        """After the last `collect`: submit the norm, and for deferred gradients the decision and the updates.

        `regions` is memory of a device that each segment's update may use. An update that the device has a part in
        is submitted when its parameters are read next, or by `Updater.submit_deferred`.
        """
        self.updater.end_open(submitted)
        result = submitted.result

        def decide() -> None:
            norms = [result.norms[name] for name in self._order if name in result.norms]
            total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
            result.grad_norm = float(total)
            if not self.deferred:
                return
            result.skipped = result.overflowed or not bool(torch.isfinite(total))
            factor = torch.tensor(unscale)
            if self._clipping.norm is not None:
                # As torch.nn.utils.clip_grad_norm_ computes it, to the bit.
                factor = factor * torch.clamp(self._clipping.norm / (total + 1e-6), max=1.0)
            result.factor = factor

        submitted.decision = self._host.run(decide, list(submitted.arrivals), "decision on the step")
        if not self.deferred:
            return
        self.updater.defer(plans, contents, regions, groups, self._whole, submitted)

    def group(self, group_of: Mapping[str, int]) -> None:
        """Look up each parameter's group here from now on."""
        self.updater.group_of = group_of

    def follow(self, device: Device) -> None:
        """Serve another device from now on."""
        self._device = device
        self.updater.follow(device)
        self.settle()

    def rename(self, names: Mapping[str, str | None], group_of: Mapping[str, int], order: Sequence[str]) -> None:
        """Give the model's tensors new names (None: removed); `group_of` and `order` are those of the new model."""
        self.optimizer.rename(names)
        self.updater.group_of = group_of
        self._order = order
        for total in self._sums.values():
            self._host.free(total.view(-1), TIED_SUMS)
        self._sums.clear()
        self._whole.free()

    def settle(self) -> None:
        """Forget the events of the stagings. Everything submitted must have ended, except deferred updates."""
        self._staging_free = [[], []]
        self.updater.settle()

    def _receive(
        self,
        plan: GradientPlan,
        content: SlotContent,
        gradients: Sequence[torch.Tensor],
        groups: Sequence[Mapping[str, Any]],
        unscale: float,
        submitted: SubmittedStep,
    ) -> None:
        """The host task of a segment whose gradients have arrived."""
        self._join_uses(plan, gradients, submitted)
        self._measure(plan, gradients, unscale, submitted)
        for kept, gradient in zip(content.kept_gradients, gradients, strict=False):
            kept.copy_(gradient)
        if not self.deferred:
            factor = None if unscale == 1.0 else torch.tensor(unscale)
            self.updater.update(plan, gradients, groups, factor, submitted.result, submitted.halves.get(plan))

    def _arrived(
        self,
        plan: GradientPlan,
        done: Event,
        groups: Sequence[Mapping[str, Any]],
        unscale: float,
        submitted: SubmittedStep,
    ) -> None:
        """Called when the host task of a segment, which ends with `done`, has been submitted."""
        if not self.deferred:
            self.updater.submit(plan, submitted.halves.get(plan), done, submitted)

    def _join_uses(self, plan: GradientPlan, gradients: Sequence[torch.Tensor], submitted: SubmittedStep) -> None:
        """Sum the uses of tied parameters, and note which parameters have a gradient."""
        result = submitted.result
        with torch.no_grad():
            for index in plan.partial:
                total = self._sums[plan.names[index]]
                if index in plan.first_arrivals:
                    total.copy_(gradients[index])
                else:
                    total.add_(gradients[index])
            for index in plan.joined:
                earlier = self._sums[plan.names[index]]
                complete = submitted.touched_rows.get(plan.names[index])
                if complete is not None:
                    earlier[complete] = 0.0
                gradients[index].add_(earlier)
            # PyTorch leaves a parameter without a gradient alone; one of zeros would be decayed. A tied one may have
            # its gradient from any of its uses.
            reached = None if plan.presence is None else plan.presence.reached()
            own = plan.names[: len(plan.names) - plan.late]
            result.reached.update(name for index, name in enumerate(own) if reached is None or index in reached)

    def _measure(
        self, plan: GradientPlan, gradients: Sequence[torch.Tensor], unscale: float, submitted: SubmittedStep
    ) -> None:
        """Clip by value, and take the norms of what is complete."""
        result = submitted.result
        with torch.no_grad():
            for index in plan.updates:
                if self._clipping.value is not None:
                    # Clipping makes infinities finite, so an overflow has to be noticed before it.
                    if self._scaled and not bool(torch.isfinite(torch.linalg.vector_norm(gradients[index], torch.inf))):
                        result.overflowed = True
                    gradients[index].clamp_(-self._clipping.value / unscale, self._clipping.value / unscale)
                norm = torch.linalg.vector_norm(gradients[index])
                result.norms[plan.names[index]] = norm if unscale == 1.0 else norm * unscale
        if (
            not self.deferred
            and unscale != 1.0
            and not all(bool(torch.isfinite(result.norms[plan.names[index]])) for index in plan.updates)
        ):
            raise GradientOverflow(plan.name, 1.0 / unscale)

    def _moved(self, plan: GradientPlan, sizes: Sequence[int]) -> int:
        """The bytes of host memory that taking gradients in reads and writes: each operand once each way.

        `sizes` are the bytes of the segment's gradients.
        """
        moved = sum((2 if index in plan.first_arrivals else 3) * sizes[index] for index in plan.partial)
        return moved + sum(3 * sizes[index] for index in plan.joined) + sum(sizes[index] for index in plan.updates)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
