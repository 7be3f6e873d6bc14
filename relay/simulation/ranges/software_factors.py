"""How fast software of each kind computes, as a factor on the simulator's compute, with its spread.

The simulator takes every product at the rate that a preset's device reaches in large products, and knows nobody's
kernels. The factors here are what published rows give for software of a kind, as docs/validation.md works them out.
Nothing is simulated here.

Invariant: the high end of a factor is at most twice its low end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hal.spec import SOFTWARE, Machine
from relay.simulation.ranges.ranged import Ranged


@dataclass(frozen=True)
class SoftwareFactor:
    """Factors on the speed of the device's compute, and of all else (links, host), and what they follow from."""

    compute: Ranged
    others: Ranged
    source: str


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


def kind_of(machine: Machine, precision: str) -> str:
    """The kind of software on a machine: "calibrated" where the rates of every device were measured here.

    Otherwise the slowest kind whose share of pointwise traffic is at least the machine's.
    """
    decisive = (f"achieved_{precision}", "bandwidth_achieved")
    cells = [one.device.cells.get(name) for one in machine.each for name in decisive]
    if all(cell is not None and cell.source.startswith("calibrated") for cell in cells):
        return "calibrated"
    at_least = [kind for kind, share in SOFTWARE.items() if share >= machine.pointwise]
    return min(at_least, key=lambda kind: SOFTWARE[kind], default="eager")


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
