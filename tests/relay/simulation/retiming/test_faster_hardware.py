"""Faster hardware is never slower, for each rate of every device that is described.

Where calls share nothing this holds exactly. Where they share host memory or both directions of a link, a faster
direction takes more of it and may hold up the other, which is on the critical path: anomalies of list scheduling
(R. L. Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17, 1969), of less than one per cent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import relay
from hal.spec import Machine, machine, presets
from relay.simulation.described.transformer_shape import ModelShape
from relay.simulation.simulate import default_precision
from relay.simulation.simulated_step import RunShape, SimulatedRun

SHAPE = ModelShape(6, 512, 8, vocabulary=4096)
RATES = {
    "device": ("achieved_fp32", "achieved_fp16", "achieved_bf16", "bandwidth_achieved"),
    "link": ("down", "up", "both"),
    "host": ("bandwidth_achieved", "optimizer_bandwidth"),
}
DELAYS = {"device": ("launch", "call", "ramp"), "link": ("latency",), "host": ("task",)}
RUNS: tuple[dict[str, Any], ...] = (
    {"stash": "host", "clip_grad_norm": 1.0},
    {"stash": "device"},
    {"stash": "host", "slots": 3, "state_dtype": "int8"},
)
PLENTY = 1e30
FEW = ("rtx-4090", "v100-sxm2-16gb")


def faster(described: Machine) -> Iterator[tuple[str, Machine]]:
    """The machine with one figure better, for each figure."""
    for factor in (1.02, 1.1, 1.5, 3.0):
        for figures, times in ((RATES, factor), (DELAYS, 1 / factor)):
            for part, names in figures.items():
                spec = getattr(described, part)
                for name in names:
                    if not name.startswith("achieved") or spec.computes(name[9:]):
                        yield f"{name} x {times:.2f}", described.scaled(part, **{name: times})


def slowdowns(described: Machine) -> dict[str, float]:
    """The runs that a better figure makes slower, and by which share."""
    precision = default_precision(described)
    found = {}
    for options in RUNS:
        run = RunShape(
            seq=256, batch=6, microbatches=4, precision=precision, loss_scale="fixed", optimizer=relay.AdamW(),
            **options,
        )  # fmt: skip
        prepared = SimulatedRun(SHAPE, run, described)
        prepared.keep_calls()
        seconds = prepared.step().timeline.now
        for what, better in faster(described):
            slower = prepared.retimed(better) / seconds - 1
            if slower > 1e-9:
                found[f"{options}, {what}"] = slower
        prepared.close()
    return found


@pytest.mark.sample(*FEW)
@pytest.mark.parametrize("name", presets("device"))
def test_where_calls_share_nothing_a_better_figure_slows_no_run(name: str) -> None:
    described = machine(name).with_values("link", both=PLENTY)
    kept = described.host["optimizer_bandwidth"]
    assert slowdowns(described.with_values("host", bandwidth_achieved=PLENTY, optimizer_bandwidth=kept)) == {}


@pytest.mark.sample(*FEW)
@pytest.mark.parametrize("name", presets("device"))
def test_where_calls_share_a_better_figure_slows_a_run_by_less_than_a_hundredth(name: str) -> None:
    assert max(slowdowns(machine(name)).values(), default=0.0) < 0.01
