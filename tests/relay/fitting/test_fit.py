"""The options that `relay.fit` gives fit the machine, change no result, and are the fastest of what was tried."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import relay
from relay.cli import main
from relay.errors import BatchError
from relay.fitting.fit import FREE
from relay.models import GPT
from relay.simulation.described.transformer_shape import ModelShape
from tests.support import reference
from tests.support.zoo.plain_models import Build, perceptron, regression

TINY = ModelShape(4, 64, 4, 256)
EIGHTEEN = ModelShape(53, 5632, 44, vocabulary=32000, ffn=15360, kv_heads=11, gated=True)
CARD: dict[str, Any] = {"device": "rtx-4090", "host_memory": "120GiB", "precision": "bf16"}
"""A card of 24 GB in a host of 128 GiB, of which 8 are left to the system."""


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=64, layers=3, hidden=32, heads=2, sequence=12, tied=False)


def text(seed: int = 5) -> dict[str, Tensor]:
    return reference.text_batches(1, 4, seed=seed)[0]


def test_the_options_fit_the_device_and_train_as_the_default_ones(build: Build) -> None:
    capacity = 500_000
    found = relay.fit(gpt(), text(), device="cpu:discrete", capacity=capacity, microbatches=2)
    assert found.expected.fits
    assert set(found.options) <= {*FREE, "microbatches", "capacity"}
    assert found.options["microbatches"] == 2
    model, plain = gpt(), gpt()
    trainer = build(model, device="cpu:discrete", **found.options)
    steps = [trainer.step(text(seed)) for seed in range(2)]
    assert max(step.device_peak_bytes for step in steps) <= capacity
    assert [step.loss for step in steps] == reference.train(plain, [text(seed) for seed in range(2)], 2)
    reference.assert_same_state(model.state_dict(), plain.state_dict())


def test_a_list_of_modules_is_fitted_with_its_loss_to_the_byte(build: Build) -> None:
    mse, batch = torch.nn.functional.mse_loss, regression()
    found = relay.fit(perceptron(), batch, mse, device="cpu:discrete", capacity=3000, microbatches=3)
    modules, plain = perceptron(), perceptron()
    trainer = build(modules, loss=mse, device="cpu:discrete", **found.options)
    steps = [trainer.step(batch) for _ in range(2)]
    assert {step.device_peak_bytes for step in steps} == {found.expected.memory.device_total}
    assert [step.loss for step in steps] == reference.train(plain, [batch, batch], 3, loss=mse)
    with pytest.raises(BatchError, match=r"a pair \(inputs, targets\)"):
        relay.fit(perceptron(), {"inputs": batch[0]}, mse)


def test_nothing_that_is_given_is_changed_and_no_state_is_rounded_unasked() -> None:
    given: dict[str, Any] = {"stash": "host", "slots": 1, "recompute": True, "clip_grad_norm": 0.5, "seed": 7}
    found = relay.fit(TINY, (4, 32), device="t4", precision="fp16", **given)
    assert given.items() <= found.options.items()
    assert found.expected.run.state_dtype == "fp32"
    assert any("equal to rounding" in reason for reason in found.reasons)
    assert not any(reason.startswith(("stash", "slots", "recompute", "state_dtype")) for reason in found.reasons)
    kept = relay.fit(TINY, (4, 32), device="t4", precision="fp16", microbatches=2, **given)
    assert kept.options["microbatches"] == 2
    assert not any("equal to rounding" in reason for reason in kept.reasons)


def test_a_run_that_cannot_fit_is_refused_with_the_bytes_and_with_changes_that_do_fit() -> None:
    options: dict[str, Any] = {"device": "t4", "precision": "fp16", "clip_grad_norm": 1.0, "microbatches": 1}
    most = relay.simulate(TINY, seq=32, batch=4, **options).memory.host_total
    with pytest.raises(relay.NoFeasiblePlan) as caught:
        relay.fit(TINY, (4, 32), host_memory=most - 100_000, **options)
    message = str(caught.value)
    assert "100.00 kB too little" in message
    assert "100,000 bytes" in message
    named = re.findall(r"(\w+)='?(\w+)'? \(", message)
    assert named
    for name, value in named:
        changed = {**options, name: None if value == "None" else int(value) if value.isdigit() else value}
        assert relay.simulate(TINY, seq=32, batch=4, host_memory=most - 100_000, **changed).fits
    costs = [text for text in ("equal to rounding", "rounded to bfloat16", "not clipped") if text in message]
    assert [message.index(text) for text in costs] == sorted(message.index(text) for text in costs)


def test_small_states_are_used_where_they_are_allowed_and_needed() -> None:
    options: dict[str, Any] = {"device": "t4", "precision": "fp16", "microbatches": 1, "loss_scale": "fixed"}
    roomy = relay.fit(TINY, (4, 32), **options)
    tight = int(roomy.expected.memory.host_total * 0.8)
    found = relay.fit(TINY, (4, 32), host_memory=tight, allow_small_states=True, **options)
    assert found.options["state_dtype"] in ("bf16", "int8")
    assert any(reason.startswith("state_dtype=") for reason in found.reasons)


def test_a_resumed_run_keeps_the_options_of_its_checkpoint(build: Build, tmp_path: Path) -> None:
    trainer = build(gpt(), device="cpu:discrete", microbatches=1, stash="host", slots=3, resident_layers=2)
    trainer.step(text())
    trainer.save(tmp_path / "saved")
    found = relay.fit(gpt(), text(), device="cpu:discrete", resume=tmp_path / "saved")
    assert found.tried == 1
    for name, value in {"microbatches": 1, "stash": "host", "slots": 3, "resident_layers": 2}.items():
        assert found.options[name] == value
    assert any("checkpoint" in reason for reason in found.reasons)


def test_relay_train_uses_what_fits(tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_text("the quick brown fox jumps over the lazy dog. " * 200, encoding="utf-8")
    arguments = ["train", "--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "16", "--batch", "4", "--slots"]
    arguments += ["1", "--data", str(data), "--steps", "1", "--no-sample", "--fit", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["options"]["slots"] == 1
    assert "fit: " in result.stderr


@pytest.mark.parametrize("wrong", [{"stashes": ["host"]}, {"slots": 0}])
def test_an_option_that_the_trainer_refuses_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        relay.fit(TINY, (4, 32), **wrong)


# **** the machines that people have ****


@pytest.mark.exhaustive
def test_eight_billion_parameters_train_in_bf16_with_fp32_moments_on_24_gb_and_128_gib() -> None:
    found = relay.fit("llama-3-8b", (16, 1024), **CARD)
    assert found.expected.fits
    assert found.expected.run.state_dtype == "fp32"
    assert found.expected.memory.device_total < 24e9
    assert found.expected.memory.host_total < 120 * 2**30


@pytest.mark.exhaustive
def test_with_clipping_the_missing_bytes_and_the_cheapest_cure_are_named() -> None:
    with pytest.raises(relay.NoFeasiblePlan, match=r"GB too little.*cheapest first: state_dtype='bf16'"):
        relay.fit("llama-3-8b", (16, 1024), clip_grad_norm=1.0, **CARD)
    cured = relay.fit("llama-3-8b", (16, 1024), clip_grad_norm=1.0, state_dtype="bf16", **CARD)
    assert cured.expected.fits


@pytest.mark.exhaustive
def test_eighteen_billion_parameters_train_with_int8_states_and_split_masters() -> None:
    found = relay.fit(EIGHTEEN, (8, 1024), state_dtype="int8", **CARD)
    assert found.expected.memory.parameters > 18e9
    assert found.options["master_weights"] == "split"
    assert found.expected.fits
