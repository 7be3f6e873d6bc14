"""The speed on several hosts: the simulation with one, the bytes of an exchange by hand, and what slow networks do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from relay.cli import main
from relay.simulation.hosts.scaling_curve import ScalingCurve, scaling_curve
from relay.simulation.simulate import Simulation, simulate

SMALL: dict[str, Any] = {"layers": 4, "hidden": 1024, "seq": 256, "batch": 4, "device": "h200-sxm"}
PLENTY = 10**15


@pytest.fixture(scope="module")
def one_host() -> Simulation:
    return simulate(**SMALL, master_weights="split", record=True)


def curve_of(found: Simulation, network: float, hosts: int = 8, message_seconds: float = 0.0) -> ScalingCurve:
    return scaling_curve(found, hosts, network, PLENTY, message_seconds)


def test_one_host_has_the_figures_of_its_simulation(one_host: Simulation) -> None:
    (point,) = curve_of(one_host, 25e9, hosts=1).points
    assert point.tokens_per_second == one_host.tokens_per_second
    assert point.memory == one_host.memory.host_total
    assert (point.efficiency, point.network_bytes, point.binds) == (1.0, 0.0, one_host.bottleneck)


def test_each_host_sends_its_share_of_gradients_in_float32_and_weights_in_bfloat16(one_host: Simulation) -> None:
    for point in curve_of(one_host, 25e9, hosts=6).points:
        share = (point.hosts - 1) / point.hosts
        assert point.network_bytes == pytest.approx(one_host.memory.parameters * (4 + 2) * share)
    assert [point.hosts for point in curve_of(one_host, 25e9, hosts=6).points] == [1, 2, 4, 6]


def test_a_slow_network_binds_and_its_step_is_at_least_its_bytes_over_its_rate(one_host: Simulation) -> None:
    slow, fast = curve_of(one_host, 1e8), curve_of(one_host, 1e12)
    for point in slow.points[1:]:
        assert point.binds == "network"
        assert point.network_bytes / 1e8 <= point.step_seconds < 1.1 * point.network_bytes / 1e8 + one_host.step_seconds
    assert fast.points[-1].tokens_per_second > slow.points[-1].tokens_per_second
    assert slow.pays_until == 1
    assert fast.pays_until == 8


def test_messages_bind_where_there_are_many_hosts(one_host: Simulation) -> None:
    last = curve_of(one_host, 1e12, hosts=1024, message_seconds=1e-3).points[-1]
    assert last.binds == "messages"


def test_moments_and_remainders_are_shared_out(one_host: Simulation) -> None:
    owned = sum(size for state, _, size in one_host.memory.host if "moments" in state or "remainders" in state)
    first, second, fourth, _ = curve_of(one_host, 25e9).points
    transit = second.memory - (first.memory - owned / 2)
    assert fourth.memory - second.memory < 0
    assert second.memory - fourth.memory == pytest.approx(owned / 4, abs=transit)


def test_updates_that_wait_are_refused() -> None:
    found = simulate(**SMALL, clip_grad_norm=1.0, record=True)
    with pytest.raises(ValueError, match="Leave clip_grad_norm out"):
        curve_of(found, 25e9)


def test_the_command_prints_the_curve_and_refuses_half_of_its_options() -> None:
    words = ["simulate", "--layers", "2", "--hidden", "256", "--device", "h200-sxm", "--hosts", "4"]
    done = CliRunner().invoke(main, [*words, "--network", "25GB/s", "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert [point["hosts"] for point in answer["hosts"]] == [1, 2, 4]
    assert answer["hosts"][0]["tokens_per_second"] > 0
    alone = CliRunner().invoke(main, words)
    assert alone.exit_code == 2
    assert "go together" in alone.output
    wrong = CliRunner().invoke(main, [*words, "--network", "25 apples"])
    assert wrong.exit_code == 2


def test_a_plan_is_given_for_several_hosts() -> None:
    words = ["plan", "--layers", "2", "--hidden", "256", "--batch", "1", "--seq", "64", "--device", "h200-sxm"]
    options = ["--json", "--state-dtype", "fp32", "--slots", "2", "--hosts", "2", "--network", "25GB/s"]
    done = CliRunner().invoke(main, [*words, *options])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    alone = simulate(layers=2, hidden=256, batch=1, seq=64, device="h200-sxm", **answer["options"])
    assert answer["hosts"][0]["step_seconds"] == pytest.approx(alone.step_seconds)
    assert [point["hosts"] for point in answer["hosts"]] == [1, 2]
