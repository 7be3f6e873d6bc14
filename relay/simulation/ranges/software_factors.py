"""How fast software of each kind computes, as a factor on the simulator's compute, with its spread.

The simulator takes every product at the rate that a preset's device reaches in large products, and knows nobody's
kernels. The factors here are what published rows give for software of a kind, as docs/validation.md works them out.
Nothing is simulated here.

Invariant: the high end of a factor is at most twice its low end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hal.spec import SOFTWARE, Machine, Spec
from relay.simulation.ranges.ranged import Ranged


@dataclass(frozen=True)
class SoftwareFactor:
    """Factors on the speed of the device's compute, and of all else (links, host), and what they follow from."""

    compute: Ranged
    others: Ranged
    source: str


CALIBRATED = "calibrated"
"""How the source of a figure begins that `relay calibrate` measured; also the kind of software of such a machine."""

_LINKS_AND_HOST = Ranged(0.84, 1.0, 1.18)
"""Adam on two Xeon 8168 at three sizes (ZeRO-Offload, table 4) is up to 15.6 % off either way."""

FACTORS: Mapping[str, SoftwareFactor] = {
    "eager": SoftwareFactor(
        Ranged(0.55, 0.89, 1.10), _LINKS_AND_HOST,
        "58 published rows: MPT on A100-40GB, and BERT-Large, ZeRO-Offload and L2L on V100",
    ),
    "compiled": SoftwareFactor(
        Ranged(0.55, 0.89, 1.10), _LINKS_AND_HOST,
        "assumed equal to eager: no published row is of compiled software",
    ),
    "fused": SoftwareFactor(
        Ranged(0.72, 1.01, 1.44), _LINKS_AND_HOST,
        "6 published rows: llm.c on A100, and Llama-8B streamed by ml_dataflow",
    ),
    "calibrated": SoftwareFactor(
        Ranged(0.89, 1.0, 1.12), Ranged(0.89, 1.0, 1.12),
        "this relay's steps on the CPU device: 18 shapes, worst error 10.7 %",
    ),
}  # fmt: skip
"""By kind of software; "calibrated" is this relay on a device that `relay calibrate` measured."""


def decisive(machine: Machine, precision: str) -> list[tuple[Spec, str]]:
    """The figures that decide the speed of a run: the part of the machine, and the name of its figure."""
    devices = [(one.device, name) for one in machine.each for name in (f"achieved_{precision}", "bandwidth_achieved")]
    links = [(one.link, "down") for one in machine.each]
    return [*devices, *links, (machine.host, "optimizer_bandwidth")]


def is_calibrated(machine: Machine, precision: str) -> bool:
    """Whether `relay calibrate` measured every figure that decides the speed: of devices, links and host."""
    cells = [spec.cells.get(name) for spec, name in decisive(machine, precision)]
    return all(cell is not None and cell.source.startswith(CALIBRATED) for cell in cells)


def uncalibrated_kind(machine: Machine) -> str:
    """The kind of software, were nothing measured: the slowest whose share of pointwise traffic is the machine's."""
    at_least = [kind for kind, share in SOFTWARE.items() if share >= machine.pointwise]
    return min(at_least, key=lambda kind: SOFTWARE[kind], default="eager")


def kind_of(machine: Machine, precision: str) -> str:
    """The kind of software on a machine: "calibrated" where `is_calibrated`, else the `uncalibrated_kind`."""
    return CALIBRATED if is_calibrated(machine, precision) else uncalibrated_kind(machine)


def factor_of(machine: Machine, precision: str) -> SoftwareFactor:
    """The factor of the software on a machine."""
    return FACTORS[kind_of(machine, precision)]


def step_time(seconds: float, computing: float, factor: SoftwareFactor) -> Ranged:
    """Seconds of a step that was simulated to take `seconds`, of which the device computes for `computing`.

    Compute takes as much longer as its software is slower, and the time in which compute waits as much longer as links
    and host are slower. (Slower compute may also hide more transfers, so the slow end is on the safe side.)
    """
    waiting = max(0.0, seconds - computing)
    compute, others = factor.compute.inverse(computing), factor.others.inverse(waiting)
    return Ranged(compute.low + others.low, compute.middle + others.middle, compute.high + others.high)
