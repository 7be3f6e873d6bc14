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
    from relay.eps.optimizers import LAMB, SGD, Adam, AdamW, Lion
    from relay.errors import (
        BatchError,
        CaptureError,
        InconsistentState,
        LossScaleExhausted,
        ModelChanged,
        NonFiniteLoss,
        PartitionError,
        RelayError,
    )
    from relay.metrics import Metrics
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
    "CaptureError": "relay.errors",
    "Device": "hal.device",
    "InconsistentState": "relay.errors",
    "Metrics": "relay.metrics",
    "NonFiniteLoss": "relay.errors",
    "PartitionError": "relay.errors",
    "Probe": "hal.device",
    "RelayError": "relay.errors",
    "Trainer": "relay.trainer",
    "devices": "hal.registry",
    "open": "hal.registry",
}

__all__ = [
    "LAMB",
    "SGD",
    "Adam",
    "AdamW",
    "BatchError",
    "Buckets",
    "CaptureError",
    "Device",
    "InconsistentState",
    "Lion",
    "LossScaleExhausted",
    "Metrics",
    "ModelChanged",
    "NonFiniteLoss",
    "PartitionError",
    "Probe",
    "RelayError",
    "Trace",
    "Trainer",
    "devices",
    "open",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'relay' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
