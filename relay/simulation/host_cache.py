"""What a simulated run has on its host, kept for the next run that has the same there.

Weights, optimizer states and where they lie do not depend on slots, stash, micro-batches or what is recomputed, and
making them takes longer than most steps do. So choices that differ in these share them, one after another: each on a
device of its own, beside which the host works for as long as the run lasts, as it would beside one that takes the
place of a lost one. Invariant: a run that is given another's host side finds it as it would have made it itself.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hal.device import Device
from hal.host import Host
from hal.slot import SlotContent
from relay.eps.server import GradientPlan, ParameterServer
from relay.eps.store import LayerStore
from relay.runtime.stages import CompiledModel, gradient_fields, wanted_of


@dataclass(eq=False)
class HostSide:
    """A model's stay on a host: as a session has it, but for the session. `optimizer` is as the run was given it."""

    model: nn.Module
    optimizer: Any
    host: Host
    store: LayerStore
    server: ParameterServer
    groups: list[dict[str, Any]]
    contents: Sequence[SlotContent] = ()
    plans: Sequence[GradientPlan] = ()

    @functools.cached_property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def follow(self, device: Device) -> None:
        """Work beside another device from now on. What ran beside the one before has ended."""
        self.host.follow(device.host())
        self.server.follow(device)
        self.store.updated.clear()


class HostSides:
    """Those that no run uses at present, by what they were made for."""

    def __init__(self) -> None:
        self._idle: dict[Hashable, list[HostSide]] = {}
        self._laid_out: dict[CompiledModel, Hashable] = {}

    def take(self, key: Hashable, optimizer: Any) -> HostSide | None:
        """One made for that, or None where there is none to be had."""
        idle = self._idle.get(key, [])
        side = next((one for one in idle if one.optimizer == optimizer), None)
        if side is not None:
            idle.remove(side)
        return side

    def give(self, key: Hashable, side: HostSide) -> None:
        """Take one in of a run that has ended."""
        self._idle.setdefault(key, []).append(side)

    def laid_out(self, compiled: CompiledModel) -> Hashable:
        """What of the stations decides how weights and gradients lie."""
        found = self._laid_out.get(compiled)
        if found is None:
            names = [stage.segment.name for stage in compiled.stages]
            rows = zip(names, wanted_of(compiled), gradient_fields(compiled), strict=True)
            found = tuple((name, tuple(wanted), tuple(gradients)) for name, wanted, gradients in rows)
            self._laid_out[compiled] = found
        return found
