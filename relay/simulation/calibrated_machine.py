"""A machine whose rates are those that `relay calibrate` measured: the option `calibration` of simulations.

The device keeps what a calibration does not measure (its peaks, watts and memory); link and host are those measured.
Nothing is measured here. Invariant: a calibration of another device, or of another precision, is refused.
"""

from __future__ import annotations

from dataclasses import replace

from hal.spec import Machine, SpecError, load
from relay.simulation.ranges.software_factors import CALIBRATED, is_calibrated

_KEPT = ("memory", "bandwidth", "granularity")
"""What a calibration holds of a device that its description knows better."""

_UNKNOWN_MEMORY = 2**40
"""The memory that `relay calibrate` writes for a device that gives none."""

_OTHER_MEMORY = 1.25


def calibrated(machine: Machine, file: str) -> Machine:
    """The machine with the rates in a calibration. Raises SpecError for the calibration of another device."""
    measured = load("device", file)
    device = machine.device
    if measured.unified is not device.unified:
        memory = "host memory" if measured.unified else "a memory of its own"
        raise SpecError(f"{file} measured a device that works in {memory}, and {device.title} does not.")
    memories = sorted((measured["memory"], device["memory"]))
    if measured["memory"] != _UNKNOWN_MEMORY and memories[1] > _OTHER_MEMORY * memories[0]:
        raise SpecError(
            f"{file} measured a device with {measured['memory']:.3g} bytes of memory, and {device.title} has "
            f"{device['memory']:.3g}. Give the calibration of this device."
        )
    rates = {
        name: cell
        for name, cell in measured.cells.items()
        if name not in _KEPT and cell.source.startswith(CALIBRATED)
    }  # fmt: skip
    for name, cell in rates.items():
        peak = "bandwidth" if name == "bandwidth_achieved" else name.replace("achieved", "peak")
        if peak != name and device.has(peak) and cell.value > device[peak]:
            raise SpecError(
                f"{file} measured {name} of {cell.value:.3g}, above the {peak} of {device.title}, {device[peak]:.3g}. "
                "Give the calibration of this device."
            )
    return replace(
        machine,
        device=replace(device, cells={**device.cells, **rates}),
        link=load("link", file),
        host=load("host", file),
        others=tuple(calibrated(other, file) for other in machine.others),
    )


def check_measured(machine: Machine, precision: str, file: str) -> None:
    """Raise SpecError where a calibration does not hold the rates that decide the speed in that precision."""
    if not is_calibrated(machine, precision):
        measured = load("device", file)
        here = [kind for kind in ("fp32", "fp16", "bf16") if measured.has(f"achieved_{kind}")]
        raise SpecError(
            f"{file} measured products in {', '.join(here)}, and this run computes in {precision}. Give --precision "
            f"{here[0] if here else 'fp32'}, or measure the device with `relay calibrate --precision {precision}`."
        )
