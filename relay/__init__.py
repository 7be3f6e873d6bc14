"""Relay: train networks far larger than the accelerator's memory by relaying their layers through it.

The public names. Everything else is reached through them.
"""

from __future__ import annotations

from hal.device import Device, Probe
from hal.registry import devices, open
from relay.eps.optimizers import AdamW
from relay.errors import BatchError, CaptureError, InconsistentState, NonFiniteLoss, PartitionError, RelayError
from relay.metrics import Metrics
from relay.trainer import Trainer

__all__ = [
    "AdamW",
    "BatchError",
    "CaptureError",
    "Device",
    "InconsistentState",
    "Metrics",
    "NonFiniteLoss",
    "PartitionError",
    "Probe",
    "RelayError",
    "Trainer",
    "devices",
    "open",
]
