"""Machines of three numbers, simulated: what their runs take is a formula that fits on a line.

`run` simulates one transformer on such a machine; `layer_flops` and `head_flops` are the arithmetic of it by hand, for
the closed forms that a run is compared with. Nothing here reads what the simulator computed.
"""

from typing import Any

import relay
from hal import spec
from relay.simulation.described.transformer_shape import ModelShape
from relay.simulation.simulate import Simulation

FAST = 1e30
HIDDEN, LAYERS, VOCABULARY, SEQUENCE = 1024, 24, 512, 128
MATRICES = 12 * HIDDEN * HIDDEN
LAYER = MATRICES + 13 * HIDDEN
BYTES_OF_AN_UPDATE = 4 + 4 + 8 + 16  # fp32: norm, gradient, weight both ways, two moments both ways


def ideal(flops: float = 1e14, link: float = 1e10, host: float = FAST) -> spec.Machine:
    """A machine of three numbers: FLOP/s, link bytes a second each way, bytes a second of the optimizer."""
    machine = spec.machine("generic")
    machine = machine.with_values(
        "device", bandwidth_achieved=FAST, launch=0.0, ramp=0.0, attention=1.0, achieved_fp32=flops, memory=1e13
    )
    machine = machine.with_values("link", down=link, up=link, both=2 * link, latency=0.0)
    return machine.with_values("host", bandwidth_achieved=FAST, optimizer_bandwidth=host, task=0.0, memory=1e15)


def run(machine: spec.Machine, batch: int = 32, microbatches: int = 4, layers: int = LAYERS, **more: Any) -> Simulation:
    shape = ModelShape(layers, HIDDEN, 8, VOCABULARY)
    options = {"seq": SEQUENCE, "precision": "fp32", "state_dtype": "fp32", **more}
    return relay.simulate(shape, device=machine, batch=batch, microbatches=microbatches, **options)


def layer_flops(tokens: int) -> tuple[float, float]:
    """Forward, and recompute (without the last product, which no gradient needs) with backward."""
    attention = 4 * SEQUENCE * HIDDEN
    forward = (2 * MATRICES + attention) * tokens
    backward = (2 * (MATRICES - 4 * HIDDEN * HIDDEN) + 4 * MATRICES + 3.5 * attention) * tokens
    return forward, backward


def head_flops(tokens: int) -> float:
    return 6.0 * HIDDEN * VOCABULARY * tokens
