"""The update of one segment in two halves of the host, with a device's part between them, and its transfers.

The first half leaves a bfloat16 matrix for each tensor that has such a part. It goes into the device memory of the
segment's gradients, where the tensor's own gradient lay, which the host has by then; a program replaces it by its
result, which comes back the same way, and the second half changes the weight. Tensors without a part are updated in
the first half. Invariant: between `begin` and the end of what `end` submits, nothing else is written to that region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hal.device import Device, KernelCall
from hal.event import Event
from hal.program import Kernel
from hal.slot.device_slot import GradientRegion
from hal.slot.layout import CHUNK, Field, aligned
from relay.eps.gradient_plan import GradientPlan
from relay.eps.optimizer_state import BoundOptimizer

SENT = "optimizer in"
RETURNED = "optimizer out"
"""The queues of the transfers."""


@dataclass(frozen=True, eq=False)
class PlacedPart:
    """One tensor's device part: its gradient's number in the plan, the program, and where the matrix lies.

    `at` is in the region of gradients on the device, `staged` in the host memory that crosses the link.
    """

    index: int
    name: str
    kernel: Kernel
    at: int
    staged: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return self.kernel.program.inputs[0].shape

    @property
    def size(self) -> int:
        """Bytes of the matrix."""
        return self.kernel.program.inputs[0].size

    @property
    def first_half(self) -> int:
        """Bytes that the host moves for the matrix: in float32 it is written and read, then it is written rounded."""
        return 5 * self.size


@dataclass(eq=False)
class SplitUpdate:
    """An update in two halves.

    Attributes:
        plan, parts, groups: what is updated, and the hyperparameters by the number of the gradient.
        region, staging: where the matrices lie on the device, and where they cross the link; None for no link.
        ran: whether the first half has run.
        started: the parts whose first half ran, with what multiplies their gradients from then on.
        finished: the parts whose second half ran.
        sent: the events after which each matrix is on the device.
        returned: the events after which the results are on the host.
    """

    plan: GradientPlan
    parts: Sequence[PlacedPart]
    groups: Mapping[int, Mapping[str, Any]]
    region: GradientRegion
    staging: torch.Tensor | None
    device: Device
    optimizer: BoundOptimizer
    ran: bool = False
    started: dict[int, torch.Tensor | None] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    sent: list[list[Event]] = field(default_factory=list)
    returned: list[Event] = field(default_factory=list)

    @property
    def by_index(self) -> dict[int, PlacedPart]:
        """The parts by the number of the gradient."""
        return {part.index: part for part in self.parts}

    @property
    def link_bytes(self) -> int:
        """What crosses the link, both ways together."""
        return 0 if self.staging is None else 2 * sum(part.size for part in self.parts)

    def matrix(self, part: PlacedPart) -> torch.Tensor:
        """Where the host leaves a matrix and finds the result."""
        if self.staging is None:
            return self.device.host_tensor(self._views(part)[0])
        return self.staging[part.staged : part.staged + part.size].view(torch.bfloat16).view(part.shape)

    def begin(self, part: PlacedPart, gradient: torch.Tensor, factor: torch.Tensor | None) -> None:
        """The first half of one tensor's update."""
        group = self.groups[part.index]
        scaled = self.optimizer.begin(part.name, gradient, group, factor, self.matrix(part))
        self.started[part.index] = None if scaled else factor

    def finish(self) -> None:
        """The second half of all that were begun."""
        with torch.no_grad():
            for part in self._unfinished():
                self.optimizer.finish(part.name, self.matrix(part), self.groups[part.index])
                self.finished.add(part.index)

    def finish_on_host(self, gradients: Sequence[torch.Tensor]) -> None:
        """The same without the device's part, after the device was lost."""
        with torch.no_grad():
            for part in self._unfinished():
                gradient, factor = gradients[part.index], self.started[part.index]
                self.optimizer.finish_on_host(part.name, gradient, self.groups[part.index], factor)
                self.finished.add(part.index)

    def _unfinished(self) -> list[PlacedPart]:
        return [part for part in self.parts if part.index in self.started and part.index not in self.finished]

    def leave_device(self) -> None:
        """Have memory of the host for the matrices in place of the device's, which is lost."""
        if self.staging is None:
            self.staging = torch.empty(sum(aligned(part.size) for part in self.parts), dtype=torch.uint8)

    def send(self, begun: Event) -> None:
        """Submit the transfers of the matrices to the device, after the first half."""
        for part in self.parts:
            if self.staging is None:
                self.sent.append([begun])
                continue
            queue, events = self.device.queue(SENT), []
            for start, piece in self._pieces(part):
                events.append(queue.write(self.region.part(part.at + start, piece), piece, [begun]))
            self.sent.append(events)

    def compute(self) -> list[Event]:
        """Submit the kernels and the transfers of their results. Returns the kernels' events."""
        kernels = []
        for part, sent in zip(self.parts, self.sent, strict=True):
            views = self._views(part)
            event = self.device.queue("compute").run(KernelCall(part.kernel, views, views), sent)
            kernels.append(event)
            if self.staging is None:
                self.returned.append(event)
                continue
            queue = self.device.queue(RETURNED)
            for start, piece in self._pieces(part):
                self.returned.append(queue.read(piece, self.region.part(part.at + start, piece), [event]))
        return kernels

    def hold_region(self, finished: Event) -> None:
        """Let what is written to the region from now on wait until the results have been taken out of it."""
        self.region.drained = [finished] if self.staging is None else list(self.returned)

    def _views(self, part: PlacedPart) -> list[Any]:
        return list(self.region.tensors((Field(part.at, part.shape, torch.bfloat16),)))

    def _pieces(self, part: PlacedPart) -> list[tuple[int, torch.Tensor]]:
        assert self.staging is not None
        flat = self.staging[part.staged : part.staged + part.size]
        return [(start, flat[start : start + CHUNK]) for start in range(0, part.size, CHUNK)]
