"""Relay: train networks far larger than the accelerator's memory by relaying their layers through it.

Here are the public names only, each imported on first use: importing torch takes seconds, and `relay --help` does not
need it. Invariant: `import relay` fails at once where another `hal` or `backends` would be imported in place of ours.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal.device import Device, Probe
    from hal.registry import devices
    from relay import hf
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
        VerificationError,
    )
    from relay.fitting.fit import Fit, fit
    from relay.metrics import Metrics
    from relay.optim.adafactor import Adafactor
    from relay.optim.muon import Muon
    from relay.optim.optimizers import LAMB, SGD, Adam, AdamW, Lion
    from relay.runtime.trace import Trace
    from relay.simulation.plan import NoFeasiblePlan, Plan, plan
    from relay.simulation.simulate import DoesNotFit, Simulation, simulate
    from relay.trainer import Trainer
    from relay.verification.report import Verification

_HOMES = {
    "Adafactor": "relay.optim.adafactor",
    "Adam": "relay.optim.optimizers",
    "AdamW": "relay.optim.optimizers",
    "LAMB": "relay.optim.optimizers",
    "Lion": "relay.optim.optimizers",
    "Muon": "relay.optim.muon",
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
    "Fit": "relay.fitting.fit",
    "GradientOverflow": "relay.errors",
    "InconsistentState": "relay.errors",
    "Metrics": "relay.metrics",
    "NonFiniteLoss": "relay.errors",
    "PartitionError": "relay.errors",
    "Probe": "hal.device",
    "RelayError": "relay.errors",
    "Simulation": "relay.simulation.simulate",
    "StandingGradient": "relay.errors",
    "Trainer": "relay.trainer",
    "Verification": "relay.verification.report",
    "VerificationError": "relay.errors",
    "devices": "hal.registry",
    "fit": "relay.fitting.fit",
    "NoFeasiblePlan": "relay.simulation.plan",
    "Plan": "relay.simulation.plan",
    "plan": "relay.simulation.plan",
    "simulate": "relay.simulation.simulate",
}

__all__ = [
    "LAMB",
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "BatchError",
    "Buckets",
    "CaptureError",
    "CheckpointError",
    "Checkpoints",
    "Device",
    "DoesNotFit",
    "Fit",
    "GradientOverflow",
    "InconsistentState",
    "Lion",
    "LossScaleExhausted",
    "Metrics",
    "ModelChanged",
    "Muon",
    "NoFeasiblePlan",
    "NonFiniteLoss",
    "PartitionError",
    "Plan",
    "Probe",
    "RelayError",
    "ResumableBatches",
    "ShuffleSampler",
    "Simulation",
    "StandingGradient",
    "Terminated",
    "Trace",
    "Trainer",
    "Verification",
    "VerificationError",
    "devices",
    "fit",
    "hf",
    "plan",
    "simulate",
]


def _refuse_hidden_packages() -> None:
    """Raise ImportError where a user's own `hal` or `backends` comes before ours on the import path."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for package in ("hal", "backends"):
        ours = os.path.join(root, package)
        spec = find_spec(package)
        if spec is None or not os.path.isdir(ours):
            continue
        if spec.submodule_search_locations is not None:
            found = next(iter(spec.submodule_search_locations))
        else:
            found = spec.origin or package
        if not os.path.exists(found) or not os.path.samefile(found, ours):
            raise ImportError(
                f"Relay's own package {package!r} is hidden by {found!r}, which comes first on Python's import path. "
                "Rename it, or start Python from another folder."
            )


_refuse_hidden_packages()


def __getattr__(name: str) -> Any:
    if name == "hf":  # a package of its own, whose libraries are an extra
        return import_module("relay.hf")
    if name not in _HOMES:
        raise AttributeError(f"module 'relay' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
