"""Which tensors' updates have a part for the device, with what programs, and the host memory in which they cross.

A tensor has one where its whole gradient comes out of the segment that completes it: its matrix then fits where the
gradient lay. Others (a table of which rows are sent, a weight that an earlier segment only reads) are updated on the
host altogether. Invariant: what is needed is in the ledger, and compiled, before a step is submitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hal.device import Device
from hal.host import Host
from hal.program import Kernel, Program
from hal.slot.device_slot import GradientRegion
from hal.slot.layout import SlotContent, aligned
from relay.capture import graphs_for
from relay.eps.gradient_plan import GradientPlan
from relay.eps.optimizer_state import BoundOptimizer
from relay.eps.updates.device_programs import program_of
from relay.eps.updates.split_update import PlacedPart, SplitUpdate
from relay.optim.tensor_optimizer import DevicePart

STAGING = "matrices in transit"
HALF = torch.bfloat16.itemsize

Groups = Mapping[int, Mapping[str, Any]]
"""The hyperparameters of a plan's updates, by the number of the gradient."""

Found = tuple[int, DevicePart, tuple[int, ...], int]
"""The number of a gradient, its part, the shape of the matrix, and where it lies in the region of gradients."""


class DeviceParts:
    """The device parts of one trainer's updates."""

    def __init__(self, device: Device, host: Host) -> None:
        self._device = device
        self._host = host
        self.enabled = True
        self._kernels: dict[tuple[Device, DevicePart, tuple[int, ...]], Kernel] = {}
        self._staging: list[torch.Tensor] = []
        self._turn = 0

    def programs(
        self, plan: GradientPlan, content: SlotContent, groups: Groups, optimizer: BoundOptimizer
    ) -> list[Program]:
        """The programs of a segment's parts."""
        return [self._program(part, shape) for _, part, shape, _ in self._find(plan, content, groups, optimizer)]

    def allocate(self, plan: GradientPlan, content: SlotContent, groups: Groups, optimizer: BoundOptimizer) -> None:
        """Allocate the host memory of a segment's matrices. Raises OutOfMemory."""
        found = list(self._find(plan, content, groups, optimizer))
        optimizer.place(plan.names, {plan.names[index] for index, *_ in found})
        size = sum(aligned(HALF * math.prod(shape)) for _, _, shape, _ in found)
        if size and not self._device.info.unified and (not self._staging or self._staging[0].numel() < size):
            for old in self._staging:
                self._host.free(old, STAGING)
            self._staging = [self._host.alloc(size, torch.uint8, STAGING, crosses=True) for _ in range(2)]

    def compile(
        self,
        plan: GradientPlan,
        content: SlotContent,
        groups: Groups,
        optimizer: BoundOptimizer,
        device: Device,
    ) -> None:
        """Compile the programs of a segment's parts for a device. Raises OutOfMemory, Unsupported and CompileError."""
        for _, part, shape, _ in self._find(plan, content, groups, optimizer):
            if (device, part, shape) not in self._kernels:
                self._kernels[(device, part, shape)] = device.compile(self._program(part, shape))

    def update_of(
        self,
        plan: GradientPlan,
        content: SlotContent,
        region: GradientRegion,
        groups: Groups,
        optimizer: BoundOptimizer,
    ) -> SplitUpdate | None:
        """The update in two halves of a segment that has parts, in this region of the device; None for another."""
        placed, staged = [], 0
        for index, part, shape, at in self._find(plan, content, groups, optimizer):
            placed.append(PlacedPart(index, plan.names[index], self._kernels[(region.device, part, shape)], at, staged))
            staged += aligned(placed[-1].size)
        if not placed:
            return None
        self._turn = 1 - self._turn
        staging = None if region.device.info.unified else self._staging[self._turn]
        return SplitUpdate(plan, placed, groups, region, staging, region.device, optimizer)

    def follow(self, device: Device) -> None:
        """Serve another device from now on."""
        self._device = device
        self._kernels.clear()

    def _program(self, part: DevicePart, shape: tuple[int, ...]) -> Program:
        return program_of(part, shape, *graphs_for(self._device.info))

    def _find(
        self, plan: GradientPlan, content: SlotContent, groups: Groups, optimizer: BoundOptimizer
    ) -> Iterator[Found]:
        for index in plan.updates if self.enabled else ():
            if index >= len(content.gradient_fields) or index in plan.rows:
                continue
            field, part = content.gradient_fields[index], optimizer.device_part(groups[index])
            if part is not None and field.size >= HALF * math.prod(field.shape):
                yield index, part, field.shape, field.offset
