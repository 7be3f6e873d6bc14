"""Where and how a fine-tuning runs: the device, the precision, and the options that fit it (`relay.fit`).

Nothing is trained. The model is planned without its weights. Invariant: an option that was given is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hal import registry
from hal.device import HOST_CORES
from hal.dtypes import HALVES
from hal.errors import HalError
from hal.spec import machine, presets
from hal.spec.units import format_seconds, format_size
from relay.checkpoint_manager import newest
from relay.finetuning.options import Settings
from relay.fitting.fit import FREE, Fit, fit

PREFERRED = ("cuda", "xpu", "mps")
"""Devices in the order in which they are tried where none is named; the CPU is there always."""

CHOSEN = (*FREE, "microbatches")
"""The options that are chosen for the machine, as far as they are not given."""


Devices = str | tuple[str, ...]
"""One device by its name, or several that work together."""


def choose_device(given: Devices | None) -> tuple[Devices, str]:
    """The device's name and what it is: the one given (or several), or the best that is here."""
    if given is not None:
        return given, ""
    for name in PREFERRED:
        try:
            device = registry.open(name)
        except HalError:
            continue
        found = device.info
        device.close()
        return found.name, found.description
    device = registry.open("cpu")
    description = device.info.description
    device.close()
    return "cpu", description


def is_described(device: Devices) -> bool:
    """Whether a name is of a described device, which need not be here."""
    if isinstance(device, tuple):
        return any(map(is_described, device))
    return device.endswith((".json", ".toml")) or device in presets("device")


def choose_precision(given: str | None, device: Devices, dtype: torch.dtype) -> str:
    """The precision: the one given, or bf16 for a folder in half precision on an accelerator, else fp32."""
    if given is not None:
        return given
    device = device[0] if isinstance(device, tuple) else device
    if is_described(device):
        return "bf16" if dtype in HALVES and machine(device).device.computes("bf16") else "fp32"
    opened = registry.open(device)
    info = opened.info
    opened.close()
    return "bf16" if dtype in HALVES and HOST_CORES not in info.tags and torch.bfloat16 in info.compute else "fp32"


def fit_options(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    settings: Settings,
    optimizer: Any,
    checkpoints: Path,
    free: bool,
) -> Fit:
    """The plan of a run. Without `free` nothing is chosen, and the plan is of the options as they are."""
    trainer = settings.trainer
    kept = {
        name: value
        for name, value in trainer.items()
        if name not in ("device", "capacity", "host_memory")
        and (name in settings.given or not free or name not in CHOSEN)
    }
    resume = newest(checkpoints) if settings.own.resume and free else None
    return fit(
        model, batch, device=trainer["device"], capacity=trainer["capacity"], host_memory=trainer["host_memory"],
        resume=resume, optimizer=optimizer, **kept,
    )  # fmt: skip


def chosen_options(found: Fit, settings: Settings) -> dict[str, Any]:
    """The options of the trainer with those that the plan chose."""
    return settings.trainer | {name: getattr(found.expected.run, name) for name in CHOSEN if name not in settings.given}


def dry_run(found: Fit, steps: int) -> dict[str, Any]:
    """What a run would take: memory, plan, time, energy, and the disk of a checkpoint; as text in `report`."""
    expected = found.expected
    stored = sum(size for state, _, size in expected.memory.host if not state.startswith("gradients"))
    tokens = expected.run.tokens * steps
    energy = expected.kilowatt_hours(tokens)
    seconds = expected.step_time.scaled(steps)
    lines = [
        str(expected),
        f"run             {steps:,} steps: {seconds.text(format_seconds)}, {energy.text('{:.3g}'.format)} kWh",
        f"checkpoint      {format_size(stored)} of disk each",
    ]
    return {
        "dry_run": True,
        "report": "\n".join(lines),
        "steps": steps,
        "expected_seconds": seconds.as_json(),
        "expected_kilowatt_hours": energy.as_json(),
        "checkpoint_bytes": stored,
        "device_bytes": expected.memory.device_total,
        "host_bytes": expected.memory.host_total,
        "plan": {name: getattr(expected.run, name) for name in CHOSEN},
    }
