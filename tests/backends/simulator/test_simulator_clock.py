"""The clock: shared rates are shared fairly, lanes are serial, and costs are those that were measured."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from backends.simulator.calls import Options
from backends.simulator.clock import COMPUTE, DOWN, HOST, UP, Cost
from backends.simulator.cost import CostModel
from backends.simulator.device import SimulatedDevice
from backends.simulator.sharing import speeds
from hal import spec
from hal.program import Program

DEMAND = st.tuples(*[st.floats(0, 100)] * 3)


@settings(max_examples=200, deadline=None)
@given(st.lists(DEMAND, min_size=1, max_size=4), st.tuples(*[st.floats(1, 100)] * 3))
def test_sharing_is_max_min_fair(demands: list[tuple[float, ...]], rates: tuple[float, ...]) -> None:
    found = speeds(demands, rates)
    used = [sum(speed * demand[k] for speed, demand in zip(found, demands, strict=True)) for k in range(3)]
    assert all(0 < speed <= 1 for speed in found)
    assert all(total <= rate * (1 + 1e-9) for total, rate in zip(used, rates, strict=True))
    drawn = [speed * max(demand) for speed, demand in zip(found, demands, strict=True)]
    for number, speed in enumerate(found):
        if speed < 1 - 1e-9:
            # Held back by a rate that is used up, on which nobody draws at a higher level.
            full = [k for k in range(3) if demands[number][k] > 0 and used[k] >= rates[k] * (1 - 1e-6)]
            assert any(
                all(drawn[other] <= drawn[number] * (1 + 1e-6) for other in range(len(found)) if demands[other][k] > 0)
                for k in full
            )


def test_a_small_taker_has_all_it_wants_and_a_large_one_the_rest() -> None:
    assert speeds([(12.0,), (100.0,)], (100.0,)) == pytest.approx([1.0, 0.88])


def device(**link: float) -> SimulatedDevice:
    machine = spec.machine("generic").with_values("link", **{"latency": 0.0, "down": 1e9, "up": 1e9, **link})
    machine = machine.with_values("host", bandwidth_achieved=1e12)
    return SimulatedDevice("sim", machine, None, Options(numerics=False))


def test_one_lane_is_serial_and_two_run_side_by_side() -> None:
    opened = device()
    first = opened.calls.submit(DOWN, "a", opened.costs.transfer(DOWN, 10**9), [], None, None)
    second = opened.calls.submit(DOWN, "b", opened.costs.transfer(DOWN, 10**9), [], None, None)
    back = opened.calls.submit(UP, "c", opened.costs.transfer(UP, 10**9), [], None, None)
    for event in (first, second, back):
        event.wait()
    assert first.span() == (0.0, pytest.approx(1.0))
    assert second.span() == (pytest.approx(1.0), pytest.approx(2.0))
    assert back.span() == (0.0, pytest.approx(1.0))
    assert opened.timeline().now == pytest.approx(2.0)


def test_a_link_that_does_not_deliver_both_directions_slows_both() -> None:
    opened = device(both=1e9)
    down = opened.calls.submit(DOWN, "a", opened.costs.transfer(DOWN, 10**9), [], None, None)
    up = opened.calls.submit(UP, "b", opened.costs.transfer(UP, 10**9), [], None, None)
    down.wait()
    up.wait()
    assert down.span()[1] == pytest.approx(2.0)
    assert up.span()[1] == pytest.approx(2.0)


def test_time_stands_still_until_somebody_waits() -> None:
    opened = device()
    event = opened.calls.submit(COMPUTE, "kernel", Cost(3.0), [], None, None)
    assert opened.timeline().now == 0.0
    assert not event.done()
    event.wait()
    after = opened.calls.submit(HOST, "task", Cost(1.0), [event], None, None)
    after.wait()
    assert after.span() == (3.0, 4.0)
    assert opened.timeline().stalled["host"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "seconds"),
    [(512, 512, 16, 8e-6), (1024, 512, 700, 18e-6), (2048, 2048, 7000, 0.599e-3), (8448, 2816, 48000, 21.2e-3)],
)
def test_matrix_products_take_what_deepbench_measured_on_a_v100(
    rows: int, inner: int, columns: int, seconds: float
) -> None:
    graph = fx.Graph()
    left, right = graph.placeholder("left"), graph.placeholder("right")
    left.meta = {"val": torch.empty(rows, inner, dtype=torch.float16, device="meta")}
    right.meta = {"val": torch.empty(inner, columns, dtype=torch.float16, device="meta")}
    product = graph.call_function(torch.ops.aten.mm.default, (left, right))
    product.meta = {"val": torch.empty(rows, columns, dtype=torch.float16, device="meta")}
    graph.output((product,))
    program = Program("gemm", graph, (), (), {}, False, 0, 0, 0, "gemm")
    model = CostModel(spec.machine("v100-sxm2-16gb"))
    assert model.of(program).seconds == pytest.approx(seconds, rel=0.15)
    assert model.of(program).flops == 2 * rows * inner * columns


@pytest.mark.parametrize("length", [64, 128, 1024, 1408])
@pytest.mark.parametrize("causal", [True, False])
def test_fused_attention_takes_the_time_of_the_scores_that_it_computes(length: int, causal: bool) -> None:
    heads, size = 4, 64

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

    drawn = [torch.zeros(1, heads, length, size) for _ in range(3)]
    graph = make_fx(attention, tracing_mode="fake")(*drawn).graph
    machine = spec.machine("generic").with_values(
        "device", bandwidth_achieved=1e30, launch=0.0, call=0.0, ramp=0.0, attention=0.5, achieved_fp32=1e12
    )
    work = CostModel(machine).of(Program("attention", graph, (), (), {}, False, 0, 0, 0, "attention"))
    tiles = -(-length // 128)
    blocks = np.tril(np.ones((tiles, tiles))) if causal else np.ones((tiles, tiles))
    computed = np.kron(blocks, np.ones((128, 128)))[:length, :length].sum()
    assert work.seconds == pytest.approx(heads * computed * 2 * 2 * size / 0.5e12, rel=1e-6)
    assert work.flops == heads * length**2 * 2 * 2 * size
