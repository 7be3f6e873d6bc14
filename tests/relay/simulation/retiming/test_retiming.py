"""The calls of a simulated step, timed again for other rates, take what simulating the step anew gives."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

import relay
from hal.spec import Machine, machine
from relay.simulation.described.transformer_shape import ModelShape
from relay.simulation.simulate import LAUNCH, SENSITIVE
from relay.simulation.simulated_step import RunShape, SimulatedRun

SHAPE = ModelShape(4, 256, 4, vocabulary=1024)
RUNS: dict[str, dict[str, Any]] = {
    "stash on the device": {"batch": 4, "microbatches": 4},
    "stash on the host, clipped": {"batch": 6, "microbatches": 4, "stash": "host", "clip_grad_norm": 1.0},
    "one slot, nothing recomputed": {"batch": 2, "microbatches": 2, "slots": 1, "recompute": False},
    "resident layers, a dynamic scale": {
        "batch": 4, "microbatches": 2, "resident_layers": 2, "loss_scale": "dynamic"
    },
    "head over chunks": {"batch": 2, "microbatches": 2, "head_chunk_tokens": 64},
}
MACHINES = {
    "one device": lambda: machine("rtx-4090"),
    "three behind one link": lambda: several(3, one_link=True),
    "a device in host memory": lambda: machine("m3-max-40c"),
}
RATES = {
    "device": ("achieved_fp32", "achieved_fp16", "achieved_bf16", "bandwidth_achieved", *LAUNCH),
    "link": ("down", "up", "both"),
    "host": ("bandwidth_achieved", "optimizer_bandwidth"),
}


def several(count: int, one_link: bool) -> Machine:
    one = machine("rtx-4090")
    return replace(one, others=(one,) * (count - 1), one_link=one_link)


def drawn(described: Machine, seed: int) -> Machine:
    """The same machine with other rates: up to four times as fast or as slow."""
    generator = random.Random(seed)
    for part, names in RATES.items():
        spec = getattr(described, part)
        known = [name for name in names if not name.startswith("achieved") or spec.computes(name[9:])]
        described = described.scaled(part, **{name: 4 ** generator.uniform(-1, 1) for name in known})
    return described


def seconds_of(run: RunShape, described: Machine) -> float:
    prepared = SimulatedRun(SHAPE, run, described)
    try:
        return prepared.step().timeline.now
    finally:
        prepared.close()


@pytest.mark.sample(
    "stash on the device-one device-0",
    "stash on the host, clipped-a device in host memory-1",
    "head over chunks-three behind one link-2",
)
@pytest.mark.parametrize("seed", range(7))
@pytest.mark.parametrize("place", MACHINES)
@pytest.mark.parametrize("options", RUNS)
def test_calls_timed_again_take_what_a_new_simulation_takes(options: str, place: str, seed: int) -> None:
    given = {"seq": 128, "precision": "fp16", "loss_scale": "fixed", "optimizer": relay.AdamW(), **RUNS[options]}
    run, described = RunShape(**given), MACHINES[place]()
    other = drawn(described, seed)
    prepared = SimulatedRun(SHAPE, run, described)
    prepared.keep_calls()
    first = prepared.step().timeline.now
    assert prepared.retimed(described) == pytest.approx(first, rel=1e-12)
    assert prepared.retimed(other) == pytest.approx(seconds_of(run, other), rel=0.01)
    prepared.close()


def test_what_a_faster_part_saves_is_what_simulating_it_saves() -> None:
    given: dict[str, Any] = {"seq": 128, "batch": 4, "precision": "bf16", "stash": "host"}
    described = machine("rtx-3090")
    found = relay.simulate(SHAPE, device=described, sensitivity=True, **given)
    assert set(found.sensitivity) == {*SENSITIVE, "launch"}
    part, names = SENSITIVE["device memory bandwidth"]
    faster = relay.simulate(SHAPE, device=described.scaled(part, **dict.fromkeys(names, 1.1)), **given)
    saved = 1 - faster.tokens_per_second**-1 * found.tokens_per_second
    assert found.sensitivity["device memory bandwidth"] == pytest.approx(saved, abs=1e-9)
