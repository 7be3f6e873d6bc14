"""What `relay.simulate` and `relay.plan` say: of launches, of what really runs, and of what was asked wrongly."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import relay
from hal import spec
from relay.cli import main
from relay.models import GPT
from relay.simulation.report import as_text
from tests.support.ideal_machines import ideal, run

TINY: dict[str, Any] = {"layers": 3, "hidden": 64, "seq": 32, "device": "t4", "precision": "fp32"}


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, [*arguments])


# **** launches ****


def test_launches_are_the_bottleneck_where_they_are_most_of_compute() -> None:
    many: dict[str, Any] = {"layers": 40, "hidden": 256, "vocabulary": 256, "seq": 128, "batch": 4}
    many["device"] = "rtx-4090"
    found = relay.simulate(**many, sensitivity=True)
    assert found.waterfall["launch"] > 0.6 * found.step_seconds
    assert found.bottleneck == "launch"
    assert max(found.sensitivity, key=lambda part: found.sensitivity[part]) == "launch"
    # A tenth less of each launch, and nothing else: where they are exposed, a tenth of their share of the step.
    share = found.waterfall["launch"] / found.step_seconds
    assert found.sensitivity["launch"] == pytest.approx(share / 10, rel=0.05)
    assert "bottleneck      launch (fewer, larger micro-batches" in as_text(found, None)
    larger = relay.simulate(**many, microbatches=1)
    assert larger.waterfall["launch"] < found.waterfall["launch"] / 3


def test_compute_without_launches_stays_the_bottleneck() -> None:
    found = run(ideal(link=1e14), layers=4, sensitivity=True)
    assert found.bottleneck == "compute"
    assert found.sensitivity["launch"] == pytest.approx(0, abs=1e-9)


# **** what runs ****


def test_what_is_reported_is_what_runs() -> None:
    found = relay.simulate(**TINY, batch=8, microbatches=5, layers_per_slot=7, recompute=99)
    assert found.run.microbatches == 4  # two sequences each
    assert found.run.layers_per_slot == 3
    assert found.run.recompute is True
    same = relay.simulate(**TINY, batch=8, microbatches=4, layers_per_slot=3)
    assert found.step_seconds == same.step_seconds
    assert found.memory == same.memory


@pytest.mark.parametrize(("asked", "expected"), [(0, False), (3, 3), (4, True), (5, True)])
def test_segments_that_recompute_are_the_embedding_and_the_layers(asked: int, expected: bool | int) -> None:
    found = relay.simulate(**TINY, recompute=asked)
    assert repr(found.run.recompute) == repr(expected)
    everything = relay.simulate(**TINY).timeline.flops
    assert (found.timeline.flops == everything) == (expected is True)


def test_a_module_too_runs_no_more_layers_a_slot_than_it_has() -> None:
    import torch

    with torch.device("meta"):
        module = GPT(vocabulary=64, layers=2, hidden=32, heads=2, sequence=16)
        ids = torch.zeros(2, 16, dtype=torch.int64)
    example = {"input_ids": ids, "labels": ids}
    found = relay.simulate(module, example=example, device="t4", layers_per_slot=5, recompute=7)
    assert (found.run.microbatches, found.run.layers_per_slot, found.run.recompute) == (2, 2, True)


def test_a_step_is_cut_into_single_sequences_unless_told_otherwise_as_on_the_command_line() -> None:
    assert relay.simulate(**TINY, batch=2).run.microbatches == 2
    assert relay.simulate(**TINY).run.microbatches == 8
    options = ["--layers", "3", "--hidden", "64", "--seq", "32", "--device", "t4", "--precision", "fp32"]
    answer = json.loads(invoke("simulate", *options, "--batch", "2", "--clip-grad-norm", "1.5", "--json").stdout)
    assert answer["run"]["microbatches"] == 2
    assert answer["run"]["clip_grad_norm"] == 1.5
    assert [answer["model"][name] for name in ("ffn", "kv_heads", "head_size")] == [256, 1, 64]


def test_a_simulation_and_a_plan_print_as_their_reports() -> None:
    found = relay.simulate(**TINY, batch=1)
    assert str(found) == as_text(found, None)
    assert len(repr(found)) < 200
    planned = relay.plan(**TINY, batch=1, state_dtypes=["fp32"], slots=[2], stashes=["device"])
    assert str(planned).splitlines() == list(planned.reasons)
    refused = relay.simulate(**TINY, capacity=10**5, must_fit=False)
    assert repr(refused).endswith("does not fit>")
    assert "it does not fit" in str(refused)


def test_a_plan_says_how_much_a_printed_change_may_give_and_none_gives_more() -> None:
    planned = relay.plan(**{**TINY, "seq": 512}, batch=2)
    assert "the plainest within 2% of the fastest is chosen, so a change may give up to +2%" in planned.reasons[1]
    gains = [float(reason.split("give ")[1].rstrip("%")) for reason in planned.reasons[2:] if "give" in reason]
    assert len(gains) > 3
    assert max(gains) <= 2.1


# **** asked wrongly ****


@pytest.mark.parametrize(
    ("name", "hint"),
    [("vocab", "vocabulary"), ("micro_batches", "microbatches")],
)
def test_an_unknown_keyword_is_refused_with_the_one_it_resembles(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=rf"simulate\(\) takes no '{name}'\. .*'{hint}'"):
        relay.simulate(**TINY, **{name: 1})


@pytest.mark.parametrize(("former", "present"), [("sequence", "seq"), ("clip", "clip_grad_norm")])
def test_a_former_keyword_is_refused_with_its_present_name(former: str, present: str) -> None:
    with pytest.raises(TypeError, match=rf"relay.simulate\(\) takes no '{former}'. It is called '{present}' now"):
        relay.simulate(layers=2, hidden=64, **{former: 1})


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"vocab": 256}, TypeError, r"plan\(\) takes no 'vocab'\. Did you mean 'vocabulary'"),
        ({"state_dtype": "fp32"}, TypeError, "Did you mean 'state_dtypes'"),
        ({"quality": 3}, TypeError, r"plan\(\) takes no 'quality'\. It takes model, device"),
        ({"state_dtypes": "fp32"}, TypeError, r"give a list, such as \['fp32'\]"),
        ({"slots": 2}, TypeError, r"give a list, such as \[2\]"),
        ({"slots": ()}, ValueError, "none were: slots="),
        ({"stashes": ["disk"]}, ValueError, "stash='disk' must be one of"),
    ],
)
def test_a_plan_asked_wrongly_says_so_in_its_own_name(
    more: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        relay.plan(**TINY, **more)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "gpt2", "--layers", "3"], "model names a model with sizes of its own, and layers would"),
        (["--model", "gpt2", "--vocab", "300", "--untied"], "and vocabulary and tied would"),
        (["--model", "gpt2", "--vocab", "50257"], "and vocabulary would change them"),
        (["--model", "gpt2", "--config", "c.json"], "model and config both name a model"),
        (["--config", "c.json", "--hidden", "64"], "config names a model with sizes of its own, and hidden would"),
        (["--model", "gpt2", "--device", "v100-sxm2-16gb", "--precision", "bf16"], "does not compute in bf16"),
        (["--model", "gpt2", "--device", "nothing.toml"], "cannot be read"),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_what_is_asked_wrongly_exits_with_two(command: str, options: list[str], message: str) -> None:
    result = invoke(command, *options)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--csv", "table.csv"], "--csv is for a comparison"),
        (["--price", "2.5/h"], "--price is for a comparison"),
        (["--presets"], "--presets lists the presets"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(options: list[str], message: str) -> None:
    result = invoke("simulate", "--model", "gpt2", *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_loss_scale_without_effect_is_noted() -> None:
    assert relay.simulate(**TINY, loss_scale="fixed").notes == (
        "loss_scale='fixed' has no effect in fp32: only fp16 scales its loss.",
    )
    assert relay.simulate(**{**TINY, "precision": "fp16"}, loss_scale="fixed").notes == ()


def test_parts_beside_a_whole_machine_and_an_example_without_a_module_are_refused() -> None:
    whole = {**TINY, "device": spec.machine("t4")}
    for part in ({"link": "pcie-4-x16"}, {"host": "generic"}, {"software": "fused"}):
        with pytest.raises(spec.SpecError, match="is a whole Machine"):
            relay.simulate(**whole, **part)
        with pytest.raises(spec.SpecError, match="is a whole Machine"):
            relay.plan(**whole, **part)
    with pytest.raises(ValueError, match=r"example= is for an nn\.Module"):
        relay.simulate(**TINY, example={})


def test_a_device_file_without_link_or_host_says_what_to_add(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    power = 'power_idle = "10W"\npower_busy = "100W"\n'
    path.write_text(f'kind = "device"\nmemory = "8GB"\nbandwidth = "100GB/s"\npeak_fp32 = "5TFLOPS"\n{power}')
    result = invoke("simulate", "--model", "gpt2", "--device", str(path))
    assert result.exit_code == 2
    assert "does not say which link it has. Add link =" in result.stderr
    assert "--link" in result.stderr
    result = invoke("simulate", "--model", "gpt2", "--device", str(path), "--link", "pcie-4-x16")
    assert "which host it has" in result.stderr
    path.write_text("memory = = 3")
    assert invoke("simulate", "--model", "gpt2", "--device", str(path)).exit_code == 2


def test_a_trace_for_a_folder_that_is_not_there_names_the_folder(tmp_path: Path) -> None:
    small = ["--layers", "1", "--hidden", "64", "--seq", "16", "--batch", "1", "--device", "t4"]
    result = invoke("simulate", *small, "--trace", str(tmp_path / "absent" / "x.json"))
    assert result.exit_code == 1
    assert result.stderr.strip() == f"relay: There is no folder to write x.json in: '{tmp_path / 'absent'}'"
