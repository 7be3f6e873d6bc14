"""The simulator agrees with closed forms, conserves bytes, and never gains by a slower part."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import relay
import relay.simulation
from hal import spec
from relay.cli import main
from relay.models import GPT
from relay.shapes import ModelShape, ShapeError, shape_of_config
from relay.simulation import Simulation

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
    options = {"sequence": SEQUENCE, "precision": "fp32", "state_dtype": "fp32", **more}
    return relay.simulate(shape, device=machine, batch=batch, microbatches=microbatches, **options)


def layer_flops(tokens: int) -> tuple[float, float]:
    """Forward, and recompute (without the last product, which no gradient needs) with backward."""
    attention = 4 * SEQUENCE * HIDDEN
    forward = (2 * MATRICES + attention) * tokens
    backward = (2 * (MATRICES - 4 * HIDDEN * HIDDEN) + 4 * MATRICES + 3.5 * attention) * tokens
    return forward, backward


def head_flops(tokens: int) -> float:
    return 6.0 * HIDDEN * VOCABULARY * tokens


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
        options: dict[str, Any] = {"stash": "host", "microbatches": batch, "batch": batch, "sequence": 1024}
        found = relay.simulate(layers=62, hidden=8192, device=machine, precision="fp16", loss_scale="fixed", **options)
        tokens = 1024 * batch
        attention = 4 * 1024 * 8192 * tokens
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
@given(RATE, RATE, RATE, st.sampled_from(sorted(relay.simulation.SENSITIVE)), st.floats(1.01, 8))
def test_a_faster_part_never_slows_a_run(flops: float, link: float, host: float, part: str, factor: float) -> None:
    machine = ideal(flops * 1e14, link * 1e10, host * 4e10).with_values("device", bandwidth_achieved=1e12)
    machine = machine.with_values("host", bandwidth_achieved=8e10)
    before = run(machine, layers=6, stash="host")
    place, figures = relay.simulation.SENSITIVE[part]
    known = {name: factor for name in figures if not name.endswith("16")}
    after = run(machine.scaled(place, **known), layers=6, stash="host")
    # Non-preemptive queues can lose a transfer's length by a changed order (Graham 1969).
    assert after.step_seconds <= before.step_seconds * 1.01


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("device", ["v100-sxm2-32gb", "a100-sxm-80gb", "rtx-4090", "h200-sxm", "gh200-96gb"])
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
    held = relay.simulate(**options).memory
    kept = sum(size for state, _, size in held.host if state == "gradients")
    assert kept >= 4 * held.parameters
    assert held.host_total > eager.host_total


def test_simulated_memory_is_that_of_a_real_run() -> None:
    import reference
    import torch


    torch.manual_seed(0)
    model = GPT(vocabulary=64, layers=3, hidden=32, heads=2, sequence=12, tied=False)
    trainer = relay.Trainer(model, device="cpu:discrete", microbatches=2, stash="host")
    metrics = trainer.step(reference.text_batches(1, batch=4)[0])
    found = relay.simulate(
        ModelShape(3, 32, 2, 64), device="generic", sequence=12, batch=4, microbatches=2, precision="fp32", stash="host"
    )
    trainer.close()
    assert found.memory.device_total == metrics.device_peak_bytes
    assert found.memory.host_total == metrics.host_bytes


# **** shapes ****


def test_a_module_on_the_meta_device_is_simulated_as_its_shape_is() -> None:
    import torch


    with torch.device("meta"):
        module = GPT(vocabulary=256, layers=5, hidden=64, heads=2, sequence=32, tied=True)
        ids = torch.zeros(8, 32, dtype=torch.int64)
    example = {"input_ids": ids, "labels": ids}
    options: dict[str, Any] = {"device": "rtx-4090", "microbatches": 4}
    found = relay.simulate(module, example=example, **options)
    shape = ModelShape(5, 64, 2, 256, tied=True)
    same = relay.simulate(shape, batch=8, sequence=32, **options)
    assert found.step_seconds == pytest.approx(same.step_seconds, rel=0.02)
    assert found.memory.parameters == same.memory.parameters
    assert all(parameter.is_meta for parameter in module.parameters())
    with pytest.raises(ShapeError, match="needs an example"):
        relay.simulate(module)


def test_a_hugging_face_configuration_gives_its_shape(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    config |= {"intermediate_size": 14336, "vocab_size": 128256, "hidden_act": "silu", "tie_word_embeddings": False}
    path.write_text(json.dumps(config))
    assert shape_of_config(path) == relay.simulation.MODELS["llama-3-8b"]
    assert relay.simulate("llama-3-8b", device="h200-sxm").memory.parameters == pytest.approx(8.03e9, rel=0.001)
    path.write_text(json.dumps({"hidden_size": 4096}))
    with pytest.raises(ShapeError, match="does not say layers"):
        shape_of_config(path)


SMALL = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GPT2", {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 128}),
        ("Mpt", {"n_layers": 3, "d_model": 64, "n_heads": 4, "vocab_size": 100, "max_seq_len": 128}),
        ("Mistral", {**SMALL, "intermediate_size": 96, "num_key_value_heads": 2}),
        ("Gemma", {**SMALL, "intermediate_size": 96, "head_dim": 32, "num_key_value_heads": 1, "pad_token_id": 0}),
        ("Qwen3", {**SMALL, "intermediate_size": 96, "head_dim": 32, "num_key_value_heads": 2}),
    ],
)
def test_a_configuration_has_as_many_parameters_as_the_model_built_from_it(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    config = getattr(transformers, f"{name}Config")(**options)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    found = relay.simulate(config=str(tmp_path / "config.json"), sequence=128, device="rtx-4090")
    # GPT-2's layer stands for MPT's too, which has no biases and no table of positions.
    slack = 128 * 64 + 3 * 13 * 64 if name == "Mpt" else 600
    assert count - 600 <= found.memory.parameters <= count + slack


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_local_experts": 8}, "layers of 8 experts"),
        ({"n_routed_experts": 64}, "layers of 64 experts"),
        ({"is_encoder_decoder": True}, "an encoder with a decoder"),
        ({"embedding_size": 16}, "embeddings of 16 before layers of 64"),
        ({"num_hidden_groups": 1}, "the same layers several times"),
        ({"multi_query": True}, "one head of keys"),
        ({"hidden_size": "64"}, "whole numbers"),
    ],
)
def test_a_configuration_that_would_be_counted_wrongly_is_refused(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL, **more}))
    with pytest.raises(ShapeError, match=message):
        shape_of_config(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Say which model"),
        ({"model": "gpt9"}, "no model 'gpt9'"),
        ({"layers": 3}, "needs both layers and hidden"),
        ({"layers": 3, "hidden": 100, "heads": 7}, "multiple of heads"),
        ({"model": "gpt2", "batch": 2, "microbatches": 4}, "cannot be cut"),
    ],
)
def test_a_model_or_batch_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        relay.simulate(**options)


@pytest.mark.parametrize(
    "option",
    [
        {"stash": "disk"},
        {"state_dtype": "fp64"},
        {"recompute": -1},
        {"recompute": "none"},
        {"loss_scale": 3.0},
        {"loss_scale": None},
        {"clip_grad_norm": -1},
        {"clip_grad_norm": "1"},
        {"slots": 0},
        {"layers_per_slot": 0},
        {"microbatches": 0},
        {"microbatches": 2.0},
    ],
    ids=str,
)
def test_what_the_trainer_refuses_is_refused_in_the_same_words(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(option))}=") as simulated:
        relay.simulate(layers=1, hidden=32, heads=2, **option)
    with pytest.raises(ValueError, match=f"^{next(iter(option))}=") as trained:
        relay.Trainer(GPT(layers=1, hidden=32), **option)
    assert str(simulated.value) == str(trained.value)


@pytest.mark.parametrize("option", [{"sequence": 0}, {"batch": 0}, {"batch": True}], ids=str)
def test_a_step_has_at_least_one_token(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a whole number of at least 1"):
        relay.simulate(layers=1, hidden=32, heads=2, microbatches=1, **option)


# **** the command ****


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["simulate", *arguments])


def test_the_command_answers_with_one_object_and_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = invoke("--model", "gpt2", "--device", "rtx-4090", "--tokens", "1G", "--trace", str(trace), "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["fits"]
    assert sum(answer["waterfall_seconds"].values()) == pytest.approx(answer["step_seconds"])
    assert answer["days"] == pytest.approx(1e9 / answer["tokens_per_second"] / 86400)
    assert answer["joules_per_token"]["low"] < answer["joules_per_token"]["middle"] < answer["joules_per_token"]["high"]
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} >= {"compute", "link down", "link up"}
    assert {event["name"] for event in events if event["ph"] == "C"} == {"bytes in flight", "watts"}
    crossed = sum(event["args"]["bytes"] for event in events if event["ph"] == "X" and event["tid"] == 0)
    assert crossed == answer["link_bytes"]["down"]


def test_the_command_exits_with_one_and_both_ledgers_where_it_does_not_fit() -> None:
    result = invoke("--layers", "62", "--hidden", "8192", "--device", "v100-sxm2-16gb", "--host-memory", "512GB")
    assert result.exit_code == 1
    would_fit = "would fit: loss_scale=fixed with state_dtype=int8"
    for text in ("it does not fit", would_fit, "host memory", "device memory", "GiB"):
        assert text in result.output


def test_small_models_are_told_in_units_of_their_size() -> None:
    small = ["--layers", "2", "--hidden", "64", "--heads", "2", "--vocab", "256", "--seq", "32", "--batch", "1"]
    text = invoke(*small, "--device", "t4").output
    parameters = sum(one.numel() for one in GPT(256, 2, 64, 2, 32).parameters())
    assert text.startswith(f"{parameters / 1e3:.2f} k parameters: ")
    weights = next(line for line in text.splitlines() if line.startswith("  weights"))
    assert weights.endswith(" KiB")
    assert 0 < float(weights.split()[-2]) < 1024
    assert " 0.0 " not in text.partition("host memory")[2].partition("of which")[0]


def test_the_command_asked_wrongly_exits_with_two() -> None:
    assert invoke("--layers", "4").exit_code == 2
    assert invoke("--model", "gpt2", "--sweep", "colour=red").exit_code == 2
    assert invoke("--model", "gpt2", "--device", "v100").exit_code == 1


def test_a_sweep_writes_a_table_and_a_map(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "map"
    result = invoke(
        "--model", "gpt2", "--sweep", "batch=8,16", "--sweep", "device=rtx-3090,rtx-4090", "--out", str(out), "--json"
    )
    assert result.exit_code == 0, result.output
    rows = out.with_suffix(".csv").read_text().split()
    assert rows[0] == "batch,device,tokens_per_second"
    assert len(rows) == 5
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_sweep_leaves_out_what_cannot_be_and_refuses_what_is_not_known(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sweep = ("--model", "gpt2", "--out", str(tmp_path / "map"), "--sweep", "precision=bf16,fp16", "--sweep")
    result = invoke(*sweep, "device=v100-sxm2-16gb,rtx-4090", "--json")
    assert result.exit_code == 0, result.output
    (without, with_bf16), (half, other) = json.loads(result.stdout)["tokens_per_second"]
    assert without is None
    assert min(with_bf16, half, other) > 0
    assert "does not compute in bf16" in result.stderr
    assert invoke(*sweep, "device=v100-sxm2-16gb,rtx-9999").exit_code == 1
    assert invoke(*sweep, "precision=fp32").exit_code == 2


def test_a_sweep_without_matplotlib_writes_its_table_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = invoke("--model", "gpt2", "--sweep", "batch=8,16", "--out", str(tmp_path / "map"), "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["png"] is None
    assert len(Path(answer["csv"]).read_text().split()) == 3
    assert "pip install" in result.stderr


def test_a_count_that_is_not_finite_is_refused() -> None:
    assert invoke("--model", "gpt2", "--tokens", "1e400").exit_code == 2


def test_a_larger_machine_description_keeps_what_it_was_given() -> None:
    machine = spec.machine("generic").with_values("link", down=1e9)
    assert machine.link["down"] == 1e9
    assert dataclasses.replace(machine, pointwise=0.5).link["down"] == 1e9
