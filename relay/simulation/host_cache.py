"""The host state of simulated runs, saved for the next run that needs the same state.

Weights, optimizer states and their layout do not depend on slots, stash, micro-batches or recomputing, and making them
takes longer than most simulated steps. Runs that differ only in these options share one host state, one run after
another, each on a device of its own.

Invariant: a run with a shared host state gives the same figures as a run that made its own.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hal.device import Device
from hal.host import Host
from relay.eps.server import ParameterServer
from relay.eps.store import LayerStore
from relay.runtime.stages import CompiledModel, gradient_fields, wanted_of


@dataclass(eq=False)
class HostState:
    """A model on a host: its store, parameter server and layout. `optimizer` is the one that the run was given."""

    model: nn.Module
    optimizer: Any
    host: Host
    store: LayerStore
    server: ParameterServer
    groups: list[dict[str, Any]]

    @functools.cached_property
    def parameters(self) -> int:
        """The number of elements in all parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def follow(self, device: Device) -> None:
        """Work with another device from now on. All work with the previous device has ended."""
        self.host.follow(device.host())
        self.server.follow(device)
        self.store.updated.clear()


class HostCache:
    """The host states that no run uses at present, by what they were made for."""

    def __init__(self) -> None:
        self._idle: dict[Hashable, list[HostState]] = {}
        self._layouts: dict[CompiledModel, Hashable] = {}

    def take(self, key: Hashable, optimizer: Any) -> HostState | None:
        """An idle host state for that key and optimizer, removed from the cache; None where there is none."""
        idle = self._idle.get(key, [])
        state = next((state for state in idle if state.optimizer == optimizer), None)
        if state is not None:
            idle.remove(state)
        return state

    def give(self, key: Hashable, state: HostState) -> None:
        """Put the host state of a run that has ended into the cache."""
        self._idle.setdefault(key, []).append(state)

    def layout(self, compiled: CompiledModel) -> Hashable:
        """The part of a compiled model that decides how weights and gradients lie in memory."""
        found = self._layouts.get(compiled)
        if found is None:
            names = [stage.segment.name for stage in compiled.stages]
            rows = zip(names, wanted_of(compiled), gradient_fields(compiled), strict=True)
            found = tuple((name, tuple(wanted), tuple(gradients)) for name, wanted, gradients in rows)
            self._layouts[compiled] = found
        return found
