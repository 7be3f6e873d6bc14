"""The simulator agrees with closed forms, conserves bytes, never gains by a slower part, and says what fits."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relay
from hal import spec
from hal.spec.units import format_size
from relay.models import GPT
from relay.simulation.described.transformer_shape import ModelShape
from relay.simulation.simulate import SENSITIVE
from tests.support.ideal_machines import (
    BYTES_OF_AN_UPDATE,
    FAST,
    HIDDEN,
    LAYER,
    LAYERS,
    SEQUENCE,
    VOCABULARY,
    head_flops,
    ideal,
    layer_flops,
    run,
)

# **** closed forms ****


@pytest.mark.parametrize("stash", ["device", "host"])
def test_an_infinite_link_and_host_leave_pure_compute(stash: str) -> None:
    found = run(ideal(link=FAST), stash=stash)
    forward, backward = layer_flops(32 * SEQUENCE)
    expected = (LAYERS * (forward + backward) + head_flops(32 * SEQUENCE)) / 1e14
    assert found.step_seconds == pytest.approx(expected, rel=0.005)
    assert found.overlap_efficiency == pytest.approx(1.0, abs=1e-6)


def test_without_compute_a_step_takes_its_bytes_over_the_bandwidth() -> None:
    found = run(ideal(flops=FAST))
    size = 4 * LAYER / 1e10
    ends = 4 * HIDDEN * (VOCABULARY + SEQUENCE) / 1e10
    # Down: all layers forward, all but one again backward, while gradients go up; the last ones go up alone.
    assert found.step_seconds == pytest.approx((2 * LAYERS - 1) * size + 3 * ends + size, rel=0.02)


@pytest.mark.parametrize("tokens", [1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("host", [FAST, 2e10])
@pytest.mark.sample(3)
def test_an_overlapped_step_is_the_sum_over_layers_of_the_slowest_part(tokens: int, host: float) -> None:
    layers = 64
    found = run(ideal(host=host), batch=tokens // SEQUENCE, microbatches=8, layers=layers, slots=3)
    forward, backward = (flops / 1e14 for flops in layer_flops(tokens))
    crossing = 4 * LAYER / 1e10
    update = BYTES_OF_AN_UPDATE * LAYER / host
    head = head_flops(tokens) / 1e14
    tail = crossing + update  # the last layer's gradients and update; the first load
    expected = layers * (max(forward, crossing) + max(backward, crossing, update)) + head + tail
    assert found.step_seconds == pytest.approx(expected, rel=0.02)


def test_the_worked_case_of_fifty_billion_parameters() -> None:
    """62 x 8192 on a V100 that sustains 70 TFLOPS behind 12 GB/s, and a host that updates 3.9e9 parameters a second."""
    machine = spec.machine("v100-sxm2-16gb").with_values(
        "device", achieved_fp16=70e12, launch=0.0, ramp=0.0, bandwidth_achieved=FAST, attention=1.0
    )
    update = 4 + 4 + 8 + 2 + 16  # with a 16-bit copy to write
    machine = machine.with_values("host", optimizer_bandwidth=3.9e9 * update, bandwidth_achieved=FAST, memory=1e12)
    parameters = 12 * 8192 * 8192
    for batch in (1, 4, 8):
        options: dict[str, Any] = {"stash": "host", "microbatches": batch, "batch": batch, "seq": 1024}
        found = relay.simulate(layers=62, hidden=8192, device=machine, precision="fp16", loss_scale="fixed", **options)
        tokens = 1024 * batch
        attention = 4 * 1024 * 8192 * tokens * (1 + 128 / 1024) / 2  # what is masked is left out, tile by tile
        forward = (2 * parameters * tokens + attention) / 70e12
        backward = ((2 * parameters / 12 * 8 + 4 * parameters) * tokens + 3.5 * attention) / 70e12
        load, drain = 2 * parameters / 12e9, 4 * parameters / 12e9  # gradients are sums in fp32
        boundary = 4 * 8192 * tokens / 12e9  # streamed one way while weights go down, the other while gradients go up
        words = 8192 * 50257
        ends = 6 * words * tokens / 70e12 + (2 + 2 + 4 + 4) * words / 12e9  # embedding and head, loaded and drained
        tail = backward / batch + parameters / 3.9e9
        expected = 62 * (max(forward, load + boundary) + max(backward, load, drain + boundary, parameters / 3.9e9))
        assert load == pytest.approx(0.134, abs=0.001)
        assert found.step_seconds == pytest.approx(expected + ends + tail, rel=0.02)


def test_break_even_tokens_are_those_of_the_closed_forms() -> None:
    found = run(ideal(host=1e11))
    assert found.break_even["forward"] == pytest.approx(4 * 1e14 / (2 * 1e10))
    assert found.break_even["backward"] == pytest.approx(4 * 1e14 / (6 * 1e10))
    assert found.break_even["optimizer"] == pytest.approx(BYTES_OF_AN_UPDATE / 1e11 * 1e14 / 6, rel=0.02)


# **** bytes ****


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_weights_go_down_twice_but_for_the_layer_at_the_turn_and_gradients_up_once(
    slots: int, microbatches: int
) -> None:
    found = run(ideal(), slots=slots, microbatches=microbatches)
    assert found.step is not None
    embedding, head = 4 * HIDDEN * (VOCABULARY + SEQUENCE), 4 * HIDDEN * (VOCABULARY + 2)
    turn = slots - 1  # the layers that are still in their slots beside the head's
    weights = (2 * LAYERS - turn) * 4 * LAYER + 2 * embedding + head
    assert found.step.weight_bytes == weights
    assert found.step.gradient_bytes == LAYERS * 4 * LAYER + embedding + head
    tokens = 2 * 8 * 32 * SEQUENCE
    small = 8 * microbatches  # seeds down, losses up
    assert found.timeline.link_bytes["down"] == weights + tokens + small // 2
    assert found.timeline.link_bytes["up"] == found.step.gradient_bytes + small // 2


def test_streaming_the_stash_costs_its_own_bytes_and_no_others() -> None:
    kept, streamed = run(ideal()), run(ideal(), stash="host")
    boundary = 4 * HIDDEN * 32 * SEQUENCE
    down = streamed.timeline.link_bytes["down"] - kept.timeline.link_bytes["down"]
    up = streamed.timeline.link_bytes["up"] - kept.timeline.link_bytes["up"]
    # Down: N + 1 inputs forward (the head's included), N recomputed, N + 1 gradients; ids and labels again as used.
    assert down == pytest.approx((3 * LAYERS + 2) * boundary, rel=0.001)
    assert up == pytest.approx((2 * LAYERS + 2) * boundary, rel=0.001)


def test_the_waterfall_adds_up_to_the_step() -> None:
    for machine in (ideal(), ideal(host=1e10), ideal(link=1e9), spec.machine("v100-sxm2-32gb")):
        found = run(machine, stash="host")
        assert sum(found.waterfall.values()) == pytest.approx(found.step_seconds, rel=1e-9)


# **** faster parts ****

RATE = st.floats(0.2, 5.0)


@settings(max_examples=30, deadline=None)
@given(RATE, RATE, RATE, st.sampled_from(sorted(SENSITIVE)), st.floats(1.01, 8))
def test_a_faster_part_never_slows_a_run(flops: float, link: float, host: float, part: str, factor: float) -> None:
    machine = ideal(flops * 1e14, link * 1e10, host * 4e10).with_values("device", bandwidth_achieved=1e12)
    machine = machine.with_values("host", bandwidth_achieved=8e10)
    before = run(machine, layers=6, stash="host")
    spec, figures = SENSITIVE[part]
    known = {name: factor for name in figures if not name.endswith("16")}
    after = run(machine.scaled(spec, **known), layers=6, stash="host")
    # Non-preemptive queues can lose a transfer's length by a changed order (Graham 1969).
    assert after.step_seconds <= before.step_seconds * 1.01


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("device", ["v100-sxm2-32gb", "a100-sxm-80gb", "rtx-4090", "h200-sxm", "gh200-96gb"])
@pytest.mark.sample("v100-sxm2-32gb-host", "h200-sxm-device", "gh200-96gb-host")
def test_the_schedule_hides_nearly_everything_above_break_even(device: str, stash: str) -> None:
    options: dict[str, Any] = {"layers": 48, "hidden": 4096, "device": device, "state_dtype": "int8"}
    options |= {"host_memory": 10**12, "loss_scale": "fixed"}
    tokens = max(relay.simulate(batch=8, microbatches=8, stash="host", **options).break_even.values())
    batch = -(-int(1.3 * tokens) // 1024)
    found = relay.simulate(batch=batch, microbatches=batch, stash=stash, must_fit=False, **options)
    # A stash on the device may be larger than the device; everything else must fit to be judged.
    assert found.fits or stash == "device"
    if found.fits:
        assert found.overlap_efficiency >= 0.97


# **** what fits ****

FIFTY: dict[str, Any] = {
    "layers": 62, "hidden": 8192, "device": "v100-sxm2-16gb", "host_memory": "512GB", "loss_scale": "fixed",
}  # fmt: skip
FIFTY |= {"stash": "host", "microbatches": 8}


def test_a_run_whose_logits_do_not_fit_is_told_the_chunks_that_would_and_their_memory() -> None:
    options = {"layers": 2, "hidden": 64, "heads": 2, "vocabulary": 65536, "precision": "fp32", "capacity": "300MB"}
    options |= {"batch": 1, "microbatches": 1, "seq": 2048, "device": "generic"}
    with pytest.raises(relay.DoesNotFit, match=r"would fit: head_chunk_tokens=128 \(device [\d.]+ MB, host") as caught:
        relay.simulate(**options)
    first = caught.value.simulation.suggestions[0]
    found = relay.simulate(**options, head_chunk_tokens=128)
    assert f"device {format_size(found.memory.device_total)}, host {format_size(found.memory.host_total)}" in first


def test_fifty_billion_parameters_with_fp32_adam_are_refused_with_the_ledger_and_what_would_fit() -> None:
    with pytest.raises(relay.DoesNotFit, match="would fit: state_dtype=int8") as caught:
        relay.simulate(**FIFTY)
    ledger = {state: size for state, _, size in caught.value.simulation.memory.host}
    states = ledger["weights"] + ledger["first moments"] + ledger["second moments"]
    assert 559 <= states / 2**30 <= 570  # 559 GiB for the layers, and the embeddings'
    assert relay.simulate(**FIFTY, state_dtype="int8").tokens_per_second > 100


def test_bf16_on_a_v100_is_refused() -> None:
    with pytest.raises(spec.SpecError, match="does not compute in bf16; it has fp32, fp16"):
        relay.simulate(**FIFTY, precision="bf16")


def test_device_memory_does_not_grow_with_depth_when_the_stash_is_on_the_host() -> None:
    totals = {run(ideal(), layers=layers, stash="host").memory.device_total for layers in (4, 48)}
    assert len(totals) == 1


def test_a_dynamic_loss_scale_costs_every_gradient_on_the_host() -> None:
    options: dict[str, Any] = {"model": "gpt2", "precision": "fp16", "stash": "host", "microbatches": 8}
    eager = relay.simulate(**options, loss_scale="fixed").memory
    deferred = relay.simulate(**options).memory
    gradients = sum(size for state, _, size in deferred.host if state == "gradients")
    assert gradients >= 4 * deferred.parameters
    assert deferred.host_total > eager.host_total


@pytest.mark.parametrize(
    ("words", "tied", "options"),
    [
        (64, False, {"stash": "host", "precision": "fp32"}),
        (64, False, {"stash": "host", "precision": "bf16", "master_weights": "split"}),
        (64, True, {"stash": "host", "precision": "bf16"}),
        (64, True, {"stash": "device", "precision": "fp32", "clip_grad_norm": 1.0}),
        (64, True, {"stash": "device", "precision": "fp32", "exact_ties": False}),
        (200, True, {"stash": "device", "precision": "fp32"}),  # a batch has 48 tokens
        (200, True, {"stash": "host", "precision": "bf16", "clip_grad_norm": 1.0}),
        (64, False, {"stash": "host", "precision": "bf16", "head_chunk_tokens": 5, "mlp_chunk_tokens": 4}),
        (64, True, {"stash": "host", "precision": "bf16", "head_chunk_tokens": 5}),
        (64, False, {"stash": "host", "precision": "bf16", "master_weights": "split", "clip_grad_norm": 1.0}),
        (64, False, {"stash": "host", "precision": "bf16", "clip_grad_norm": 1.0, "microbatches": 1}),
    ],
)
@pytest.mark.sample("64-False-options0", "64-True-options4", "200-True-options5", "64-False-options9")
def test_simulated_memory_is_that_of_a_real_run(words: int, tied: bool, options: dict[str, Any]) -> None:
    import torch

    from tests.support import reference

    torch.manual_seed(0)
    model = GPT(vocabulary=words, layers=3, hidden=32, heads=2, sequence=12, tied=tied)
    options = {"microbatches": 2, **options}
    trainer = relay.Trainer(model, device="cpu:discrete", **options)
    metrics = trainer.step(reference.text_batches(1, batch=4)[0])
    found = relay.simulate(ModelShape(3, 32, 2, words, tied=tied), device="generic", seq=12, batch=4, **options)
    trainer.close()
    assert found.memory.device_total == metrics.device_peak_bytes
    assert found.memory.host_total == metrics.host_bytes


def test_a_larger_machine_description_keeps_what_it_was_given() -> None:
    machine = spec.machine("generic").with_values("link", down=1e9)
    assert machine.link["down"] == 1e9
    assert dataclasses.replace(machine, pointwise=0.5).link["down"] == 1e9
