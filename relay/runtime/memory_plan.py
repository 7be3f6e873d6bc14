"""The workspace of a pass over the model: what it needs on device and host, worked out before anything is taken.

A `Requirement` is bytes by purpose; where it passes the device's capacity the run is refused at once, with what
would reduce it. Stash plans are made here, by the order of the schedule's visits; nothing is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hal.errors import OutOfMemory
from hal.slot import SlotContent
from hal.spec.units import format_size
from relay.partition.segments import Value
from relay.runtime.stages import CompiledModel, Stage, StageProgram
from relay.runtime.stash import Key, Life, StashPlan, plan_stash

RESIDENT_FROM = 3
"""Values that this many segments use stay on the device: they are few, and do not grow with depth."""


@dataclass(frozen=True)
class Requirement:
    """Bytes of device memory a training step needs, by purpose; `kept`, of the stash, is there to save recomputing.

    `layers` is the most that share a slot.
    """

    slots: int
    slot_count: int
    stash: int
    workspace: int
    scalars: int
    kept: int = 0
    layers: int = 1

    @property
    def total(self) -> int:
        """All of it."""
        return self.slots + self.stash + self.workspace + self.scalars

    def check(self, device: str, capacity: int | None, stash: str, microbatches: int, largest: str) -> None:
        """Raise OutOfMemory, with advice, where it passes the capacity."""
        if capacity is not None and self.total > capacity:
            advice = self.advice(stash, microbatches, largest)
            raise OutOfMemory(f"This run on device {device!r}", self.total, 0, capacity, advice)

    def advice(self, stash: str, microbatches: int, largest: str) -> str:
        """What the bytes are for, and what would reduce them."""
        options = []
        if self.kept:
            options.append(f"recompute=True (the tensors kept instead take {format_size(self.kept)})")
        if self.layers > 1:
            options.append(f"layers_per_slot={self.layers - 1} (a slot holds up to {self.layers} layers)")
        if stash == "device":
            options.append(f"stash='host' (the stash takes {format_size(self.stash)})")
        if self.slot_count > 1:
            options.append(f"slots={self.slot_count - 1} (each takes {format_size(self.slots // self.slot_count)})")
        options.append(f"more micro-batches than {microbatches} (smaller pieces: less workspace and stash)")
        return (
            f"It needs {self.total:,} bytes: {self.slot_count} slots of {self.slots // self.slot_count:,} (the largest "
            f"layer is {largest!r}), stash {self.stash:,}, workspace {self.workspace:,}. "
            f"What reduces it: {'; '.join(options)}; or raise capacity=."
        )


def slot_sizes(contents: Sequence[SlotContent]) -> tuple[int, int]:
    """Bytes a slot needs for parameters and for gradients."""
    return max(content.size for content in contents), max(content.gradient_size for content in contents)


def scalar_bytes(microbatches: int) -> int:
    """Two rows (losses, and seeds) of one number of up to 8 bytes a micro-batch."""
    return 2 * max(64, 8 * microbatches)


def kernel_workspace(compiled: CompiledModel) -> int:
    """Bytes that the largest kernel needs while it runs."""
    passes = [one for stage in compiled.stages for one in (stage.forward, stage.backward) if one is not None]
    return max(one.program.workspace for one in passes)


def plan_for(pieces: Sequence[CompiledModel], stash: str, training: bool) -> StashPlan:
    """Where each value and gradient of a pass lives, by the order of visits that the schedule makes.

    `pieces` are of one layout, the largest first; what segments keep may be largest in another.
    """
    compiled, values = pieces[0], pieces[0].partition.values
    corresponding = zip(*(one.partition.values for one in pieces), strict=False)  # as far as they are used
    sizes = [max(map(_bytes, alike)) for alike in corresponding]
    visits = _visits(compiled.stages, training)
    end = len(visits)
    lives: dict[Key, Life] = {}
    most_streamed = 0
    for value in compiled.partition.inputs:
        if values[value].consumers:
            _use(lives, Key(value, False), 0, values[value], sizes[value], stash)
    for number, one in enumerate(visits):
        keys = [Key(value, False) for value in (*one.reads, *one.writes)]
        keys += [Key(value, True) for value in (*one.seeds, *one.value_gradients)]
        keys = [key for key in keys if key.value != compiled.loss]  # the loss and its seed have places of their own
        for key in keys:
            _use(lives, key, number, values[key.value], sizes[key.value], stash)
        most_streamed = max(most_streamed, sum(lives[key].streams and not lives[key].kept for key in keys))
    for value in compiled.partition.results:
        life = lives.get(Key(value, False))
        if life is not None:  # asked for: it is read back after the last visit
            life.last, life.streams = end, False
    return plan_stash(lives, most_streamed)


def plans_for(pieces: Sequence[CompiledModel], stash: str, training: bool) -> list[StashPlan]:
    """A plan for each micro-batch, the largest first: one for all whose values are passed on alike."""
    groups: list[list[CompiledModel]] = []
    for one in dict.fromkeys(pieces):
        group = next((group for group in groups if group[0].layout() == one.layout()), None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
    plans = {one: plan for group in groups for plan in [plan_for(group, stash, training)] for one in group}
    return [plans[one] for one in pieces]


def _bytes(value: Value) -> int:
    return value.dtype.itemsize * math.prod(value.shape)


def _use(lives: dict[Key, Life], key: Key, visit: int, value: Value, size: int, stash: str) -> None:
    life = lives.get(key)
    if life is None:
        resident = stash == "device" or len(set(value.consumers)) >= RESIDENT_FROM
        life = lives[key] = Life(visit, visit, size, not resident, bool(value.parts))
    life.last = visit


def _visits(stages: Sequence[Stage], training: bool) -> list[StageProgram]:
    forward = [stage.forward for stage in stages if stage.forward is not None]
    if not training:
        return forward
    return forward + [stage.backward for stage in reversed(stages) if stage.backward is not None]
