"""The machine that options are fitted to: a preset, a calibration, or this machine as far as it is known.

Nothing is measured here (`relay calibrate` does). Invariant: whatever is assumed is in the notes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hal import registry
from hal.device import DeviceInfo
from hal.spec import Machine, load, machine, presets, spec_of
from hal.spec.units import format_size
from relay.simulation.calibrate import host_memory_size

SYSTEM = 8 * 2**30
"""Bytes of host memory that are left to the system and to other programs where no host_memory= is given."""

CPU = {
    "kind": "device", "name": "cpu", "title": "the CPU of this machine", "unified": True, "host_cores": True,
    "link": "unified", "host": "laptop", "memory": "1TB", "bandwidth": "20GB/s", "peak_fp32": "200GFLOPS",
    "peak_fp16": "100GFLOPS", "peak_bf16": "100GFLOPS", "granularity": "1B", "power_idle": "20W", "power_busy": "65W",
}  # fmt: skip
"""What a CPU is taken for that was not calibrated."""


@dataclass(frozen=True)
class FittedMachine:
    """A machine, the bytes of its host that a run may take, and what was assumed about it."""

    machine: Machine
    host_memory: int
    notes: tuple[str, ...] = ()


def machine_for(device: str | Machine, calibration: str | None = None) -> FittedMachine:
    """The machine with a device: a preset or a file by name, a `sim` device, or a device that is here.

    A device that is here is described by the `calibration`, by the file that `relay calibrate` writes for it in the
    current folder, or else by the preset whose name its own resembles. Raises SpecError and Unavailable.
    """
    if isinstance(device, Machine):
        return FittedMachine(device, _left(int(device.host["memory"])))
    kind, _, selector = device.partition(":")
    if kind == "sim":
        device = selector.partition(",")[0] or "generic"
    if calibration is None and (device.endswith((".json", ".toml")) or device in presets("device")):
        found = machine(device)
        return FittedMachine(found, _left(int(found.host["memory"])))
    opened = registry.open(device)
    info = opened.info
    opened.close()
    written = f"{device.replace(':', '-')}.json"
    notes: list[str] = []
    if calibration is None and Path(written).is_file():
        calibration = written
        notes.append(f"{device} is described by {written}, which `relay calibrate` wrote.")
    if calibration is not None:
        described = machine(calibration)
    else:
        described, assumed = _like(info)
        notes.append(f"{assumed} `relay calibrate --device {device}` measures it.")
    if info.memory is not None:
        described = described.with_values("device", memory=float(info.memory))
    return FittedMachine(described, _left(host_memory_size()), tuple(notes))


def _left(size: int) -> int:
    """What a run may take of that many bytes of host memory."""
    return size - min(SYSTEM, size // 8)


def _like(info: DeviceInfo) -> tuple[Machine, str]:
    """The description of a device that was not calibrated, and what was assumed."""
    if info.unified:
        device = spec_of(CPU, "the assumed CPU")
        link, host = load("link", "unified"), load("host", "laptop")
        return Machine(device, link, host), f"{info.description} was not calibrated: its speeds are assumed."
    words = set(re.findall(r"[a-z]+\d+[a-z]*|\d{3,}[a-z]*", info.description.lower()))
    scores = {
        name: (
            len(words & set(name.split("-"))),
            -abs(spec["memory"] - (info.memory or spec["memory"])),  # among variants the one with as much memory
        )
        for name, spec in presets("device").items()
    }
    best = max(scores, key=scores.__getitem__)
    if not scores[best][0]:
        memory = f" with {format_size(info.memory)}" if info.memory else ""
        return machine("generic"), f"No preset is like {info.description}: it is taken for a generic device{memory}."
    return machine(best), f"{info.description} is taken for the preset {best}."
