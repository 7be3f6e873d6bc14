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
from relay.errors import PartitionError
from relay.precision import COMPUTE
from relay.simulation.described.master_weights import states_may_be_small
from relay.simulation.described.meta_model import MetaModel
from relay.simulation.described.transformer_shape import ModelShape
from relay.simulation.host_cache import HostCache
from relay.simulation.simulated_step import WORKSPACE, Memory, RunShape, SimulatedRun


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
    prepared: SimulatedRun,
    shape: ModelShape | MetaModel,
    described: Machine,
    device: int,
    host: int,
    host_cache: HostCache,
) -> tuple[str, ...]:
    """The smallest changes of options that fit, three at most: single ones where they suffice, else combinations.

    `prepared` is the run that does not fit. Each change is followed by the memory that it needs.
    """
    run = prepared.run
    unified = described.device.unified
    room = None if unified else device
    found: list[dict[str, Any]] = []
    texts: list[str] = []
    known: list[tuple[dict[str, Any], Memory]] = [({}, prepared.memory())]
    for change in sorted(_changes(shape, run), key=len):
        if any(all(change.get(key) == value for key, value in other.items()) for other in found):
            continue  # a part of this change already fits
        if found and len(change) > len(found[0]) and _cuts(change):
            continue  # each has programs of its own to capture
        if _cuts(change) and not any(
            _cuts_may_help(memory, device, host, unified)
            for other, memory in known
            if other == {key: value for key, value in change.items() if key not in CUTS}
        ):
            continue
        try:
            prepared = SimulatedRun(shape, replace(run, **change), described, host_cache, room)
        except PartitionError:  # the loss is not that of micro-batches
            continue
        memory, taken = prepared.memory(), prepared.run
        prepared.close()
        known.append((change, memory))
        if not shortfalls(memory, device, host, unified):
            found.append(change)
            chosen = {key: getattr(taken, key) if value == "auto" else value for key, value in change.items()}
            options = " with ".join(f"{key}={value}" for key, value in chosen.items() if value is not None)
            needs = f"device {format_size(memory.device_total)}, host {format_size(memory.host_total)}"
            texts.append(f"{options} ({needs})")
        if len(found) == 3:
            break
    return tuple(texts)


CUTS = ("head_chunk_tokens", "mlp_chunk_tokens", "loss_over")
"""Options that reduce the workspace of kernels and nothing else."""
LAYER_CHUNK, MOST_CHUNKS = 4096, 8
"""Positions of a chunk of a layer at least, and chunks of a micro-batch at most: capture grows with them."""


def _cuts(change: dict[str, Any]) -> bool:
    return any(key in change for key in CUTS)


def _cuts_may_help(memory: Memory, device: int, host: int, unified: bool) -> bool:
    """Whether a run would fit if its kernels needed no workspace."""
    without = replace(memory, device={**memory.device, WORKSPACE: 0})
    return not shortfalls(without, device, host, unified)


def _changes(shape: ModelShape | MetaModel, run: RunShape) -> list[dict[str, Any]]:
    """The options to try, one mapping for each try."""
    state_dtypes: list[dict[str, Any]] = [{}]
    if states_may_be_small(shape, run.master_weights, COMPUTE[run.precision], run.optimizer):
        state_dtypes += [{"state_dtype": kind} for kind in ("bf16", "int8")]
    if run.precision == "bf16" and run.master_weights != "as_given":
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
    changes: list[dict[str, Any]] = []
    for parts in itertools.product(loss_scales, segment_choices, state_dtypes, memory_choices, _cut_choices(run)):
        together = {key: value for part in parts for key, value in part.items()}
        change = {key: value for key, value in together.items() if getattr(run, key) != value}
        if change and change not in changes:
            changes.append(change)
    return changes


def _cut_choices(run: RunShape) -> list[dict[str, Any]]:
    """The cuts of the head and of layers to try: none first."""
    tokens = max(run.pieces()) * run.seq
    choices: list[dict[str, Any]] = [{}]
    if run.head_chunk_tokens is None:
        choices.append({"head_chunk_tokens": "auto"})
    if run.mlp_chunk_tokens is None and tokens > LAYER_CHUNK:  # logits mostly take more, so the head comes first
        choices.append(choices[-1] | {"mlp_chunk_tokens": max(LAYER_CHUNK, -(-tokens // MOST_CHUNKS))})
    if run.loss_over == "batch":
        choices = [{}, *({"loss_over": "microbatch", **one} for one in choices)]
    return choices
