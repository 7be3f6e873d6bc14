"""Whether a run fits in memory: what is missing, as text, and the smallest changes that would fit.

Memory is measured with `relay.simulation.simulated_step`; no step is run. Invariant: every suggested change was
measured to fit.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from hal.spec import Machine
from hal.spec.units import format_size
from relay.simulation.host_cache import HostCache
from relay.simulation.meta_model import MetaModel
from relay.simulation.simulated_step import Memory, RunShape, SimulatedRun
from relay.simulation.transformer_shape import ModelShape


def shortfalls(memory: Memory, device: int, host: int, unified: bool) -> tuple[str, ...]:
    """What the memory lacks for a run, one sentence each; nothing where the run fits."""
    found = []
    if unified:
        # Device and host share one memory, and a slot would hold what the host has there anyway.
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
    shape: ModelShape | MetaModel, run: RunShape, described: Machine, device: int, host: int, host_cache: HostCache
) -> tuple[str, ...]:
    """The smallest changes of options that fit, three at most: single ones where they suffice, else combinations."""
    changes: list[dict[str, Any]] = []
    state_dtypes: list[dict[str, Any]] = [{}, *({"state_dtype": kind} for kind in ("bf16", "int8"))]
    if run.precision == "bf16":
        state_dtypes[1:1] = [{"master_weights": "split"}]
        state_dtypes.append({"master_weights": "split", "state_dtype": "int8"})
    memory_choices: list[dict[str, Any]] = [{}, {"stash": "host"}, {"microbatches": run.batch}]
    least: dict[str, Any] = {"stash": "host", "microbatches": run.batch}
    memory_choices += [least, least | {"slots": 1}]
    loss_scales: list[dict[str, Any]] = [{}]
    if run.precision == "fp16" and run.loss_scale == "dynamic":
        loss_scales.append({"loss_scale": "fixed"})
    smallest = {"recompute": True, "layers_per_slot": 1, "resident_layers": 0}
    segment_choices: list[dict[str, Any]] = [{}]
    if any(getattr(run, key) != value for key, value in smallest.items()):
        segment_choices.append(smallest)
    for loss_scale, segment in itertools.product(loss_scales, segment_choices):
        for state in state_dtypes:
            for memory_choice in memory_choices:
                together = {**loss_scale, **segment, **state, **memory_choice}
                change = {key: value for key, value in together.items() if getattr(run, key) != value}
                if change and change not in changes:
                    changes.append(change)
    found: list[dict[str, Any]] = []
    for change in sorted(changes, key=len):
        if any(all(change.get(key) == value for key, value in other.items()) for other in found):
            continue  # a part of this change already fits
        room = None if described.device.unified else device
        prepared = SimulatedRun(shape, replace(run, **change), described, host_cache, room)
        memory = prepared.memory()
        prepared.close()
        if not shortfalls(memory, device, host, described.device.unified):
            found.append(change)
        if len(found) == 3:
            break
    return tuple(" with ".join(f"{key}={value}" for key, value in change.items()) for change in found)
