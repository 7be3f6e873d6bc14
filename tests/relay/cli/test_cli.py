"""The command line: exit codes, one object with --json, run files, and what is written where."""

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

from relay.cli.compile_notice import compile_notices
from relay.cli.training_run import learning_rate
from relay.models import GPT, gpt_folder
from relay.trainer import Trainer
from tests.support.command_line import only_object, relay
from tests.support.processes import ready_processes

TINY = ["--layers", "3", "--hidden", "16", "--heads", "2", "--seq", "16"]
TINY += ["--batch", "4", "--microbatches", "2", "--steps", "3", "--no-sample"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    return file


@pytest.fixture
def tiny(text: Path, tmp_path: Path) -> list[str]:
    return [*TINY, "--data", str(text), "--out", str(tmp_path / "out")]


# **** all commands ****


@pytest.mark.parametrize("command", [[], ["devices"], ["train"], ["sample"], ["simulate"], ["plan"], ["calibrate"]])
def test_help_explains_and_shows_how(command: list[str]) -> None:
    result = relay(*command, "--help")
    assert result.exit_code == 0
    assert "relay train" in result.stdout or "Examples:" in result.stdout


def test_help_comes_quickly_because_torch_is_not_imported() -> None:
    script = "import sys, relay.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize(
    "wrong", [["fly"], ["train", "--fly"], ["train", "--layers", "0"], ["sample", "--bytes", "many"]]
)
def test_being_asked_wrongly_is_exit_code_2_with_usage_on_standard_error(wrong: list[str]) -> None:
    result = relay(*wrong)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage:" in result.stderr


def test_being_asked_wrongly_with_json_still_answers_one_object() -> None:
    result = relay("train", "--layers", "none", "--json")
    assert result.exit_code == 2
    assert "--layers" in only_object(result)["error"]


# **** devices ****


def test_devices_shows_the_cpu_with_a_passed_self_test() -> None:
    assert "✓ cpu" in relay("devices").stdout
    (cpu,) = [device for device in only_object(relay("devices", "--json"))["devices"] if device["name"] == "cpu"]
    assert cpu["available"]
    assert cpu["description"]


def test_devices_does_not_show_a_simulated_one_as_it_does_hardware() -> None:
    listed = relay("devices").stdout
    assert "~ sim " in listed
    assert "✓ sim" not in listed
    rows = {row["name"]: row["simulated"] for row in only_object(relay("devices", "--json"))["devices"]}
    assert [name for name, simulated in rows.items() if simulated] == ["sim"]


# **** train ****


def test_train_learns_saves_and_prints_a_summary(tiny: list[str], tmp_path: Path) -> None:
    result = relay("train", *tiny, "--steps", 30, "--sample")
    assert result.exit_code == 0, result.stderr
    for part in (
        "held-out loss",
        "device memory",
        "plain training",
        "optimizer",
        "model.safetensors",
        "def ",
    ):
        assert part in result.stdout
    assert "loss" in result.stderr
    model = gpt_folder.load(tmp_path / "out")
    assert len(model.blocks) == 3


def test_train_with_json_prints_one_object_with_the_figures(tiny: list[str]) -> None:
    result = relay("train", *tiny, "--json")
    assert result.exit_code == 0, result.stderr
    answer = only_object(result)
    assert answer["steps"] == 3
    assert answer["loss_first"] == pytest.approx(5.5, abs=0.3)
    assert answer["held_out_after"] < answer["held_out_before"]
    assert answer["device_peak_bytes"] > 0
    assert 16 * answer["parameters"] <= answer["baseline_device_bytes"]
    assert answer["options"]["hidden"] == 16
    assert "sample" not in answer


def test_compiling_is_logged_and_shown_as_a_line_or_in_the_bar() -> None:
    """A step with a shape that was not there before compiles; one that repeats it does not."""
    lines: list[str] = []
    torch.manual_seed(0)
    logger = logging.getLogger("relay")
    before = (logger.level, list(logger.handlers))
    with tqdm(total=1, file=io.StringIO()) as bar, compile_notices(lines.append) as notice:
        with contextlib.closing(Trainer(GPT(layers=2, hidden=8, heads=2, sequence=8), microbatches=1)) as trainer:
            for length in (8, 8, 4):
                text = torch.zeros(2, length, dtype=torch.long)
                trainer.step({"input_ids": text, "labels": text})
                notice.bar = bar
    assert lines == ["compiling for training on micro-batches of 2x8, 2x8"]
    assert bar.postfix == "compiling"
    assert (logger.level, logger.handlers) == before


def test_the_same_options_give_the_same_losses_and_another_seed_gives_others(tiny: list[str]) -> None:
    first, again, other = (only_object(relay("train", *tiny, "--json", "--seed", seed)) for seed in ("7", "7", "8"))
    assert first["loss_last"] == again["loss_last"]
    assert first["held_out_after"] == again["held_out_after"]
    assert first["loss_first"] != other["loss_first"]


def test_the_saved_weights_are_those_that_the_held_out_loss_was_measured_with(
    tiny: list[str], text: Path, tmp_path: Path
) -> None:
    from relay.cli.text_data import TextData, load_text

    answer = only_object(relay("train", *tiny, "--json"))
    model = gpt_folder.load(tmp_path / "out")
    batches = TextData(load_text(text), 16, 4).held_out(8)
    with torch.no_grad():
        loss = sum(model(**batch).loss.item() for batch in batches) / 8
    assert loss == pytest.approx(answer["held_out_after"], rel=1e-5)


def test_a_run_file_gives_options_and_the_command_line_wins(tmp_path: Path, tiny: list[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text('steps = 2\nlr = 1\nlayers = 5\ncapacity = "1GB"\nstash = "host"\nsample = false\n')
    without_layers = tiny[2:]
    answer = only_object(relay("train", file, *without_layers, "--lr", "0.001", "--json"))
    assert answer["options"]["layers"] == 5
    assert answer["options"]["capacity"] == 10**9
    assert answer["options"]["stash"] == "host"
    assert answer["options"]["lr"] == 0.001
    assert answer["steps"] == 3  # given on the command line


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("layer = 4", ["layer", "run.toml", "Known keys", "layers"]),
        ("layers = 4.5", ["layers", "run.toml", "4.5"]),
        ("layers = true", ["layers", "run.toml", "True"]),
        ("layers = 0", ["layers", "run.toml", "0"]),
        ('stash = "moon"', ["stash", "run.toml", "moon"]),
        ('capacity = "256MX"', ["capacity", "run.toml", "256MX"]),
        ("json = true", ["json", "run.toml"]),
        ("[train]\nsteps = 3", ["train", "run.toml"]),
        ("steps = = 3", ["run.toml", "not valid TOML", "line 1"]),
    ],
)
def test_a_wrong_run_file_is_exit_code_2_naming_key_and_file(content: str, named: list[str], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(content)
    result = relay("train", file)
    assert result.exit_code == 2
    for word in named:
        assert word in result.stderr


def test_a_run_file_that_is_not_there_is_exit_code_1(tmp_path: Path) -> None:
    result = relay("train", tmp_path / "run.toml", "--json")
    assert result.exit_code == 1
    assert only_object(result)["type"] == "FileNotFoundError"
    assert "run.toml" in result.stderr


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--batch", "3", "--microbatches", "4"], "--microbatches 4"),
        (["--hidden", "30", "--heads", "4"], "multiple of --heads; received 30 and 4."),
        (["--capacity", "lots"], "lots"),
        (["--slots", "0"], "--slots"),
        (["--lr", "0"], "--lr"),
    ],
)
def test_options_that_cannot_be_meant_are_exit_code_2(extra: list[str], message: str, tiny: list[str]) -> None:
    result = relay("train", *tiny, *extra)
    assert result.exit_code == 2
    assert message in result.stderr


def test_numbers_that_contradict_each_other_are_named_with_the_file_that_they_come_from(tmp_path: Path) -> None:
    plan, run_file = tmp_path / "plan.toml", tmp_path / "run.toml"
    plan.write_text("hidden = 96\nheads = 12\nmicrobatches = 8\n", encoding="utf-8")
    run_file.write_text("batch = 6\n", encoding="utf-8")
    overridden = relay("train", "--plan", plan, "--hidden", "100")
    assert overridden.exit_code == 2
    assert f"received 100 and 12 (from '{plan}')" in overridden.stderr
    assert "received 30 and 4 (the default)" in relay("train", "--hidden", "30").stderr
    text = relay("train", run_file, "--plan", plan).stderr
    assert f"--batch 6 (from '{run_file}') cannot be cut into --microbatches 8 (from '{plan}')" in text


def test_keep_last_without_checkpoints_to_keep_is_refused(tiny: list[str]) -> None:
    result = relay("train", *tiny, "--keep-last", "3")
    assert result.exit_code == 2
    assert "--keep-last goes with --checkpoint-every" in result.stderr


@pytest.mark.parametrize(
    ("extra", "kind", "message"),
    [
        (["--data", "not/there"], "DataError", "There is no file or folder 'not/there'"),
        (["--seq", "8000"], "DataError", "shorter sequences"),
        (["--device", "warp:9"], "Unavailable", "warp"),
        (["--capacity", "1kB"], "OutOfMemory", "capacity"),
    ],
)
def test_what_cannot_be_done_is_exit_code_1_with_one_message_and_nothing_written(
    extra: list[str], kind: str, message: str, tiny: list[str], tmp_path: Path
) -> None:
    result = relay("train", *tiny, *extra, "--json")
    assert result.exit_code == 1
    assert only_object(result)["type"] == kind
    assert message in only_object(result)["error"]
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_found_before_the_training(tiny: list[str], text: Path) -> None:
    result = relay("train", *tiny, "--out", text / "out")
    assert result.exit_code == 1
    assert str(text) in result.stderr


def test_the_learning_rate_warms_up_then_falls_to_a_tenth() -> None:
    rates = [learning_rate(step, 400, 1.0) for step in range(400)]
    assert rates[0] == pytest.approx(1 / 40)
    assert max(rates) == rates[39] == 1.0
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert learning_rate(0, 1, 1.0) == 1.0


# **** the end of a run ****


def test_resuming_a_run_that_has_ended_runs_no_step_and_saves_the_same_model(tiny: list[str], tmp_path: Path) -> None:
    long = [*tiny, "--checkpoint-every", "2", "--resume"]
    first = only_object(relay("train", *long, "--json"))
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    (tmp_path / "out" / "model.safetensors").unlink()  # as after a power cut between the last checkpoint and the end
    trace = tmp_path / "trace.json"
    again = relay("train", *long, "--sample", "--trace", trace)
    assert again.exit_code == 0, again.stderr
    assert "This run has ended: all of its 3 steps are done." in again.stderr
    assert "No trace is written" in again.stderr
    assert not trace.exists()
    assert "all 3 were done before; none was run" in again.stdout
    assert "training loss" not in again.stdout
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights
    answer = only_object(relay("train", *long, "--json"))
    assert (answer["steps"], answer["steps_now"], answer["loss_last"]) == (3, 0, None)
    assert answer["held_out_before"] == answer["held_out_after"] == first["held_out_after"]


def test_a_device_that_reports_no_peak_is_summarised_without_a_share(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from relay.cli import training_run

    figures = only_object(relay("train", *tiny, "--json")) | {"device_peak_bytes": 0}
    monkeypatch.setattr(training_run, "train_gpt", lambda options, log: figures)
    result = relay("train", *tiny)
    assert result.exit_code == 0, result.stderr
    assert "device memory   not reported by the device; plain training would have needed" in result.stdout


# **** as a person runs it ****


def test_the_module_form_trains_and_samples_with_a_clean_standard_output(tiny: list[str], tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "relay", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        return ready_processes.run(command, tmp_path, environment, timeout=300)

    trained = run("train", *tiny, "--json")
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout)["steps"] == 3
    assert "training" in trained.stderr
    failed = run("sample", "nowhere")
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert failed.stderr.startswith("relay: There is no trained model in 'nowhere'")


# **** relay train: what it passes on ****


def test_a_clipped_run_in_bf16_with_small_states_trains_and_leaves_a_trace(tiny: list[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    options = ["--precision", "bf16", "--state-dtype", "int8", "--clip-grad-norm", "0.5", "--trace", trace]
    result = only_object(relay("train", *tiny, *options, "--json"))
    assert result["options"]["clip_grad_norm"] == 0.5
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    tracks = {event["args"]["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "M"}
    assert tracks >= {"compute", "update"}
    assert all(event["dur"] >= 0 for event in spans)


def test_a_clip_of_nothing_is_asked_wrongly(tiny: list[str]) -> None:
    assert relay("train", *tiny, "--clip-grad-norm", "0").exit_code == 2
