"""Updates of segments: which optimizer call, when it is submitted, and how a device has its part in it.

An update whose tensors have no device part is one task of the host. Another has two halves (`SplitUpdate`). Eager ones
are submitted as gradients arrive; deferred ones wait, if a device has a part in any of them, until their parameters are
read next (`DeferredUpdates`). When a step may be applied at all is decided elsewhere (`relay.eps.server`). Invariant:
each update of a step is submitted once, and its event is in the store before its parameters are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hal.device import Device
from hal.event import Event
from hal.host import Host, HostWork
from hal.program import Program
from hal.slot.device_slot import GradientRegion
from hal.slot.layout import SlotContent
from relay.eps.gradient_plan import GradientPlan
from relay.eps.optimizer_state import BoundOptimizer
from relay.eps.rows import WholeGradients
from relay.eps.snapshot import Snapshot
from relay.eps.step_record import StepResult, SubmittedStep
from relay.eps.store import LayerStore
from relay.eps.updates.deferred import DeferredUpdate, DeferredUpdates
from relay.eps.updates.placement import DeviceParts
from relay.eps.updates.split_update import SplitUpdate

Groups = Sequence[Mapping[str, Any]]
"""The optimizer's parameter groups, without parameters."""


class Updater:
    """Updates parameters of the store.

    Args:
        device: the device that may have a part in updates.
        host: where tasks run.
        store: the parameters.
        optimizer: updates them, and holds their states.
        group_of: the number of each parameter's group, by the parameter's name.

    Attributes:
        snapshot: what copies parameters before they change, if anything does.
        ended: the events of updates of which the second half was submitted since the last `settle`.
    """

    def __init__(
        self, device: Device, host: Host, store: LayerStore, optimizer: BoundOptimizer, group_of: Mapping[str, int]
    ) -> None:
        self.optimizer = optimizer
        self.group_of = group_of
        self.snapshot: Snapshot | None = None
        self.ended: list[Event] = []
        self._host = host
        self._store = store
        self._parts = DeviceParts(device, host)
        self._open: SplitUpdate | None = None
        self._deferred = DeferredUpdates()
        store.before_reading = self._deferred.submit

    def allocate(
        self,
        plan: GradientPlan,
        content: SlotContent,
        groups: Groups,
        owned: Callable[[Sequence[str]], Sequence[str]],
    ) -> None:
        """Allocate a segment's optimizer states, of `owned` names, and the host memory that device parts cross in."""
        self._parts.allocate(plan, content, self._groups_of(plan, groups), self.optimizer)
        for number, indices in self._by_group(plan).items():
            self.optimizer.allocate(owned([plan.names[index] for index in indices]), groups[number])

    def without_device(self) -> None:
        """Have no device parts: the host updates all, since several processes share the update of a segment."""
        self._parts.enabled = False

    def programs(self, plans: Sequence[GradientPlan], contents: Sequence[SlotContent], groups: Groups) -> list[Program]:
        """The programs of the device parts. There are no plans in a pass without a backward."""
        return [
            program
            for plan, content in zip(plans, contents, strict=bool(plans))
            for program in self._parts.programs(plan, content, self._groups_of(plan, groups), self.optimizer)
        ]

    def compile(
        self, plans: Sequence[GradientPlan], contents: Sequence[SlotContent], groups: Groups, device: Device
    ) -> None:
        """Compile them for a device. Raises OutOfMemory, Unsupported and CompileError."""
        for plan, content in zip(plans, contents, strict=bool(plans)):
            self._parts.compile(plan, content, self._groups_of(plan, groups), self.optimizer, device)

    def halves(
        self, plan: GradientPlan, content: SlotContent, region: GradientRegion, groups: Groups
    ) -> SplitUpdate | None:
        """The update in two halves of a segment of which the device has a part, in that memory; None for another."""
        return self._parts.update_of(plan, content, region, self._groups_of(plan, groups), self.optimizer)

    def update(
        self,
        plan: GradientPlan,
        gradients: Sequence[torch.Tensor],
        groups: Groups,
        factor: torch.Tensor | None,
        result: StepResult,
        split: SplitUpdate | None,
    ) -> None:
        """Update the parameters that a segment's gradients complete, unless the step is skipped.

        Of those that the device has a part in (`split`) this is the first half.
        """
        if result.skipped:
            return
        parts = {}
        if split is not None:
            split.ran, parts = True, split.by_index
        with torch.no_grad():
            for number, indices in self._by_group(plan).items():
                if plan.presence is not None or plan.late:
                    indices = [index for index in indices if plan.names[index] in result.reached]
                    self.optimizer.allocate([plan.names[index] for index in indices], groups[number])
                    if not indices:
                        continue
                names = [plan.names[index] for index in indices]
                self.before_update(names)
                result.updating = True
                at_once = [index for index in indices if index not in parts]
                if at_once:
                    taken = [gradients[index] for index in at_once]
                    self.optimizer.update([plan.names[index] for index in at_once], taken, groups[number], factor)
                for index in indices:
                    if split is not None and index in parts:
                        split.begin(parts[index], gradients[index], factor)

    def before_update(self, names: Sequence[str]) -> None:
        """Let a snapshot copy parameters that are about to change, and those that share memory with them."""
        if self.snapshot is not None:
            followers = [name for name in self._store.aliases if self._store.owner(name) in names]
            self.snapshot.before_update([*names, *followers])

    def moved(self, plan: GradientPlan, sizes: Sequence[int], split: SplitUpdate | None) -> int:
        """The bytes of host memory that `update` reads and writes. `sizes` are those of the gradients."""
        parts = {} if split is None else split.by_index
        moved = 0
        for index in plan.updates:
            name = plan.names[index]
            moved += sizes[index] + 2 * self.optimizer.state_bytes(name)
            moved += parts[index].first_half if index in parts else self._weight_bytes(name)
        return moved

    def submit(self, plan: GradientPlan, split: SplitUpdate | None, done: Event, submitted: SubmittedStep) -> None:
        """Go on with an eager update of which the task `done` is the whole, or the first half.

        A second half follows the kernels of the next segment, while which the first half and its transfers run.
        """
        self._store.changed(plan.names[index] for index in plan.updates)
        self.end_open(submitted)
        if split is None:
            self.note(plan, done, submitted)
        else:
            split.send(done)
            self._open = split
            submitted.optimizer_bytes += split.link_bytes

    def end_open(self, submitted: SubmittedStep, region: GradientRegion | None = None) -> None:
        """Submit the second half of the update that was begun last, if it is in this region; in any for None.

        Call it before kernels write other gradients to the region.
        """
        split = self._open
        if split is not None and (region is None or region is split.region):
            self._open = None
            self._end(split, submitted)

    def is_open(self, plan: GradientPlan) -> bool:
        """Whether the second half of a segment's update is not submitted yet."""
        return self._open is not None and self._open.plan is plan

    def defer(
        self,
        plans: Sequence[GradientPlan],
        contents: Sequence[SlotContent],
        regions: Sequence[GradientRegion],
        groups: Groups,
        whole: WholeGradients,
        submitted: SubmittedStep,
    ) -> None:
        """Take the deferred updates of a step, of which the decision is submitted.

        They are submitted at once, unless the device has a part in one.
        """
        made: list[DeferredUpdate] = []
        splits: list[SplitUpdate] = []
        for plan, content, region in zip(plans, contents, regions, strict=True):
            if not plan.updates:
                continue
            gradients = list(content.kept_gradients or content.gradient_tensors)
            for index, gradient in whole.of(plan.rows, self._store, None).items():
                gradients[index] = gradient.memory
            split = self.halves(plan, content, region, groups)
            splits += [] if split is None else [split]
            made.append(self._deferred_update(plan, gradients, region, groups, split, submitted))
            self._store.changed(plan.names[index] for index in plan.updates)
        submitted.optimizer_bytes += sum(split.link_bytes for split in splits)
        self._deferred.add(made, submitted)
        if not splits:
            self._deferred.submit()

    def submit_deferred(self) -> None:
        """Submit the deferred updates that are not submitted yet."""
        self._deferred.submit()

    def finish_on_host(self) -> Event:
        """Submit a task that does what is left of deferred updates, after the device was lost."""
        self._deferred.drop()
        return self._host.run(self._deferred.finish_on_host, (), "updates without the device")

    def fail(self, submitted: SubmittedStep) -> None:
        """Forget the deferred updates of a step that failed."""
        self._deferred.fail(submitted)

    def forget_deferred(self) -> None:
        """Forget the deferred updates: the state is about to be replaced, or they have ended."""
        self._deferred.clear()

    def follow(self, device: Device) -> None:
        """Serve another device from now on."""
        self._parts.follow(device)
        self._deferred.clear()

    def settle(self) -> None:
        """Forget the events of what was submitted. It must have ended."""
        self._open = None
        self.ended = []

    def _deferred_update(
        self,
        plan: GradientPlan,
        gradients: Sequence[torch.Tensor],
        region: GradientRegion,
        groups: Groups,
        split: SplitUpdate | None,
        submitted: SubmittedStep,
    ) -> DeferredUpdate:
        result = submitted.result
        sizes = [gradient.numel() * gradient.dtype.itemsize for gradient in gradients]
        work = HostWork(self.moved(plan, sizes, split))

        def update() -> None:
            self.update(plan, gradients, groups, result.factor, result, split)

        def begin() -> None:
            assert submitted.decision is not None
            done = self._host.run(update, [submitted.decision], f"update of {plan.name}", work)
            if split is None:
                self.note(plan, done, submitted)
            else:
                split.send(done)

        def end() -> None:
            if split is not None:
                self._end(split, submitted)

        def finish_on_host() -> None:
            if split is None:
                if not made.begun:
                    update()
                return
            if not split.ran:
                split.leave_device()
                update()
            split.finish_on_host(gradients)

        made = DeferredUpdate(frozenset(plan.names[i] for i in plan.updates), region, begin, end, finish_on_host)
        return made

    def _end(self, split: SplitUpdate, submitted: SubmittedStep) -> None:
        """Submit the device's part of an update, and its second half."""
        submitted.compute += split.compute()
        moved = sum(part.size + self._weight_bytes(part.name) for part in split.parts)
        label = f"second half of the update of {split.plan.name}"
        done = self._host.run(split.finish, split.returned, label, HostWork(moved))
        split.hold_region(done)
        self.ended.append(done)
        self.note(split.plan, done, submitted)

    def note(self, plan: GradientPlan, done: Event, submitted: SubmittedStep) -> None:
        """Note the event of a segment's update."""
        submitted.updates.append(done)
        submitted.updated_segments.append(plan.name)
        for index in plan.updates:
            self._store.updated[plan.names[index]] = done

    def _weight_bytes(self, name: str) -> int:
        """What a change of a parameter reads and writes of its weight and of the copies of that."""
        # A split master is as long as a float32 one, and has its rounded weights in it.
        own = 2 * self._store[name].numel() * self._store.dtype(name).itemsize
        return own + sum(copy.numel() * copy.dtype.itemsize for copy in self._store.rounded(name))

    def _groups_of(self, plan: GradientPlan, groups: Groups) -> dict[int, Mapping[str, Any]]:
        """The hyperparameters of a plan's updates, by index."""
        return {index: groups[self.group_of[plan.names[index]]] for index in plan.updates}

    def _by_group(self, plan: GradientPlan) -> dict[int, list[int]]:
        """The indices of a plan's updates, by parameter group."""
        by_group: dict[int, list[int]] = {}
        for index in plan.updates:
            by_group.setdefault(self.group_of[plan.names[index]], []).append(index)
        return by_group
