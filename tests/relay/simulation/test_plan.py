"""The plan is the best of what fits, says why, and feeds `relay train`."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import relay
from hal import ops, spec
from hal.device import NATIVE, DeviceInfo
from relay.cli import main
from relay.models import GPT
from relay.precision import COMPUTE
from relay.simulation import calibrate as calibration
from relay.simulation.described.transformer_shape import ModelShape, compiled_model_of
from relay.simulation.search import microbatch_counts
from relay.simulation.simulated_step import RunShape

SMALL: dict[str, Any] = {"layers": 4, "hidden": 256, "heads": 4, "vocabulary": 256, "seq": 128, "batch": 4}


def test_the_plan_fits_and_nothing_that_fits_is_much_faster() -> None:
    options = {**SMALL, "device": "v100-sxm2-16gb", "capacity": 40 * 10**6}
    chosen = relay.plan(**options)
    assert chosen.expected.fits
    assert chosen.expected.memory.device_total <= 40 * 10**6
    for microbatches in (1, 2, 4):
        for stash in ("device", "host"):
            other = relay.simulate(**options, microbatches=microbatches, stash=stash, must_fit=False)
            if other.fits:
                assert other.tokens_per_second <= chosen.expected.tokens_per_second * 1.021
    assert any("does not fit" in reason or "would give" in reason for reason in chosen.reasons)


def test_states_are_those_allowed_and_the_widest_where_speed_does_not_tell_them_apart() -> None:
    roomy = relay.plan(**SMALL, device="v100-sxm2-16gb", state_dtypes=["fp32"])
    assert roomy.options["state_dtype"] == "fp32"
    needed = roomy.expected.memory.host_total
    tight = relay.plan(**SMALL, device="v100-sxm2-16gb", host_memory=int(needed * 0.75))
    assert tight.options["state_dtype"] in ("bf16", "int8")
    quick = spec.machine("v100-sxm2-16gb").with_values("host", optimizer_bandwidth=1e30, bandwidth_achieved=1e30)
    assert relay.plan(**SMALL, device=quick).options["state_dtype"] == "fp32"


def test_where_nothing_fits_the_closest_is_named() -> None:
    with pytest.raises(relay.NoFeasiblePlan, match=r"The closest .* still lacks: The device needs"):
        relay.plan(**SMALL, device="v100-sxm2-16gb", capacity=10**6, state_dtypes=["fp32"])


def test_every_reason_is_what_simulating_that_one_change_gives() -> None:
    model: dict[str, Any] = {"layers": 3, "hidden": 64, "heads": 4, "vocabulary": 256, "seq": 32, "batch": 3}
    model |= {"device": "t4", "capacity": "1.8MB"}
    chosen = relay.plan(**model)
    matches = [re.fullmatch(r"(\w+)=(\w+) (?:would give (.+)%|does not fit)", reason) for reason in chosen.reasons[2:]]
    assert len(matches) > 8
    for reason in matches:
        assert reason is not None
        option, text, percent = reason.groups()
        value = ast.literal_eval(text) if text[0].isdigit() or text in ("True", "False") else text
        other = relay.simulate(**{**model, **chosen.options, option: value}, must_fit=False)
        assert other.fits == (percent is not None), reason.string
        if other.fits:
            change = other.tokens_per_second / chosen.expected.tokens_per_second - 1
            assert float(percent) == pytest.approx(100 * change, abs=0.051), reason.string
            assert change < 0.0205, reason.string


def test_one_slot_is_chosen_where_two_do_not_fit() -> None:
    options: dict[str, Any] = {**SMALL, "layers": 8, "batch": 6, "device": "t4", "precision": "fp32"}
    options |= {"state_dtypes": ["fp32"], "capacity": "14339584B"}
    chosen = relay.plan(**options)
    assert chosen.options["slots"] == 1
    assert "slots=2 does not fit" in chosen.reasons
    with pytest.raises(relay.NoFeasiblePlan):
        relay.plan(**options, slots=(2, 3))


@pytest.mark.parametrize("batch", [1, 5, 6, 8, 9])
def test_micro_batches_are_counted_as_they_come_out(batch: int) -> None:
    counts = microbatch_counts(batch)
    pieces = [tuple(RunShape(batch=batch, microbatches=count).pieces()) for count in counts]
    assert [len(sizes) for sizes in pieces] == counts
    assert len(set(pieces)) == len(pieces)


def test_a_plan_feeds_the_training(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    arguments = ["plan", "--layers", "2", "--hidden", "32", "--heads", "2", "--vocab", "256", "--seq", "16"]
    arguments += ["--batch", "2", "--precision", "fp32", "--capacity", "4MB", "--clip-grad-norm", "1.5"]
    result = CliRunner().invoke(main, [*arguments, "--out", str(path), "--json"])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    answer = json.loads(result.stdout)
    options = answer["options"]
    assert options["capacity"] == 4 * 10**6
    data = tmp_path / "text.txt"
    data.write_text("the quick brown fox jumps over the lazy dog. " * 200, encoding="utf-8")
    arguments = ["train", "--plan", str(path), "--data", str(data), "--steps", "2", "--no-sample", "--json"]
    trained = CliRunner().invoke(main, [*arguments, "--out", str(tmp_path / "run")])
    assert trained.exit_code == 0, trained.output
    used = json.loads(trained.stdout)["options"]
    assert {name: used[name] for name in options} == options
    assert (used["layers"], used["hidden"], used["seq"], used["batch"]) == (2, 32, 16, 2)
    assert json.loads(trained.stdout)["parameters"] == answer["expected"]["parameters"]


@pytest.mark.parametrize(
    ("model", "differs"),
    [
        (["--layers", "2", "--hidden", "32"], "a vocabulary of 50257, a head of its own"),
        (["--layers", "2", "--hidden", "32", "--vocab", "256", "--untied"], "a head of its own"),
        (["--layers", "2", "--hidden", "32", "--vocab", "256", "--ffn", "64"], "feed-forward networks of 64"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
@pytest.mark.sample("--layers-2---hidden-32---vocab-256---ffn-64-")
def test_a_plan_for_a_model_that_train_does_not_build_says_so(
    model: list[str], differs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["plan", *model, "--seq", "16", "--batch", "1", "--state-dtype", "fp32", "--slots", "2"]
    result = CliRunner().invoke(main, [*arguments, "--out", "plan.toml"])
    assert result.exit_code == 0, result.output
    written = Path("plan.toml").read_text(encoding="utf-8")
    header = " ".join(line.removeprefix("# ") for line in written.splitlines() if line.startswith("#"))
    for text in (result.stderr, header):
        assert differs in text
        assert "`relay train` would train another one" in text
        assert "Give the options to relay.Trainer" in text
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200, encoding="utf-8")
    training = ["train", "--plan", "plan.toml", "--data", "text.txt", "--steps", "1", "--no-sample"]
    trained = CliRunner().invoke(main, [*training, "--json"])
    assert trained.exit_code == 0, trained.output
    assert differs in trained.stderr
    assert "`relay train` would train another one with it: a GPT over bytes" in trained.stderr


@pytest.mark.parametrize("file", ["--plan", ""])
@pytest.mark.sample("--plan")
def test_a_plan_that_train_is_told_to_overrule_says_so_and_a_damaged_one_is_refused(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the data in the file: comments are for people, and may be gone."""
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 2, "vocabulary": 256, "seq": 16, "batch": 1}
    chosen = relay.plan(**options, slots=[2], state_dtypes=["fp32"], stashes=["device"])
    lines = [line for line in chosen.as_toml().splitlines() if not line.startswith("#")]
    Path("plan.toml").write_text("\n".join(lines), encoding="utf-8")
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200, encoding="utf-8")
    training = ["train", *[word for word in (file, "plan.toml") if word], "--data", "text.txt", "--steps", "1"]
    refusal = "This plan is for a model with 1 layers x hidden 32 in 2 heads."
    for more, message in ([], ""), (["--layers", "2"], refusal):
        trained = CliRunner().invoke(main, [*training, "--no-sample", "--json", *more])
        assert trained.exit_code == 0, trained.output
        assert ("This plan is for" in trained.stderr) == bool(message)
        assert message in trained.stderr
    for wrong in ("layers = 1.5", "unheard_of = 1", "hidden = 0"):
        name = wrong.partition(" ")[0]
        kept = [line for line in lines[lines.index("[planned]") :] if not line.startswith(f"{name} ")]
        Path("plan.toml").write_text("\n".join([*kept, wrong]), encoding="utf-8")
        refused = CliRunner().invoke(main, [*training, "--no-sample"])
        assert refused.exit_code == 2, refused.output
        assert "plan.toml" in refused.stderr
        assert name in refused.stderr


def test_a_width_of_four_times_hidden_is_the_model_of_train() -> None:
    options: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 2, "vocabulary": 256, "seq": 16, "batch": 1}
    chosen = relay.plan(**options, ffn=4 * 32, slots=[2], state_dtypes=["fp32"], stashes=["device"])
    assert chosen.caution is None
    model = GPT(256, 1, 32, 2, 16)
    assert chosen.expected.memory.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_the_options_of_a_plan_are_those_of_a_trainer() -> None:
    model: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 2, "vocabulary": 256, "seq": 16, "batch": 1}
    few: dict[str, Any] = {"slots": [2], "state_dtypes": ["fp32"], "stashes": ["device"]}
    limits: dict[str, Any] = {"loss_scale": "fixed", "clip_grad_norm": 1.0, "capacity": "4MB"}
    chosen = relay.plan(**model, **few, **limits, device="t4", precision="fp16")
    with relay.Trainer(GPT(256, 1, 32, 2, 16), **chosen.options) as trainer:
        assert trainer.loss_scale == 65536


# **** calibration ****


def device_with(tags: frozenset[str]) -> DeviceInfo:
    dtypes = frozenset({torch.float32, torch.int64, torch.bool})
    return DeviceInfo("a device", "", tags, dtypes, dtypes)


def test_a_device_that_wants_core_programs_is_calibrated_by_core_programs() -> None:
    programs = calibration._programs(((32, 16, 2),), "fp32", device_with(frozenset()))
    assert programs
    for program in programs:
        ops.check(program, device_with(frozenset()))


def test_the_fit_finds_the_constants_that_made_the_times() -> None:
    programs = calibration._programs(calibration.SHAPES, "fp32", device_with(frozenset({NATIVE})))
    machine = spec.machine("generic").with_values(
        "device", launch=3e-6, call=2e-5, ramp=1e6, attention=0.25, achieved_fp32=5e10, bandwidth_achieved=2e10
    )
    from backends.simulator.cost import CostModel

    model = CostModel(machine)
    found = calibration.fit(programs, [model.of(program).seconds for program in programs])
    assert found["error"] < 0.05
    assert found["rate"] == pytest.approx(5e10, rel=0.1)
    assert found["bandwidth"] == pytest.approx(2e10, rel=0.1)
    assert found["attention"] == pytest.approx(0.25, rel=0.15)


def test_a_calibration_is_a_description_that_the_simulator_takes(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(calibration.calibrate("cpu", rounds=1)), encoding="utf-8")
    found = relay.simulate(**SMALL, device=str(path), precision="fp32", microbatches=2)
    assert found.step_seconds > 0
    assert found.machine.device.unified
    assert found.timeline.link_bytes["down"] == 2 * 8 * 4 * 128 + 2 * 4  # the batch and the seeds; no weights
    with pytest.raises(spec.SpecError, match="does not compute in bf16"):
        relay.simulate(**SMALL, device=str(path), precision="bf16")


def test_layers_built_alike_are_captured_once() -> None:
    compiled = compiled_model_of(ModelShape(5, 32, 2, 64), 2, 16, COMPUTE["fp32"]).stages
    assert len({id(stage.captured) for stage in compiled[1:-1]}) == 1
