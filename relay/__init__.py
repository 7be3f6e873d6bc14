"""Relay: train networks far larger than the accelerator's memory by relaying their layers through it.

The public names. Everything else is reached through them. They are looked up on first use: importing torch takes
seconds, and `relay --help` needs none of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal.device import Device, Probe
    from hal.registry import devices, open
    from relay.buckets import Buckets
    from relay.checkpoints import Checkpoints, Terminated
    from relay.eps.optimizers import LAMB, SGD, Adam, AdamW, Lion
    from relay.errors import (
        BatchError,
        CaptureError,
        CheckpointError,
        GradientOverflow,
        InconsistentState,
        LossScaleExhausted,
        ModelChanged,
        NonFiniteLoss,
        PartitionError,
        RelayError,
    )
    from relay.loading import Batches, Shuffle
    from relay.metrics import Metrics
    from relay.planning import NoPlan, Plan, plan
    from relay.simulation import DoesNotFit, Simulation, simulate
    from relay.trace import Trace
    from relay.trainer import Trainer

_HOMES = {
    "Adam": "relay.eps.optimizers",
    "AdamW": "relay.eps.optimizers",
    "LAMB": "relay.eps.optimizers",
    "Lion": "relay.eps.optimizers",
    "SGD": "relay.eps.optimizers",
    "Trace": "relay.trace",
    "LossScaleExhausted": "relay.errors",
    "ModelChanged": "relay.errors",
    "BatchError": "relay.errors",
    "Buckets": "relay.buckets",
    "Batches": "relay.loading",
    "CheckpointError": "relay.errors",
    "Checkpoints": "relay.checkpoints",
    "Shuffle": "relay.loading",
    "Terminated": "relay.checkpoints",
    "CaptureError": "relay.errors",
    "Device": "hal.device",
    "DoesNotFit": "relay.simulation",
    "GradientOverflow": "relay.errors",
    "InconsistentState": "relay.errors",
    "Metrics": "relay.metrics",
    "NonFiniteLoss": "relay.errors",
    "PartitionError": "relay.errors",
    "Probe": "hal.device",
    "RelayError": "relay.errors",
    "Simulation": "relay.simulation",
    "Trainer": "relay.trainer",
    "devices": "hal.registry",
    "NoPlan": "relay.planning",
    "Plan": "relay.planning",
    "open": "hal.registry",
    "plan": "relay.planning",
    "simulate": "relay.simulation",
}

__all__ = [
    "LAMB",
    "SGD",
    "Adam",
    "AdamW",
    "BatchError",
    "Batches",
    "Buckets",
    "CaptureError",
    "CheckpointError",
    "Checkpoints",
    "Device",
    "DoesNotFit",
    "GradientOverflow",
    "InconsistentState",
    "Lion",
    "LossScaleExhausted",
    "Metrics",
    "ModelChanged",
    "NoPlan",
    "NonFiniteLoss",
    "PartitionError",
    "Plan",
    "Probe",
    "RelayError",
    "Shuffle",
    "Simulation",
    "Terminated",
    "Trace",
    "Trainer",
    "devices",
    "open",
    "plan",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'relay' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
