"""Whether a run fits: what is too little, in words, and the smallest changes that would fit.

It measures with `relay.simulation.simulated_step` and runs no step. Invariant: what it says would fit was measured to
fit.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from hal.spec import Machine
from hal.spec.units import format_size
from relay.simulation.host_cache import HostSides
from relay.simulation.meta_model import MetaModel
from relay.simulation.simulated_step import Memory, RunShape, SimulatedRun
from relay.simulation.transformer_shape import ModelShape


def shortfalls(memory: Memory, device: int, host: int, unified: bool) -> tuple[str, ...]:
    """What is too little for a run, in words; nothing where it fits."""
    found = []
    if unified:
        # One memory for both; what a slot would hold is the host's own.
        together = memory.host_total + memory.device_total - memory.slots
        if together > host:
            found.append(
                f"Host and device share {format_size(host)} and need {format_size(together)}: "
                f"{format_size(together - host)} too little."
            )
        return tuple(found)
    if memory.device_total > device:
        found.append(
            f"The device needs {format_size(memory.device_total)} and has {format_size(device)} to use: "
            f"{format_size(memory.device_total - device)} too little."
        )
    if memory.host_total > host:
        found.append(
            f"The host needs {format_size(memory.host_total)} and has {format_size(host)}: "
            f"{format_size(memory.host_total - host)} too little."
        )
    return tuple(found)


def suggestions(
    shape: ModelShape | MetaModel, run: RunShape, described: Machine, device: int, host: int, sides: HostSides
) -> tuple[str, ...]:
    """The smallest changes that fit, of those that can be made: one alone where one does, else several together."""
    changes: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = [{}, *({"state_dtype": kind} for kind in ("bf16", "int8"))]
    places: list[dict[str, Any]] = [{}, {"stash": "host"}, {"microbatches": run.batch}]
    places += [{"stash": "host", "microbatches": run.batch}, {"stash": "host", "microbatches": run.batch, "slots": 1}]
    scales: list[dict[str, Any]] = [{}]
    if run.precision == "fp16" and run.loss_scale == "dynamic":
        scales.append({"loss_scale": "fixed"})
    lesser = {"recompute": True, "layers_per_slot": 1}
    segments: list[dict[str, Any]] = [{}]
    if any(getattr(run, key) != value for key, value in lesser.items()):
        segments.append(lesser)
    for scale, segment in itertools.product(scales, segments):
        for state in states:
            for place in places:
                together = {**scale, **segment, **state, **place}
                change = {key: value for key, value in together.items() if getattr(run, key) != value}
                if change and change not in changes:
                    changes.append(change)
    found: list[dict[str, Any]] = []
    for change in sorted(changes, key=len):
        if any(all(change.get(key) == value for key, value in other.items()) for other in found):
            continue  # what already fits with less need not be told again
        prepared = SimulatedRun(shape, replace(run, **change), described, sides)
        memory = prepared.memory()
        prepared.close()
        if not shortfalls(memory, device, host, described.device.unified):
            found.append(change)
        if len(found) == 3:
            break
    return tuple(" with ".join(f"{key}={value}" for key, value in change.items()) for change in found)
