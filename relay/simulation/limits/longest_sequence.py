"""The longest sequence that a run can train on, found by the memory that simulated steps need.

Memory is measured with `relay.simulation.simulated_step`; no step is run. Between two lengths memory is close to a
straight line, so few lengths are measured. Invariant: the answer was measured to fit, and the next one (a multiple of
`GRAIN`) measured not to, unless the answer is the limit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hal.spec import Machine
from relay.simulation.described.meta_model import MetaModel
from relay.simulation.described.transformer_shape import ModelShape, ShapeError
from relay.simulation.figures import SimulationFigures
from relay.simulation.host_cache import HostCache
from relay.simulation.shortfall import shortfalls
from relay.simulation.simulated_step import Memory, RunShape, SimulatedRun

GRAIN = 256
"""Lengths are multiples of it."""
LIMIT = 2**20
"""No longer sequence is looked for."""
FEW = 12
"""After so many lengths the interval is halved, since memory is no straight line there."""


def longest_sequence(found: SimulationFigures, **changes: Any) -> int:
    """The longest sequence that fits on the machine of a simulation, with its options; 0 where none does.

    It is a multiple of `GRAIN`. The sequences in a step and the micro-batches stay as they are. `changes` are options
    that differ, such as `head_chunk_tokens="auto"`. Raises ShapeError for a module, whose example fixes the length.
    """
    if isinstance(found.shape, MetaModel):
        raise ShapeError("The example batch of a module fixes its sequence. Give the model by its name or its sizes.")
    needed = NeededMemory(found.shape, replace(found.run, **changes), found.machine, found.device_capacity)
    return needed.longest(found.device_capacity, found.host_capacity)


class NeededMemory:
    """The memory that a run needs, by the length of its sequences, each measured once."""

    def __init__(self, shape: ModelShape, run: RunShape, machine: Machine, capacity: int | None = None) -> None:
        self._shape, self._run, self._machine, self._capacity = shape, run, machine, capacity
        self._host_cache = HostCache()
        self._known: dict[int, Memory] = {}

    def at(self, length: int) -> Memory:
        """The memory for sequences of that length."""
        if length not in self._known:
            run = replace(self._run, seq=length)
            prepared = SimulatedRun(self._shape, run, self._machine, self._host_cache, self._capacity)
            self._known[length] = prepared.memory()
            prepared.close()
        return self._known[length]

    def longest(self, device: int, host: int) -> int:
        """The longest sequence that fits into so many bytes of the device and of the host."""
        fits, fails, measured = 0, LIMIT + GRAIN, 0
        length = GRAIN
        while fails - fits > GRAIN:
            measured += 1
            if self._room(length, device, host) >= 0:
                fits = length
            else:
                fails = length
            if fails > LIMIT:
                length = min(4 * length, LIMIT)
                continue
            share = 0.5
            if fits and measured < FEW:
                left, lacks = self._room(fits, device, host), -self._room(fails, device, host)
                share = left / (left + lacks)
            guess = (fits + int((fails - fits) * share)) // GRAIN * GRAIN
            length = min(max(guess, fits + GRAIN), fails - GRAIN)
        return fits

    def _room(self, length: int, device: int, host: int) -> float:
        """Bytes left over at a length, on the device or on the host, whichever has less; negative where it lacks."""
        memory, unified = self.at(length), self._machine.device.unified
        left = min(device - memory.device_total, host - memory.host_total)
        if unified:
            left = host - (memory.host_total + memory.device_total - memory.slots)
        missing = shortfalls(memory, device, host, unified)
        return float(min(left, -1) if missing else max(left, 0))
