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
    from relay.checkpoint_manager import Checkpoints, Terminated
    from relay.data.buckets import Buckets
    from relay.data.resumable import ResumableBatches, ShuffleSampler
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
    from relay.metrics import Metrics
    from relay.optim.optimizers import LAMB, SGD, Adam, AdamW, Lion
    from relay.runtime.trace import Trace
    from relay.simulation.plan import NoFeasiblePlan, Plan, plan
    from relay.simulation.simulate import DoesNotFit, Simulation, simulate
    from relay.trainer import Trainer

_HOMES = {
    "Adam": "relay.optim.optimizers",
    "AdamW": "relay.optim.optimizers",
    "LAMB": "relay.optim.optimizers",
    "Lion": "relay.optim.optimizers",
    "SGD": "relay.optim.optimizers",
    "Trace": "relay.runtime.trace",
    "LossScaleExhausted": "relay.errors",
    "ModelChanged": "relay.errors",
    "BatchError": "relay.errors",
    "Buckets": "relay.data.buckets",
    "ResumableBatches": "relay.data.resumable",
    "CheckpointError": "relay.errors",
    "Checkpoints": "relay.checkpoint_manager",
    "ShuffleSampler": "relay.data.resumable",
    "Terminated": "relay.checkpoint_manager",
    "CaptureError": "relay.errors",
    "Device": "hal.device",
    "DoesNotFit": "relay.simulation.simulate",
    "GradientOverflow": "relay.errors",
    "InconsistentState": "relay.errors",
    "Metrics": "relay.metrics",
    "NonFiniteLoss": "relay.errors",
    "PartitionError": "relay.errors",
    "Probe": "hal.device",
    "RelayError": "relay.errors",
    "Simulation": "relay.simulation.simulate",
    "Trainer": "relay.trainer",
    "devices": "hal.registry",
    "NoFeasiblePlan": "relay.simulation.plan",
    "Plan": "relay.simulation.plan",
    "open": "hal.registry",
    "plan": "relay.simulation.plan",
    "simulate": "relay.simulation.simulate",
}

__all__ = [
    "LAMB",
    "SGD",
    "Adam",
    "AdamW",
    "BatchError",
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
    "NoFeasiblePlan",
    "NonFiniteLoss",
    "PartitionError",
    "Plan",
    "Probe",
    "RelayError",
    "ResumableBatches",
    "ShuffleSampler",
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
