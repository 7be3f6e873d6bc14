"""Energy is one model of power: what a trace draws over the step is what the report says, and both are watts times
seconds."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import relay
from hal import spec
from relay.simulation.report import write_trace
from tests.support.ideal_machines import ideal, run

CASES: list[dict[str, Any]] = [
    {"model": "gpt2", "device": "rtx-4090", "stash": "host"},
    {"model": "gpt2", "device": "t4", "precision": "fp16", "microbatches": 2},  # updates of one step end in the next
    {"model": "gpt2", "device": "m3-max-40c"},
    {"layers": 12, "hidden": 1024, "device": "v100-sxm2-16gb", "loss_scale": "fixed", "batch": 2, "slots": 1},
]


def union(intervals: list[tuple[float, float]]) -> float:
    """Time in which at least one interval holds."""
    total, reached = 0.0, 0.0
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@pytest.mark.parametrize("options", CASES, ids=lambda options: str(options["device"]))
@pytest.mark.sample("m3-max-40c")
def test_the_watts_of_a_trace_over_the_step_are_the_joules_of_the_report(
    options: dict[str, Any], tmp_path: Path
) -> None:
    found = relay.simulate(**options, record=True)
    write_trace(found, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    watts = [(event["ts"] / 1e6, event["args"]["watts"]) for event in events if event["name"] == "watts"]
    assert watts[0][0] == 0
    assert watts[-1][0] == pytest.approx(found.step_seconds)
    drawn = sum((later - at) * power for (at, power), (later, _) in itertools.pairwise(watts))
    assert drawn == pytest.approx(found.simulated_joules, rel=1e-9)
    # And by hand, from the calls that the trace shows.
    lanes: dict[int, list[tuple[float, float]]] = {0: [], 1: [], 2: [], 3: []}
    for event in events:
        if event["ph"] == "X":
            assert -1e-3 <= event["ts"] <= event["ts"] + event["dur"] <= found.step_seconds * 1e6 + 1e-3
            lanes[event["tid"]].append((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    device, host = found.machine.device, found.machine.host
    by_hand = (device["power_idle"] + host["power_idle"]) * found.step_seconds
    by_hand += (device["power_busy"] - device["power_idle"]) * union(lanes[2])
    by_hand += (host["power_busy"] - host["power_idle"]) * union(lanes[0] + lanes[1] + lanes[3])
    assert drawn == pytest.approx(by_hand, rel=1e-6)


def test_what_is_spent_while_compute_waits_is_told_by_lane() -> None:
    powers = {"power_idle": 10.0, "power_busy": 100.0}
    machine = ideal(link=1e9).with_values("device", **powers).with_values("host", **powers)
    found = run(machine)  # all the time something crosses the link, which compute waits for
    still = found.step_seconds - found.timeline.busy["compute"]
    assert found.timeline.beside == pytest.approx(found.step_seconds, rel=0.01)
    total = found.simulated_joules
    assert found.wasted_energy == pytest.approx(still * (10 + 100) / total, rel=0.01)


def test_the_worked_case_takes_about_three_and_a_half_joules_a_token() -> None:
    """300 W of device and 300 W of host at 175 tokens a second: 3.4 J, and about 950 kWh for 1e9 tokens."""
    update = 4 + 4 + 8 + 2 + 16
    machine = spec.machine("v100-sxm2-16gb")
    machine = machine.with_values(
        "device", achieved_fp16=70e12, launch=0.0, ramp=0.0, attention=1.0, power_idle=300.0, power_busy=300.0
    )
    machine = machine.with_values("device", bandwidth_achieved=1e30)
    machine = machine.with_values("host", optimizer_bandwidth=3.9e9 * update, bandwidth_achieved=1e30, memory=1e12)
    machine = machine.with_values("host", power_idle=300.0, power_busy=300.0)
    found = relay.simulate(
        layers=62, hidden=8192, device=machine, precision="fp16", loss_scale="fixed", stash="host", microbatches=8
    )
    assert found.simulated_joules / found.run.tokens == pytest.approx(3.4, rel=0.05)
    assert found.simulated_joules / found.run.tokens * 1e9 / 3.6e6 == pytest.approx(950, rel=0.05)
