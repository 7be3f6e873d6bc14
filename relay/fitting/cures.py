"""What would make a run fit that does not: by how much it is too large, and the changes that suffice, cheapest first.

A change costs nothing if no result changes, little if results are equal to rounding, and more if the training becomes
another one. More memory comes last. Memory is simulated and no step is run. Invariant: every change that is named was
found to fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hal.spec.units import format_binary_size, format_size
from relay.precision import COMPUTE
from relay.simulation.described.master_weights import states_may_be_small
from relay.simulation.described.meta_model import MetaModel
from relay.simulation.described.transformer_shape import ModelShape
from relay.simulation.host_cache import HostCache
from relay.simulation.shortfall import shortfalls
from relay.simulation.simulate import Simulation
from relay.simulation.simulated_step import Memory, RunShape, SimulatedRun

MOST = 3
"""Changes that are named."""


@dataclass(frozen=True, eq=False)
class Cure:
    """A change of options, what it costs in words, and the rank of that cost."""

    change: Mapping[str, Any]
    cost: str
    rank: int


def _possible(shape: ModelShape | MetaModel, run: RunShape) -> list[Cure]:
    """Every single change that may help a run."""
    smallest: dict[str, Any] = {
        "stash": "host", "slots": 1, "layers_per_slot": 1, "resident_layers": 0, "recompute": True,
    }  # fmt: skip
    found = [Cure({name: value}, "no result changes", 0) for name, value in smallest.items()]
    found.append(Cure({"stash": "device"}, "no result changes", 0))
    if run.precision == "bf16" and run.master_weights != "as_given":
        found.append(Cure({"master_weights": "split"}, "no result changes", 0))
    found.append(Cure({"microbatches": run.batch}, "results are equal to rounding", 1))
    if states_may_be_small(shape, run.master_weights, COMPUTE[run.precision], run.optimizer):
        found.append(Cure({"state_dtype": "bf16"}, "moments are rounded to bfloat16", 2))
        found.append(Cure({"state_dtype": "int8"}, "moments are rounded to 8 bits", 3))
    if run.precision == "fp16":
        found.append(Cure({"loss_scale": "fixed"}, "an overflow ends the run", 4))
    found.append(Cure({"clip_grad_norm": None}, "gradients are not clipped, so none waits for the norm", 5))
    return [cure for cure in found if any(getattr(run, name) != value for name, value in cure.change.items())]


def cures(
    shape: ModelShape | MetaModel, closest: Simulation, host_cache: HostCache, given: Mapping[str, Any]
) -> list[str]:
    """Sentences on what would make the closest candidate fit. `given` are the options that were not free."""
    device, host, machine = closest.device_capacity, closest.host_capacity, closest.machine

    def memory_of(run: RunShape) -> Memory:
        prepared = SimulatedRun(shape, run, machine, host_cache, device)
        memory = prepared.memory()
        prepared.close()
        return memory

    singles = [cure for cure in _possible(shape, closest.run) if set(cure.change) <= {*given, "state_dtype"}]
    groups = [group for size in (1, 2) for group in itertools.combinations(singles, size)]
    groups = [group for group in groups if len({name for cure in group for name in cure.change}) == len(group)]
    found: list[tuple[Cure, ...]] = []
    for group in sorted(groups, key=lambda group: (max(cure.rank for cure in group), len(group))):
        if any(set(other) <= set(group) for other in found):
            continue
        change = {name: value for cure in group for name, value in cure.change.items()}
        if not shortfalls(memory_of(replace(closest.run, **change)), device, host, machine.device.unified):
            found.append(group)
        if len(found) == MOST:
            break
    lines = [
        " with ".join(f"{name}={value!r}" for cure in group for name, value in cure.change.items())
        + f" ({'; '.join(dict.fromkeys(cure.cost for cure in group))})"
        for group in found
    ]
    return [*lines, *_more_memory(closest)]


def _more_memory(closest: Simulation) -> list[str]:
    lines = []
    more = closest.memory.host_total - closest.host_capacity
    if more > 0:
        lines.append(f"{more:,} bytes ({format_binary_size(more)}) more of host memory")
    more = closest.memory.device_total - closest.device_capacity
    if more > 0 and not closest.machine.device.unified:
        lines.append(f"{more:,} bytes ({format_size(more)}) more of device memory")
    return lines
