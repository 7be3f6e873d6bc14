"""Several devices on one host, simulated: what they gain over one, and what they share."""

from dataclasses import replace

import pytest

from hal.spec import machine
from relay.simulation.host_cache import HostCache
from relay.simulation.plan import plan
from relay.simulation.simulate import Simulation, simulate

FOUR_A_DEVICE = {"stash": "host", "host_memory": "2TB", "seq": 4096}
CACHE = HostCache()


def llama(devices: int, **more: object) -> Simulation:
    """Llama 3 8B, 32 layers and a head as heavy as 2.3 of them, on H200s; eight sequences a micro-batch."""
    options = FOUR_A_DEVICE | {"device": "h200-sxm", "host_cache": CACHE} | more
    return simulate("llama-3-8b", batch=8 * 4 * devices, microbatches=4 * devices, **options)


@pytest.mark.parametrize(
    ("devices", "least"),
    [
        pytest.param(2, 0.97, marks=pytest.mark.exhaustive),
        pytest.param(4, 0.92, marks=pytest.mark.exhaustive),
        (8, 0.84),
    ],
)
def test_devices_are_as_fast_as_the_best_exact_schedule_lets_them_be(devices: int, least: float) -> None:
    assert llama(devices).step_seconds / (devices * llama(devices, count=devices).step_seconds) >= least


def test_a_slower_device_takes_fewer_layers() -> None:
    fast = machine("h200-sxm")
    slow = fast.scaled("device", achieved_bf16=0.6, achieved_fp32=0.6, bandwidth_achieved=0.6)
    alone = [llama(2, device=one).tokens_per_second for one in (fast, slow)]
    assert alone[1] / alone[0] == pytest.approx(0.6, abs=0.02)
    assert llama(2, device=replace(fast, others=(slow,))).tokens_per_second >= 0.94 * sum(alone)


def test_devices_behind_one_link_wait_for_it() -> None:
    few = {"batch": 4, "microbatches": 4, "seq": 128, "device": "t4", "count": 4}
    own, shared = (simulate("gpt2", **few, one_link=one) for one in (False, True))
    assert own.timeline.link_bytes == shared.timeline.link_bytes
    assert shared.step_seconds > 1.5 * own.step_seconds
    assert sum(shared.timeline.link_bytes.values()) > 0


def test_devices_are_named_one_by_one_or_counted_and_those_in_host_memory_are_refused() -> None:
    small = {"batch": 4, "microbatches": 4, "seq": 128}
    named, counted = simulate("gpt2", device="t4,t4", **small), simulate("gpt2", device="t4", count=2, **small)
    assert named.step_seconds == counted.step_seconds
    assert named.peak_flops == 2 * simulate("gpt2", device="t4", **small).peak_flops
    assert "2 x " in str(named)
    with pytest.raises(ValueError, match="works in host memory"):
        simulate("gpt2", device="m3-max-40c", count=2, **small)
    with pytest.raises(ValueError, match="an empty name"):
        simulate("gpt2", device="t4,", **small)
    with pytest.raises(ValueError, match="Name one device"):
        simulate("gpt2", device="t4,t4", count=2, **small)


def test_fewer_micro_batches_than_devices_are_noted_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    found = simulate("gpt2", device="t4", count=4, batch=2, microbatches=2, seq=128)
    assert sum("2 micro-batches cannot keep 4 devices busy" in note for note in found.notes) == 1
    assert not caplog.records  # a plan simulates many runs, and shows the notes of the one that it chooses


def test_groups_are_no_larger_than_the_memory_allows() -> None:
    sizes = []
    for capacity in ("16GB", "1GB", "500MB"):
        found = simulate(
            "gpt2", device="t4", count=2, batch=8, microbatches=8, seq=128, stash="host", capacity=capacity,
            must_fit=None,
        )  # fmt: skip
        sizes.append(max(found.run.layers_per_visit))
        assert found.memory.device_total <= found.device_capacity or sizes[-1] == 1
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] == 1


@pytest.mark.exhaustive
def test_a_plan_for_several_devices_has_the_layers_of_a_visit() -> None:
    found = plan("gpt2", device="t4", count=2, batch=4, seq=128, state_dtypes=["fp32"], slots=[2], stashes=["host"])
    assert found.options["layers_per_visit"] == found.expected.run.layers_per_visit
    assert "layers_per_visit" in found.as_toml()
